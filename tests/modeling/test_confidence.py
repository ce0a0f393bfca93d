"""Drafts cut to what the drafter is sure of: the target's tokens all the same, with fewer positions verified."""

import pytest
import torch

from dflash.modeling.drafting_dflash import DraftConfidence
from dflash.modeling.modeling_dflash import DFlashDraftModel
from dflash.modeling.sampling_dflash import Sampler
from families import build_target, exists
from tiny import MASK, plain, tiny_drafter, tiny_prompt, tiny_target

KINDS = {
    "plain": {},
    "samples from the anchor": {"sample_from_anchor": True},
    "selector": {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {
            **{"mask_token_id": MASK, "target_layer_ids": [0, 2], "conv_kernel_size": 2, "conv_group_size": 8},
            **{"selector_rank": 6, "selector_top_k": 4},
        },
    },
}


class Watched(DFlashDraftModel):
    """Keeps the joint probability of the most likely tokens of each proposal, computed slot by slot."""

    joint: list[list[float]]

    def propose(self, hidden_states, anchor, output_head, pick):
        slots = []

        def note(logits):
            rows = logits if logits.dim() == 2 else logits[0]
            slots.extend(row.double().softmax(-1).max().item() for row in rows)
            return pick(logits)

        proposal = super().propose(hidden_states, anchor, output_head, note)
        product, joint = 1.0, []
        for probability in slots:
            product *= probability
            joint.append(product)
        self.joint.append(joint)
        return proposal


def watched(**changes):
    draft = tiny_drafter(cls=Watched, **changes)
    draft.joint = []
    return draft


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [1e-9, 0.02, 0.2, 1.0])
def test_the_text_is_the_targets_and_the_cut_is_where_the_joint_probability_falls_below(kind, threshold):
    draft, target, ids = watched(**KINDS[kind]), tiny_target(), tiny_prompt(7)
    output = draft.spec_generate(target, ids, max_new_tokens=30, draft_confidence=threshold, return_dict=True)
    assert torch.equal(output.sequences, plain(target, ids, 30))
    left, most = 29, draft.config.proposals(None)
    expected, joints = [], iter(draft.joint)
    for emitted in output.emitted[0].tolist():
        sure = sum(joint >= threshold for joint in next(joints)) if left > 1 else 0
        expected.append(min(sure, most, left - 1))
        left -= emitted
    assert output.drafted[0].tolist() == expected
    if threshold == 1.0:
        assert set(expected) == {0} and output.tau == 1.0
    if threshold == 1e-9:
        assert max(expected) == most


def test_a_middling_threshold_cuts_some_drafts_and_not_others():
    draft, target, ids = tiny_drafter(), tiny_target(), tiny_prompt(7)
    output = draft.spec_generate(target, ids, max_new_tokens=60, draft_confidence=0.01, return_dict=True)
    assert len(set(output.drafted[0, :-1].tolist())) > 1


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "gemma3"])
def test_rounds_of_other_lengths_are_rolled_back_exactly(family):
    if not exists(family):
        pytest.skip(f"the installed transformers has no {family}")
    target, ids = build_target(family), tiny_prompt(9)
    output = tiny_drafter().spec_generate(target, ids, max_new_tokens=24, draft_confidence=0.1, return_dict=True)
    assert torch.equal(output.sequences, plain(target, ids, 24)) and output.drafted.sum() > 0


@pytest.mark.parametrize("parallel", [False, True])
def test_a_row_that_is_sure_keeps_the_others_slots(parallel):
    logits = torch.tensor([[[9.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[9.0, 0.0], [9.0, 0.0], [0.0, 0.0]]])
    pick = DraftConfidence(lambda scores: (scores.argmax(-1), None))
    for part in [logits] if parallel else logits.unbind(1):
        tokens, probabilities = pick(part)
        assert probabilities is None and torch.equal(tokens, part.argmax(-1))
    assert [pick.leading(threshold) for threshold in (0.2, 0.6, 0.9999, 1.0)] == [3, 2, 0, 0]


def test_generate_takes_it_too():
    draft, target, ids = tiny_drafter(), tiny_target(pad_token_id=None), tiny_prompt(7)
    options = dict(do_sample=False, return_dict_in_generate=True, max_new_tokens=12, draft_confidence=1.0)
    output = target.generate(ids, custom_generate=draft.custom_generate, **options)
    assert torch.equal(output.sequences, plain(target, ids, 12)) and set(output.drafted[0].tolist()) == {0}


def test_the_cut_does_not_depend_on_the_tokens_drawn():
    """Else the tokens that are verified would not follow the distribution that they are judged by."""
    logits = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(1))
    cuts, drawn = set(), set()
    for seed in range(30):
        sampler = Sampler(temperature=1.0, draft_temperature=1.0, generator=torch.Generator().manual_seed(seed))
        pick = DraftConfidence(sampler.pick)
        drawn.add(tuple(pick(logits)[0].flatten().tolist()))
        cuts.add(pick.leading(0.05))
    assert len(drawn) > 20 and len(cuts) == 1 and 0 < cuts.pop() < 5
