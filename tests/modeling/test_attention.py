"""Masks against a loop over positions."""

import pytest
import torch

from dflash.modeling.attention_dflash import BlockAttention, visible_keys


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


def test_padding_that_is_too_short_is_named():
    attention = BlockAttention(None, "sdpa", 4, torch.ones(1, 8), torch.float32)
    with pytest.raises(ValueError, match="8 positions of 10 keys"):
        attention.mask(True, None, torch.zeros(1, 2, 10, 8))
    with pytest.raises(ValueError, match="rows, keys"):
        BlockAttention(None, "sdpa", 4, torch.ones(1, 1, 4, 8), torch.float32)
