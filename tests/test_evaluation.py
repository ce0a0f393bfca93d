"""Evaluation against scripted drafters, whose acceptance is known."""

import pytest
import torch

from dflash.evaluation import Decoded, Decoding, decode, prompts_of, real_tau, score, slots_of
from dflash.training.documents import Document
from tiny import ScriptedDrafter, plain, tiny_drafter, tiny_prompt, tiny_target


def scripted(target, prompt, new, wrong):
    return tiny_drafter(cls=ScriptedDrafter).script(plain(target, prompt, new + 8), wrong)


def test_a_perfect_drafter_has_tau_of_a_block():
    target, prompt = tiny_target(), tiny_prompt(6)
    draft = scripted(target, prompt, 41, lambda calls: None)
    assert real_tau(draft, target, [prompt], max_new_tokens=41) == 8.0
    assert real_tau(draft, target, [prompt[0]], max_new_tokens=41, block_size=4) == 4.0


def test_tau_pools_the_rounds_of_all_prompts():
    """Five rounds of 8 and twenty of 2 make 80 tokens in 25 rounds, not the mean of 8 and 2."""
    target, prompts = tiny_target(), [tiny_prompt(6), tiny_prompt(9, seed=5)]
    texts = [plain(target, prompt, 60) for prompt in prompts]
    draft = tiny_drafter(cls=ScriptedDrafter).script(texts[0], lambda calls: None if calls < 5 else 1)
    settings, found = Decoding(max_new_tokens=41), []
    for prompt, text in zip(prompts, texts, strict=True):
        draft.text = text
        found.append(decode(draft, target, prompt, settings))
    assert found[0].emitted == [8] * 5 and found[1].emitted == [2] * 20
    total = score(found, 8)
    assert (total.tau, total.rounds, total.new_tokens, total.texts) == (80 / 25, 25, 82, 2)
    assert total.acceptance[:2] == [1.0, 5 / 24] and total.acceptance[6] == pytest.approx(5 / 22)


def test_slots():
    """Budget 12: one token from the prompt, then blocks of 4 within the 11 left."""
    assert slots_of([4, 2, 4, 1], [3, 3, 3, 0], 12) == [(3, 3), (1, 3), (3, 3), (0, 0)]
    assert slots_of([4, 2, 3, 2], [3, 3, 3, 1], 12) == [(3, 3), (1, 3), (2, 3), (1, 1)]
    assert slots_of([4, 2], [3, 2], 12) == [(3, 3)]  # ended by a stop token
    assert slots_of([], [], 12) == [] == slots_of([], [], 1)


@pytest.mark.parametrize("stop", [False, True])
def test_slots_are_those_that_the_target_verified(stop):
    target, prompt, widths = tiny_target(), tiny_prompt(6), []
    text = plain(target, prompt, 60)
    draft = tiny_drafter(cls=ScriptedDrafter).script(text, lambda calls: (None, 2, 0, 4)[calls % 4])
    if stop:
        target.generation_config.eos_token_id = text[0, 6 + 21].item()
    hook = target.register_forward_hook(lambda module, inputs, output: widths.append(output.logits.shape[1]))
    found = decode(draft, target, prompt, Decoding(max_new_tokens=40))
    hook.remove()
    expected = [(count - 1, width - 1) for count, width in zip(found.emitted, widths[1:], strict=True)]
    assert (len(found.tokens) < 40) is stop
    assert found.slots == (expected[:-1] if stop else expected)


def test_comparing_with_plain_decoding():
    target, prompt = tiny_target(), tiny_prompt(6)
    found = decode(tiny_drafter(), target, prompt, Decoding(max_new_tokens=20, compare=True))
    assert found.identical is True and found.plain_tokens == 20 and found.plain_seconds > 0
    sampled = decode(tiny_drafter(), target, prompt, Decoding(max_new_tokens=20, compare=True, temperature=1.0))
    assert sampled.identical is None and sampled.plain_tokens == 20
    total = score([found, sampled], 8)
    assert (total.identical, total.different) == (1, 0)
    assert total.speedup == pytest.approx(total.tokens_per_second / total.plain_tokens_per_second)


def test_sampling_follows_the_seed():
    target, draft, prompt = tiny_target(), tiny_drafter(), tiny_prompt(6)
    settings = Decoding(max_new_tokens=30, temperature=1.0)
    first, same, other = (decode(draft, target, prompt, settings, seed).tokens for seed in (3, 3, 4))
    assert first == same != other


def test_the_training_drafter_is_left_as_it_was():
    target, draft = tiny_target(), tiny_drafter().train()
    state = torch.get_rng_state()
    real_tau(draft, target, [tiny_prompt(5)], max_new_tokens=10)
    assert draft.training and all(parameter.requires_grad for parameter in draft.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_texts_that_end_at_once():
    target, prompt = tiny_target(), tiny_prompt(6)
    target.generation_config.eos_token_id = plain(target, prompt, 1)[0, -1].item()
    assert real_tau(tiny_drafter(), target, [prompt]) == 1.0
    assert score([Decoded([3], [], [], 0.5)], 8).tau is None
    with pytest.raises(ValueError, match="no prompts"):
        real_tau(tiny_drafter(), target, [])


def test_prompts_of_documents():
    ids = torch.tensor([4, 5, 6, 7])
    masks = [[0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
    documents = [Document(str(i), ids, torch.tensor(mask).bool()) for i, mask in enumerate(masks)]
    assert [prompt.tolist() for prompt in prompts_of(documents)] == [[4, 5]]


def test_a_score_in_one_line():
    found = Decoded(list(range(10)), [4, 3, 2], [(3, 3), (2, 3), (1, 3)], 2.0, 4.0, 10, True)
    line = str(score([found], 5))
    assert line == (
        "tau 3.00, 10 tokens in 3 rounds, 5.0 tok/s, plain 2.5 tok/s, so 2.00x, 1 of 1 texts identical; "
        "accepted by slot: 100% 67% 33% -"
    )
