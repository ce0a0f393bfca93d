"""DFlash 2's parts against loops over positions, and a DFlash 2 drafter in the decode loop."""

import pytest
import torch

from dflash.modeling.correction_dflash import DFlashBlockConv
from dflash.modeling.sampling_dflash import Sampler
from tiny import DEPTH, MASK, plain, tiny_drafter, tiny_prompt, tiny_target

CORRECTION = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
DFLASH = {"mask_token_id": MASK, "target_layer_ids": [0, 2], **CORRECTION}


def correction_drafter():
    draft = tiny_drafter("sliding", is_causal=False, architectures=["DFlash2DraftModel"], dflash_config=DFLASH)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return draft


def test_convolution_equals_the_loop():
    conv = correction_drafter().layers[0].mlp_conv
    x = torch.randn(2, 5, 32).double()
    kernels = conv(x)
    delta = (x @ conv.kernel_projection.weight.T).reshape(2, 5, 2, 2, 4)
    for side in range(2):
        output = DFlashBlockConv.convolve(x, kernels[side])
        for row, position, channel in ((0, 0, 0), (1, 0, 31), (0, 3, 9), (1, 4, 20)):
            expected = 0
            for tap in range(2):
                if position - tap >= 0:
                    weight = conv.base_kernel[side, tap, channel] + delta[row, position, side, tap, channel // 8]
                    expected += weight * x[row, position - tap, channel]
            assert torch.allclose(output[row, position, channel], expected)


def test_selector_equals_the_loop():
    selector = correction_drafter().candidate_selector
    hidden, logits = torch.randn(1, 7, 32).double(), torch.randn(1, 7, 61).double()
    anchor = torch.tensor([5])
    tokens = selector(hidden, logits, anchor, lambda scores: (scores.argmax(-1), None)).tokens[0].tolist()
    previous = 5
    for slot in range(7):
        scores = {}
        for token in logits[0, slot].topk(4).indices.tolist():
            left = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ hidden[0, slot])
            scores[token] = (logits[0, slot, token] + left @ selector.successor_codebook[token]).item()
        previous = max(scores, key=scores.get)
        assert tokens[slot] == previous


def test_sampled_walk_reports_the_law_it_drew_from():
    draft = correction_drafter()
    hidden, logits = torch.randn(1, 7, 32).double(), torch.randn(1, 7, 61).double()
    sampler = Sampler(temperature=1.0, draft_temperature=0.8, generator=torch.Generator().manual_seed(0))
    proposal = draft.candidate_selector(hidden, logits, torch.tensor([5]), sampler.pick)
    assert torch.allclose(proposal.probabilities.sum(-1), torch.ones(1, 7))
    assert ((proposal.probabilities > 0).sum(-1) <= 4).all()
    assert (proposal.probabilities.gather(-1, proposal.tokens[..., None]) > 0).all()


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
def test_decoding_with_a_correction_head_is_lossless(family):
    target, ids = tiny_target(family), tiny_prompt(17)
    assert torch.equal(
        correction_drafter().spec_generate(target=target, input_ids=ids, max_new_tokens=24), plain(target, ids, 24)
    )
    assert len(target.get_decoder().layers) == DEPTH
