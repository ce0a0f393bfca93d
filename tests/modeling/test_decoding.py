"""Decoding is lossless: the same tokens as `generate`, whatever the drafter proposes."""

import threading

import pytest
import torch

from tiny import DEPTH, MASK, VOCAB, ScriptedDrafter, plain, tiny_drafter, tiny_prompt, tiny_target

FAMILIES = ("llama", "qwen3", "qwen3_sliding")


def decode(draft, target, ids, new, **options):
    return draft.spec_generate(target=target, input_ids=ids, max_new_tokens=new, return_dict=True, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
@pytest.mark.parametrize(("block_size", "shifted"), [(2, False), (5, False), (8, False), (1, True), (5, True)])
def test_greedy_equals_generate_with_a_random_drafter(family, layers, block_size, shifted):
    target = tiny_target(family, seed=block_size)
    draft = tiny_drafter(layers, block_size, seed=block_size, sample_from_anchor=shifted)
    for prompt in (1, 2, 10, 33, 80):
        ids = tiny_prompt(prompt, seed=prompt)
        output = decode(draft, target, ids, 24)
        assert torch.equal(output.sequences, plain(target, ids, 24))
        assert output.emitted.sum() == 23


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slot", [*range(7), None])
def test_every_number_of_accepted_tokens(family, slot):
    """A rejection at any slot, or none, leaves the target in the right state for all later rounds."""
    target = tiny_target(family)
    ids = tiny_prompt(12)
    text = plain(target, ids, 60)
    draft = tiny_drafter("mixed", cls=ScriptedDrafter).script(text, lambda _: slot)
    output = decode(draft, target, ids, 40)
    assert torch.equal(output.sequences, text[:, :52])
    full = 8 if slot is None else slot + 1
    assert output.emitted[0, :-1].tolist() == [full] * (output.emitted.shape[1] - 1)
    assert output.emitted.sum() == 39
    assert output.tau == pytest.approx(39 / output.emitted.shape[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("slot", [*range(8), None])
def test_every_number_of_accepted_tokens_of_a_drafter_that_samples_from_the_anchor(family, block_size, slot):
    """All slots of its block predict, so a round verifies and can emit one token more than a block has positions."""
    if slot is not None and slot >= block_size:
        return
    target = tiny_target(family)
    ids = tiny_prompt(12)
    text = plain(target, ids, 60)
    draft = tiny_drafter("mixed", block_size, cls=ScriptedDrafter, sample_from_anchor=True).script(text, lambda _: slot)
    output = decode(draft, target, ids, 40)
    assert torch.equal(output.sequences, text[:, :52])
    full = block_size + 1 if slot is None else slot + 1
    assert output.emitted[0, :-1].tolist() == [full] * (output.emitted.shape[1] - 1)
    assert output.emitted.sum() == 39


@pytest.mark.parametrize("seed", range(5))
def test_changing_acceptance_and_a_prompt_longer_than_the_windows(seed):
    target = tiny_target("qwen3_sliding", seed)
    ids = tiny_prompt(30, seed)
    text = plain(target, ids, 90)
    slots = [(7 * seed + 3 * i) % 8 for i in range(90)]
    draft = tiny_drafter("sliding", cls=ScriptedDrafter).script(
        text, lambda call: slots[call] if slots[call] < 7 else None
    )
    output = decode(draft, target, ids, 70)
    assert torch.equal(output.sequences, text[:, :100])
    assert output.emitted[0].max() > 4 > output.emitted[0].min()


@pytest.mark.parametrize("new", range(1, 18))
def test_budget_may_end_anywhere_in_a_block(new):
    target = tiny_target()
    ids = tiny_prompt(9)
    text = plain(target, ids, 40)
    draft = tiny_drafter(cls=ScriptedDrafter).script(text, lambda _: None)
    output = decode(draft, target, ids, new)
    assert torch.equal(output.sequences, text[:, : 9 + new])
    assert output.emitted.sum() == new - 1
    by_length = draft.spec_generate(target=target, input_ids=ids, max_length=9 + new)
    assert torch.equal(by_length, output.sequences)


@pytest.mark.parametrize("position", range(12))
@pytest.mark.parametrize("slot", [None, 2])
def test_stop_token_anywhere_in_a_block(position, slot):
    """Also as the very first token, as the bonus token, and when it would come again later."""
    target = tiny_target("qwen3")
    ids = tiny_prompt(5)
    text = plain(target, ids, 40)
    stop = text[0, 5 + position].item()
    draft = tiny_drafter(cls=ScriptedDrafter).script(text, lambda _: slot)
    output = decode(draft, target, ids, 24, stop_token_ids=[VOCAB + 5, stop])
    assert torch.equal(output.sequences, plain(target, ids, 24, eos_token_id=stop))
    assert output.sequences[0, -1] == stop and output.emitted.sum() == output.sequences.shape[1] - 6
    if output.emitted.numel() == 0:
        assert output.tau is None


def test_stop_tokens_default_to_the_generation_config():
    target = tiny_target()
    ids = tiny_prompt(5)
    text = plain(target, ids, 30)
    target.generation_config.eos_token_id = [text[0, 9].item(), VOCAB - 1]
    draft = tiny_drafter()
    assert torch.equal(decode(draft, target, ids, 30).sequences, plain(target, ids, 30))
    assert torch.equal(decode(draft, target, ids, 30, stop_token_ids=[]).sequences, text)
    target.generation_config.eos_token_id = text[0, 9].item()
    assert torch.equal(decode(draft, target, ids, 30).sequences, plain(target, ids, 30))
    by_int = decode(draft, target, ids, 30, stop_token_ids=text[0, 12].item()).sequences
    assert torch.equal(by_int, plain(target, ids, 30, eos_token_id=text[0, 12].item()))


def test_mask_ids_in_the_text_are_ordinary_tokens():
    """Nothing is found or removed by comparing with the mask id: it stands in the prompt and in the output here."""
    target = tiny_target()
    ids = tiny_prompt(12)
    text = plain(target, ids, 24)
    mask = text[0, 15].item()
    ids[0, 3] = mask
    text = plain(target, ids, 24)
    mask = text[0, 15].item()
    config = {"mask_token_id": mask, "target_layer_ids": [1, 2]}
    draft = tiny_drafter(dflash_config=config, cls=ScriptedDrafter).script(
        plain(target, ids, 40), lambda call: call % 7
    )
    output = decode(draft, target, ids, 24)
    assert torch.equal(output.sequences, text) and mask in output.sequences[0, 12:]


def test_left_padding_changes_nothing_but_the_prefix():
    target, draft = tiny_target(), tiny_drafter()
    ids = tiny_prompt(11)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)], dim=1)
    output = decode(draft, target, padded, 20, attention_mask=mask).sequences
    assert torch.equal(output[:, 4:], plain(target, ids, 20)) and torch.equal(output[:, :15], padded)


def test_block_size_one_is_plain_decoding_and_a_larger_one_warns():
    target, draft = tiny_target(), tiny_drafter(block_size=4)
    ids = tiny_prompt(6)
    output = decode(draft, target, ids, 10, block_size=1)
    assert torch.equal(output.sequences, plain(target, ids, 10)) and output.tau == 1
    with pytest.warns(UserWarning, match="block_size=9 exceeds the 4"):
        output = decode(draft, target, ids, 10, block_size=9)
    assert torch.equal(output.sequences, plain(target, ids, 10))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_attention_implementations_draft_the_same(implementation):
    target = tiny_target(dtype=torch.float32)
    ids = tiny_prompt(20)
    outputs = []
    for name in ("sdpa", implementation):
        draft = tiny_drafter("mixed", dtype=torch.float32)
        draft.set_attn_implementation(name)
        outputs.append(decode(draft, target, ids, 12))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert torch.equal(outputs[0].emitted, outputs[1].emitted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_drafter_and_target_may_differ_in_dtype(dtype):
    target, draft = tiny_target(dtype=torch.float32), tiny_drafter(dtype=dtype)
    ids = tiny_prompt(7)
    assert torch.equal(decode(draft, target, ids, 16).sequences, plain(target, ids, 16))


class Recorder:
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.reshape(-1).tolist())

    def end(self):
        self.ended += 1


def test_streamer_gets_the_prompt_then_every_token_once():
    target, ids, recorder = tiny_target(), tiny_prompt(6), Recorder()
    text = plain(target, ids, 30)
    draft = tiny_drafter(cls=ScriptedDrafter).script(plain(target, ids, 50), lambda call: call % 5)
    output = decode(draft, target, ids, 30, streamer=recorder)
    assert recorder.values[0] == ids[0].tolist()
    assert [token for value in recorder.values for token in value] == text[0].tolist() and recorder.ended == 1
    assert [len(value) for value in recorder.values[2:]] == output.emitted[0].tolist()


def test_streamer_ends_and_hooks_go_when_decoding_fails():
    target, recorder = tiny_target(), Recorder()
    draft = tiny_drafter(cls=ScriptedDrafter).script(plain(target, tiny_prompt(6), 50), lambda call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode(draft, target, tiny_prompt(6), 30, streamer=recorder)
    assert recorder.ended == 1
    assert not any(module._forward_hooks for module in target.modules())


def test_modes_are_restored_and_nothing_needs_grad():
    target, draft = tiny_target(), tiny_drafter()
    draft.train()
    sequences = draft.spec_generate(target=target, input_ids=tiny_prompt(4), max_new_tokens=6)
    assert draft.training and not sequences.is_inference()


def test_threads_share_a_target():
    target = tiny_target()
    results = {}

    def work(seed):
        ids = tiny_prompt(5 + seed, seed)
        results[seed] = decode(tiny_drafter(seed=seed), target, ids, 30).sequences

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert torch.equal(results[seed], plain(target, tiny_prompt(5 + seed, seed), 30))


BAD_ARGUMENTS = {
    "two rows": ({"input_ids": torch.zeros(2, 3, dtype=torch.long)}, "2 rows"),
    "no row axis": ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"\[1, P\]"),
    "empty prompt": ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"\[1, P\]"),
    "floats": ({"input_ids": torch.zeros(1, 3)}, "integers"),
    "id outside the vocabulary": ({"input_ids": torch.tensor([[1, VOCAB]])}, f"{VOCAB} rows"),
    "negative id": ({"input_ids": torch.tensor([[1, -1]])}, "-1"),
    "mask of another shape": ({"attention_mask": torch.ones(1, 2)}, "attention_mask"),
    "hole in the mask": ({"attention_mask": torch.tensor([[1, 0, 1]])}, "left"),
    "all padding": ({"attention_mask": torch.zeros(1, 3)}, "left"),
    "no budget": ({"max_new_tokens": None}, "max_new_tokens or max_length"),
    "zero budget": ({"max_new_tokens": 0}, "max_new_tokens=0"),
    "max_length within the prompt": ({"max_new_tokens": None, "max_length": 3}, "max_length=3"),
    "block of nothing": ({"block_size": 0}, "block_size"),
    "more than certain": ({"draft_confidence": 1.5}, "draft_confidence .* 1.5"),
    "no confidence": ({"draft_confidence": None}, "draft_confidence .* None"),
    "negative temperature": ({"temperature": -0.5}, "temperature"),
    "nan temperature": ({"temperature": float("nan")}, "temperature"),
    "draft temperature without sampling": ({"draft_temperature": 0.5}, "temperature > 0"),
    "top_p": ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
    "top_k": ({"temperature": 1.0, "top_k": -2}, "top_k"),
    "min_p": ({"temperature": 1.0, "min_p": 2.0}, "min_p"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_wrong_arguments_are_named(case):
    changes, message = BAD_ARGUMENTS[case]
    arguments = {"input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4, **changes}
    with pytest.raises(ValueError, match=message):
        tiny_drafter().spec_generate(target=tiny_target(), **arguments)


def test_settings_that_only_generate_applies_are_named():
    target, ids = tiny_target(), tiny_prompt(4)
    target.generation_config.repetition_penalty = 1.05
    with pytest.warns(UserWarning, match=r"repetition_penalty=1\.05"):
        tiny_drafter().spec_generate(target=target, input_ids=ids, max_new_tokens=3)


@pytest.mark.filterwarnings("error")
def test_an_ordinary_target_gives_no_warning():
    tiny_drafter().spec_generate(target=tiny_target(), input_ids=tiny_prompt(4), max_new_tokens=3)


def test_a_batch_encoding_is_explained():
    with pytest.raises(TypeError, match=r"\*\*inputs"):
        tiny_drafter().spec_generate(target=tiny_target(), input_ids={"input_ids": tiny_prompt(3)}, max_new_tokens=2)


def test_sampling_is_reproducible_and_speculates():
    target, ids = tiny_target(), tiny_prompt(8)
    text = plain(target, ids, 40)
    for draft_temperature in (0.0, 0.7):
        runs = []
        for _ in range(2):
            options = {"temperature": 0.8, "top_p": 0.9, "draft_temperature": draft_temperature}
            generator = torch.Generator().manual_seed(3)
            runs.append(decode(tiny_drafter(), target, ids, 30, generator=generator, **options))
        assert torch.equal(runs[0].sequences, runs[1].sequences) and runs[0].sequences.shape == (1, 38)
    sharp = tiny_drafter(cls=ScriptedDrafter).script(text, lambda _: None)
    assert decode(sharp, target, ids, 30, temperature=1e-4).tau > 4


def test_the_last_layer_may_be_a_tap():
    target = tiny_target()
    config = {"mask_token_id": MASK, "target_layer_ids": [0, DEPTH - 1]}
    ids = tiny_prompt(6)
    output = decode(tiny_drafter(dflash_config=config), target, ids, 12)
    assert torch.equal(output.sequences, plain(target, ids, 12))
