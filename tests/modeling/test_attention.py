"""Masks against a loop over positions."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from dflash.modeling.attention_dflash import BlockAttention, join_sink, visible_keys


def seen(query, key, causal, window):
    """Whether position `query` sees position `key`, by the words of the rule."""
    if causal and key > query:
        return False
    return window is None or abs(query - key) < window


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
@pytest.mark.parametrize(("block", "keys"), [(1, 1), (4, 4), (4, 5), (8, 23)])
def test_visible_keys_equal_the_loop(causal, window, block, keys):
    expected = [[seen(query, key, causal, window) for key in range(keys)] for query in range(keys - block, keys)]
    assert visible_keys(block, keys, causal, window).tolist() == expected


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_forms_of_a_mask(name):
    keys = torch.zeros(1, 2, 10, 8)
    padding = torch.ones(1, 12)
    padding[0, :4] = 0
    attention = BlockAttention(None, name, 4, padding, torch.float32)
    mask = attention.mask(False, None, keys)
    hidden = torch.zeros(4, 10, dtype=torch.bool)
    hidden[:, :2] = True
    found = ~mask[0, 0] if name == "sdpa" else mask[0, 0] == torch.finfo(torch.float32).min
    assert torch.equal(found, hidden)
    assert attention.mask(False, None, keys) is mask


def test_no_mask_where_none_is_needed():
    keys = torch.zeros(1, 2, 10, 8)
    attention = BlockAttention(None, "sdpa", 4, None, torch.float32)
    assert attention.mask(False, None, keys) is None
    assert attention.mask(False, 10, keys) is None
    assert attention.mask(False, 9, keys) is not None
    assert attention.mask(True, None, keys) is not None


class Module(torch.nn.Module):
    num_key_value_groups = 2


@pytest.mark.parametrize("form", ["none", "bool", "additive"])
def test_a_sink_is_one_more_logit_without_a_value(form):
    """Against softmax over the visible scores and the sink, weight by weight."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    sink, visible = torch.randn(4), torch.rand(1, 1, 3, 9) > 0.3
    mask = {"none": None, "bool": visible}.get(form, torch.zeros(1, 1, 3, 9).masked_fill(~visible, -torch.inf))
    joined = join_sink(sink, query, key, value, mask)
    output, _ = eager_attention_forward(Module(), query, *joined, scaling=0.5)
    for row in range(2):
        for head in range(4):
            for slot in range(3):
                seen = [i for i in range(9) if form == "none" or visible[0, 0, slot, i]]
                scores = [(0.5 * query[row, head, slot] @ key[row, head // 2, i]).exp() for i in seen]
                total = sum(scores) + sink[head].exp()
                expected = sum(s / total * value[row, head // 2, i] for s, i in zip(scores, seen, strict=True))
                torch.testing.assert_close(output[row, slot, head], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2"])
def test_implementations_that_take_no_sink_are_named(name):
    with pytest.raises(ValueError, match=f"attention_sink_bias.*{name}"):
        BlockAttention(None, name, 4, None, torch.float32).check_sink()


def test_padding_that_is_too_short_is_named():
    attention = BlockAttention(None, "sdpa", 4, torch.ones(1, 8), torch.float32)
    with pytest.raises(ValueError, match="8 positions of 10 keys"):
        attention.mask(True, None, torch.zeros(1, 2, 10, 8))
    with pytest.raises(ValueError, match="rows, keys"):
        BlockAttention(None, "sdpa", 4, torch.ones(1, 1, 4, 8), torch.float32)
