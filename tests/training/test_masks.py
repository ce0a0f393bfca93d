"""The blocks of a packed batch see what decoding lets them see, and nothing else."""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dflash.training.blocks import BlockLayout
from dflash.training.masks import PackedAttention, visible_blocks

KINDS = [(causal, window) for causal in (False, True) for window in (None, 1, 3, 50)]


def random_layout(seed: int, block: int = 4) -> BlockLayout:
    """Three documents, with many and overlapping anchors in one and a single one in another."""
    generator = torch.Generator().manual_seed(seed)
    anchors = [torch.randperm(length, generator=generator)[:count].sort().values + 1
               for length, count in ((30, 19), (5, 1), (12, 10))]  # fmt: skip
    return BlockLayout(block, [int(chosen[-1]) for chosen in anchors], torch.cat(anchors), [19, 1, 10])


def brute_force(layout: BlockLayout, causal: bool, window: int | None) -> torch.Tensor:
    """The rule, position by position, in words of documents and blocks."""
    keys = [("context", number, position) for number, length in enumerate(layout.lengths) for position in range(length)]
    queries = []
    for index, anchor in enumerate(layout.anchors.tolist()):
        for slot in range(layout.block):
            queries.append((index, layout.documents[index].item(), anchor, anchor + slot))
            keys.append(("block", index, anchor + slot))
    seen = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for row, (index, document, anchor, position) in enumerate(queries):
        for column, (place, owner, key_position) in enumerate(keys):
            here = owner == document and key_position < anchor if place == "context" else owner == index
            reached = not causal or key_position <= position
            near = window is None or abs(position - key_position) < window
            seen[row, column] = here and reached and near
    return seen


@pytest.mark.parametrize(("causal", "window"), KINDS)
def test_dense_mask_is_the_rule(causal, window):
    layout = random_layout(0)
    assert torch.equal(visible_blocks(layout, causal, window), brute_force(layout, causal, window))


@pytest.mark.parametrize(("causal", "window"), KINDS)
def test_attention_in_groups_is_that_of_the_dense_mask(causal, window):
    layout = random_layout(1)
    seen = brute_force(layout, causal, window)
    query, key, value, expected = attended(seen)
    attention = PackedAttention(layout, False, torch.device("cpu"))
    mask = attention.mask(causal, window, key)
    found, _ = attention.implementation(torch.nn.Module(), query, key, value, mask, scaling=0.3)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)
    assert attention.mask(causal, window, key) is mask


@pytest.mark.parametrize(("causal", "window"), KINDS)
def test_flex_attention_is_that_of_the_dense_mask(causal, window):
    """Uncompiled: compiling takes longer than all other tests, and changes neither the mask nor the rule."""
    layout = random_layout(1)
    query, key, value, expected = attended(brute_force(layout, causal, window))
    mask = PackedAttention(layout, True, torch.device("cpu")).mask(causal, window, key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = flex_attention(query, key, value, block_mask=mask, scale=0.3, enable_gqa=True)
    assert torch.allclose(found, expected, atol=1e-5)


def attended(seen: torch.Tensor):
    """Random queries, keys and values, and attention over what is `seen`."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, size, 8) for heads, size in zip((4, 2, 2), (*seen.shape, seen.shape[1]), strict=True)
    )
    scores = (query @ key.repeat_interleave(2, 1).mT * 0.3).masked_fill(~seen, -torch.inf)
    return query, key, value, scores.softmax(-1) @ value.repeat_interleave(2, 1)


def test_groups_leave_out_what_nobody_sees():
    """The cut is what makes a step cheap: no group has keys after its last anchor or before its first window."""
    layout = random_layout(2)
    plan = PackedAttention(layout, False, torch.device("cpu")).mask(True, 3, torch.empty(0))
    for groups, anchors in zip(plan.groups, layout.anchors.split(layout.counts), strict=True):
        for (_, begin, end, _), part in zip(groups, anchors.split(8), strict=True):
            assert (begin, end) == (max(0, part[0] - 2), part[-1])


def test_flex_attention_refuses_dropout():
    attention = PackedAttention(random_layout(0), True, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1"):
        attention.implementation(None, None, None, None, None, dropout=0.1)
