"""Every family of targets decodes exactly, whatever its cache keeps, or is refused for what it lacks."""

import random

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from dflash.modeling.configuration_dflash import DFlashConfig
from dflash.modeling.modeling_dflash import DFlashDraftModel
from dflash.modeling.pairing_dflash import check_pair
from dflash.modeling.sampling_dflash import DraftProposal
from dflash.modeling.target_dflash import TargetSession
from families import FAMILIES, LAYERS, REFUSED, VOCABULARY, WIDTH, WINDOW, build_target, exists

BLOCK = 5
BUDGET = 33
TAPS = [0, 1, LAYERS - 1]
STATEFUL = ["qwen3_5_wrapper", "kimi_linear", "nemotron_h", "falcon_h1"]

# Accepted per round: every position rejected in turn, then nothing and everything several times in a row.
SCRIPT = [*range(BLOCK), 0, 0, 0, BLOCK - 1, BLOCK - 1, 0, 2]


class ScriptedDraft(DFlashDraftModel):
    """A real drafter that proposes the target's own continuation, wrong after as many tokens as its script says."""

    def follow(self, continuation: list[int], script: list[int]):
        self.continuation, self.script = continuation, script
        self.seen, self.round = 1, 0
        return self

    def propose(self, hidden_states, anchor, output_head, pick):
        assert anchor.tolist() == [self.continuation[self.seen - 1]]
        tokens = self.continuation[self.seen : self.seen + hidden_states.shape[1] - 1]
        right = self.script[self.round % len(self.script)]
        tokens[right:] = [(token + 1) % VOCABULARY for token in tokens[right:]]
        self.seen, self.round = self.seen + right + 1, self.round + 1
        return DraftProposal(torch.tensor([tokens]))


def build_draft(**overrides) -> ScriptedDraft:
    settings = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "layer_types": ["full_attention"],
        "rope_theta": 10000.0,
        "num_target_layers": LAYERS,
        "block_size": BLOCK,
        "dflash_config": {"block_size": BLOCK, "mask_token_id": 3, "target_layer_ids": TAPS},
    }
    return ScriptedDraft(DFlashConfig(**(settings | overrides))).double().eval()


def prompt_ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def plain_tokens(target, ids, count: int) -> list[int]:
    output = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return output[0, ids.shape[1] :].tolist()


def scripted_counts(script, budget: int) -> list[int]:
    """What each round emits if it follows the script; the last rounds are cut by the budget."""
    counts, left = [], budget - 1
    while left:
        counts.append(min(script[len(counts) % len(script)] + 1, left))
        left -= counts[-1]
    return counts


def assert_exact(target, length: int, script=SCRIPT, budget: int = BUDGET, seed: int = 0) -> None:
    ids = prompt_ids(length, seed)
    reference = plain_tokens(target, ids, budget + 16)
    draft = build_draft().follow(reference, script)
    output = draft.spec_generate(
        target=target, input_ids=ids, max_new_tokens=budget, stop_token_ids=[], return_dict=True
    )
    assert output.sequences[0, length:].tolist() == reference[:budget]
    assert output.emitted[0].tolist() == scripted_counts(script, budget)


def skip_if_absent(family: str) -> None:
    if not exists(family):
        pytest.skip(f"the installed transformers has no {family}")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def target(family):
    skip_if_absent(family)
    return build_target(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(target):
    for length in (1, WINDOW, 21):
        assert_exact(target, length)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", STATEFUL)
def test_hybrids_over_seeds(family, seed):
    skip_if_absent(family)
    script = torch.randint(BLOCK, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    assert_exact(build_target(family, seed=seed + 1), 3 + 5 * seed, script, seed=seed)


def random_hybrid(seed: int, pick: random.Random):
    """A target like Qwen3.5 with 2 or 3 layers of random kinds, in random order and of random sizes."""
    family = pick.choice(["qwen3_5", "qwen3_5", "qwen3_next", "qwen3_5_moe"])
    kinds = ["linear_attention", "full_attention", *pick.choices(["linear_attention", "full_attention"], k=seed % 2)]
    pick.shuffle(kinds)
    heads = pick.choice([1, 2])
    return build_target(
        family,
        seed=seed,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_key_value_heads=pick.choice([1, 2, 4]),
        linear_conv_kernel_dim=pick.randint(2, 6),
        linear_num_key_heads=heads,
        linear_num_value_heads=heads * pick.choice([1, 2]),
        linear_key_head_dim=pick.choice([4, 8]),
        linear_value_head_dim=pick.choice([4, 8]),
    )


@pytest.mark.parametrize("seed", range(50))
def test_hybrids_over_seeds_and_shapes(seed):
    """Also prompts shorter than the convolution, chunks, and blocks of any size."""
    pick = random.Random(seed)
    target = random_hybrid(seed, pick)
    depth, block = target.config.num_hidden_layers, pick.randint(2, 8)
    taps = {"block_size": block, "mask_token_id": 3, "target_layer_ids": [0, depth - 1]}
    draft = build_draft(num_target_layers=depth, block_size=block, dflash_config=taps)
    script = [pick.randrange(block) for _ in range(20)]
    ids = prompt_ids(pick.choice([1, 2, 3, 5, 8, 13, 34]), seed)
    reference = plain_tokens(target, ids, 20 + block)
    output = draft.follow(reference, script).spec_generate(
        target=target,
        input_ids=ids,
        max_new_tokens=20,
        prefill_chunk_size=pick.choice([None, 1, 4]),
        stop_token_ids=[],
        return_dict=True,
    )
    assert output.sequences[0, ids.shape[1] :].tolist() == reference[:20]
    assert output.emitted[0].tolist() == scripted_counts(script, 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_hidden_states_after_each_layer(target):
    ids = prompt_ids(11, seed=1)
    positions = torch.arange(11)[None]
    with torch.inference_mode(), TargetSession(target, TAPS) as session:
        expected = target(input_ids=ids, position_ids=positions, output_hidden_states=True).hidden_states
        _, features = session.forward(ids, positions, logits_to_keep=1)
    torch.testing.assert_close(features, torch.cat([expected[tap + 1] for tap in TAPS], dim=-1))


@pytest.mark.parametrize("family", REFUSED)
def test_a_cache_that_cannot_roll_back_is_refused(family, target):
    with pytest.raises(ValueError, match=REFUSED[family][2]):
        check_pair(build_draft().config, target)


def test_encoder_decoder_is_refused():
    config = T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="not a decoder-only"):
        check_pair(build_draft().config, T5ForConditionalGeneration(config))


def test_a_model_without_head_is_refused():
    with pytest.raises(ValueError, match="no language model head"):
        check_pair(build_draft().config, build_target("llama").model)


def test_a_peft_like_wrapper_is_looked_through():
    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config, self.generation_config = model, model.config, model.generation_config

        def get_base_model(self):
            return self.model

        def forward(self, input_ids=None, **kwargs):
            return self.model(input_ids=input_ids, **kwargs)

        def generate(self, *args, **kwargs):
            return self.model.generate(*args, **kwargs)

    assert_exact(Wrapper(build_target("qwen3_5")), 9)


def test_the_target_is_left_as_it_was():
    target = build_target("nemotron_h")
    modules = list(target.modules())
    limits = [module.time_step_limit for module in modules if hasattr(module, "time_step_limit")]
    assert_exact(target, 9)
    assert limits == [module.time_step_limit for module in modules if hasattr(module, "time_step_limit")]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def test_two_sessions_on_one_target_do_not_disturb_each_other():
    target = build_target("qwen3_5")
    ids, other = prompt_ids(12, seed=2), prompt_ids(12, seed=3)
    positions = torch.arange(12)[None]
    with torch.inference_mode(), TargetSession(target, TAPS) as one, TargetSession(target, TAPS) as two:
        for session, tokens in ((one, ids), (two, other)):
            session.forward(tokens[:, :6], positions[:, :6], logits_to_keep=1)
            session.rollback(0)
        one.forward(ids[:, 6:10], positions[:, 6:10], logits_to_keep=4)
        two.forward(other[:, 6:10], positions[:, 6:10], logits_to_keep=4)
        one.rollback(2)
        two.rollback(3)
        logits, _ = one.forward(ids[:, 8:], positions[:, 8:], logits_to_keep=4)
        expected = target(input_ids=ids, position_ids=positions).logits[:, 8:]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("kept", "count"), [(1, 1), (4, 4)])
def test_a_state_is_not_taken_back_further_than_it_was_kept(kept, count):
    ids, positions = prompt_ids(4, seed=0), torch.arange(4)[None]
    with torch.inference_mode(), TargetSession(build_target("qwen3_5"), TAPS) as session:
        session.forward(ids, positions, logits_to_keep=kept)
        with pytest.raises(ValueError, match=f"{count} of 4 tokens cannot be taken back"):
            session.rollback(count)


def test_a_first_forward_can_be_taken_back_too():
    ids, positions = prompt_ids(8, seed=0), torch.arange(8)[None]
    target = build_target("qwen3_5")
    with torch.inference_mode(), TargetSession(target, TAPS) as session:
        session.forward(ids, positions, logits_to_keep=8)
        session.rollback(6)
        logits, _ = session.forward(ids[:, 2:], positions[:, 2:], logits_to_keep=6)
        expected = target(input_ids=ids, position_ids=positions).logits[:, 2:]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
