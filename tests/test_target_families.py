"""Every family of targets decodes exactly, whatever its cache keeps, or is refused for what it lacks."""

import pytest
import torch
from families import FAMILIES, LAYERS, VOCABULARY, WIDTH, WINDOW, build_target, exists

from dflash.modeling.configuration_dflash import DFlashConfig
from dflash.modeling.modeling_dflash import DFlashDraftModel
from dflash.modeling.sampling_dflash import DraftProposal
from dflash.modeling.target_dflash import TargetSession, check_pair

BLOCK = 5
BUDGET = 33
TAPS = [0, 1, LAYERS - 1]
REFUSED = {"jamba": "cannot continue its state over several tokens"}
STATEFUL = ["qwen3_next", "qwen3_5", "qwen3_5_wrapper", "qwen3_5_moe", "kimi_linear", "nemotron_h", "falcon_h1"]

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


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def target(family):
    if not exists(family):
        pytest.skip(f"the installed transformers has no {FAMILIES[family][0]}")
    return build_target(family)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
def test_tokens_are_those_of_generate(target):
    for length in (1, WINDOW - 1, WINDOW, 21):
        assert_exact(target, length)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", STATEFUL)
def test_hybrids_over_seeds(family, seed):
    if not exists(family):
        pytest.skip(f"the installed transformers has no {FAMILIES[family][0]}")
    script = torch.randint(BLOCK, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    assert_exact(build_target(family, seed=seed + 1), 3 + 5 * seed, script, seed=seed)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
def test_taps_are_the_hidden_states_after_each_layer(target):
    ids = prompt_ids(11, seed=1)
    positions = torch.arange(11)[None]
    with torch.inference_mode(), TargetSession(target, TAPS) as session:
        expected = target(input_ids=ids, position_ids=positions, output_hidden_states=True).hidden_states
        _, features = session.forward(ids, positions, logits_to_keep=1)
    torch.testing.assert_close(features, torch.cat([expected[tap + 1] for tap in TAPS], dim=-1))


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_continue_in_chunks_is_refused(family, target):
    with pytest.raises(ValueError, match=REFUSED[family]):
        build_draft().follow([], []).spec_generate(target=target, input_ids=prompt_ids(4, 0), max_new_tokens=4)
