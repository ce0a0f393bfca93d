"""What the blocks of a packed batch see, and attention over it.

A block sees the context of its document strictly before its anchor (the target's states at the anchor do not exist yet
when the block is drafted) and itself; windows and causality inside the block are those of `visible_keys`, by which the
drafter decodes. Keys are the packed contexts [C], then the blocks [A*B]; queries are the blocks.
"""

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash.training.blocks import BlockLayout

GROUP = 8  # blocks of a document that share one attention call on a CPU


def visible_blocks(layout: BlockLayout, causal: bool, window: int | None) -> torch.Tensor:
    """The dense mask: bool [A*B, C + A*B]."""
    rule = block_rule(layout, causal, window, torch.device("cpu"))
    context, queries = sum(layout.lengths), len(layout.anchors) * layout.block
    return rule(None, None, torch.arange(queries)[:, None], torch.arange(context + queries)[None])


def block_rule(layout: BlockLayout, causal: bool, window: int | None, device):
    """Whether a query sees a key, by index into the packed queries and keys, as `flex_attention` asks for it."""
    block, context = layout.block, sum(layout.lengths)
    key_position = layout.positions[0].to(device)
    query_position = key_position[context:]
    query_document = layout.documents.repeat_interleave(block).to(device)
    key_document = torch.repeat_interleave(torch.arange(len(layout.lengths)), torch.tensor(layout.lengths)).to(device)
    key_document = torch.cat([key_document, query_document])
    anchor = layout.anchors.repeat_interleave(block).to(device)

    def sees(row, head, query, key):
        in_context = key < context
        before = (key_document[key] == query_document[query]) & (key_position[key] < anchor[query])
        own = (key - context).div(block, rounding_mode="floor") == query.div(block, rounding_mode="floor")
        seen = (in_context & before) | (~in_context & own)
        distance = query_position[query] - key_position[key]
        if causal:
            seen = seen & (distance >= 0)
        if window is not None:
            seen = seen & (distance < window) & (distance > -window)
        return seen

    return sees


class PackedAttention:
    """Attention of the blocks of one batch, in place of a `BlockAttention`; masks are built once per kind of layer.

    Args:
        layout (`BlockLayout`): where the blocks stand.
        flex (`bool`): one `flex_attention` call over the whole batch, which skips what nobody sees (for CUDA);
            otherwise a few blocks of a document at a time go through scaled dot product attention, over the context
            that these see.
        device (`torch.device`): where it runs.
    """

    def __init__(self, layout: BlockLayout, flex: bool, device):
        self.layout, self.flex, self.device = layout, flex, device
        self.implementation = flex_blocks if flex else attend_in_groups
        self._built: dict = {}

    def mask(self, causal: bool, window: int | None, keys: torch.Tensor):
        kind = causal, window
        if kind not in self._built:
            if self.flex:
                self._built[kind] = self._block_mask(causal, window, keys.shape[2])
            else:
                self._built[kind] = GroupPlan(self.layout, causal, window, self.device)
        return self._built[kind]

    def _block_mask(self, causal: bool, window: int | None, keys: int):
        queries = len(self.layout.anchors) * self.layout.block
        rule = block_rule(self.layout, causal, window, self.device)
        return create_block_mask(rule, None, None, queries, keys, device=self.device)


class GroupPlan:
    """How a batch is cut for scaled dot product attention.

    Attributes:
        contexts, queries: context positions and block positions of each document, [D].
        groups: of each document, its groups: (block positions, first and last + 1 context position, mask).
    """

    def __init__(self, layout: BlockLayout, causal: bool, window: int | None, device):
        self.contexts = layout.lengths
        self.queries = [count * layout.block for count in layout.counts]
        self.groups = [
            [_group(part, layout.block, causal, window, device) for part in anchors.split(GROUP)]
            for anchors in layout.anchors.split(layout.counts)
        ]


def _group(anchors: torch.Tensor, block: int, causal: bool, window: int | None, device):
    """Blocks at anchors [n] of one document: see `GroupPlan.groups`."""
    begin = 0 if window is None else max(0, int(anchors[0]) - window + 1)
    end = int(anchors[-1])
    layout = BlockLayout(block, [end], anchors, [len(anchors)])
    seen = visible_blocks(layout, causal, window)[:, begin:]
    return len(anchors) * block, begin, end, seen[None, None].to(device)


def attend_in_groups(module, query, key, value, plan: GroupPlan, dropout=0.0, scaling=None, **_):
    """An attention function over a packed batch: query [1, heads, A*B, d], keys [1, kv heads, C + A*B, d].

    Returns the output [1, A*B, heads, d], and None for the weights, as Transformers' functions do.
    """
    query, key, value = query.to(value.dtype), key.to(value.dtype), value
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))
    sizes = [*plan.contexts, *plan.queries]
    documents, outputs = len(plan.contexts), []
    keys, values = key.split(sizes, dim=2), value.split(sizes, dim=2)
    for number, queries in enumerate(query.split(plan.queries, dim=2)):
        own, groups = documents + number, plan.groups[number]
        cuts = [size for size, *_ in groups]
        parts = (x.split(cuts, dim=2) for x in (queries, keys[own], values[own]))
        for (_, begin, end, mask), q, k, v in zip(groups, *parts, strict=True):
            k = torch.cat([keys[number][:, :, begin:end], k], dim=2)
            v = torch.cat([values[number][:, :, begin:end], v], dim=2)
            outputs.append(functional.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def flex_blocks(module, query, key, value, mask, dropout=0.0, scaling=None, **_):
    """Transformers' `flex_attention` function, which takes one dtype and compiles itself."""
    if dropout:
        raise ValueError(f"flex_attention has no dropout, but the drafter's attention_dropout is {dropout}")
    flex = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    return flex(module, query.to(value.dtype), key.to(value.dtype), value, mask, scaling=scaling)
