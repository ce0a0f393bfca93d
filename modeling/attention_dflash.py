"""How a block attends: the implementation in use, and its masks in the form that it takes."""

import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers.utils.generic import is_flash_attention_requested


def visible_keys(block: int, keys: int, causal: bool, window: int | None, device=None) -> torch.Tensor:
    """Which of the last `keys` positions each of the last `block` positions sees: bool [block, keys].

    The block's positions are the last ones among the keys. A causal layer hides later positions; a window hides keys
    at distance >= window, on both sides when the layer is not causal (the rule of z-lab's drafters).
    """
    query_position = torch.arange(keys - block, keys, device=device)[:, None]
    distance = query_position - torch.arange(keys, device=device)
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        visible = visible & (distance < window) & (distance > -window)
    return visible


def join_sink(sink: torch.Tensor, query, key, value, mask):
    """Attention with a sink, as attention without: a zero key and value join, whose mask is the sink's logit.

    Args:
        sink: [heads] logits.
        query: [N, heads, B, head_dim].
        key, value: [N, kv_heads, n, head_dim].
        mask: bool or additive, [N or 1, 1, B, n], or None.

    Returns:
        keys, values [N, kv_heads, n + 1, head_dim], and an additive mask [N or 1, heads, B, n + 1].
    """
    heads, block, length = query.shape[1], query.shape[2], key.shape[2]
    if mask is None:
        mask = query.new_zeros(1, 1, block, length)
    elif mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = query.new_zeros(mask.shape).masked_fill(~mask, hidden)
    column = sink.to(query.dtype)[None, :, None, None].expand(mask.shape[0], -1, block, -1)
    mask = torch.cat([mask.expand(-1, heads, -1, -1), column], dim=-1)
    nothing = key.new_zeros(*key.shape[:2], 1, key.shape[3])
    return torch.cat([key, nothing], dim=2), torch.cat([value, nothing], dim=2), mask


class BlockAttention:
    """What the layers of one forward pass share; each mask is built once, when a layer first asks for it.

    Args:
        implementation (`Callable`): the attention function, as Transformers registers it.
        name (`str`): its name, which decides the mask's form.
        block (`int`): positions of the block, B.
        padding (`torch.Tensor`, *optional*): [N, keys], 0 where a key is padding.
        dtype (`torch.dtype`): of an additive mask.
    """

    def __init__(self, implementation, name: str | None, block: int, padding: torch.Tensor | None, dtype: torch.dtype):
        if padding is not None and padding.dim() != 2:
            raise ValueError(f"attention_mask must be [rows, keys], got shape {tuple(padding.shape)}")
        self.implementation = implementation
        self.name = name
        self.flash = name != "sdpa" and is_flash_attention_requested(requested_attention_implementation=name)
        self.block, self.padding, self.dtype = block, padding, dtype
        self._built: dict = {}

    def check_sink(self) -> None:
        """Raises `ValueError` for an implementation that takes no mask per head."""
        if self.flash or self.name == "flex_attention":
            raise ValueError(
                f"attention_sink_bias needs attn_implementation 'sdpa' or 'eager' in the drafter, not {self.name!r}"
            )

    def mask(self, causal: bool, window: int | None, keys: torch.Tensor) -> torch.Tensor | None:
        """The mask for a layer that attends to `keys` [N, heads, n, head_dim]; None: all keys are visible."""
        length = keys.shape[2]
        if self.flash:  # windows and causality are arguments of the kernel
            return None if self.padding is None else self.padding[:, -length:]
        if window is not None and not causal and length - 1 < window:
            window = None
        if self.padding is None and not causal and window is None:
            return None
        kind = causal, window, length
        if kind not in self._built:
            self._built[kind] = self._build(causal, window, length, keys.device)
        return self._built[kind]

    def _build(self, causal: bool, window: int | None, length: int, device) -> torch.Tensor:
        visible = visible_keys(self.block, length, causal, window, device)[None, None]
        if self.padding is not None:
            if self.padding.shape[1] < length:
                raise ValueError(f"attention_mask covers {self.padding.shape[1]} positions of {length} keys")
            visible = visible & self.padding[:, None, None, -length:].bool()
        if self.name == "sdpa":
            return visible
        if self.name == "flex_attention":
            rows = visible.shape[0]
            return create_block_mask(
                lambda row, head, query, key: visible[row % rows, 0, query, key],
                None if rows == 1 else rows,
                None,
                self.block,
                length,
                device=device,
            )
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill(~visible, torch.finfo(self.dtype).min)
