"""What one layer of a target's cache keeps, and how it forgets its last tokens exactly.

Keys and values (full, sliding, latent) have one entry per token and are cropped. Some kinds can do that only with help:
a static window overwrites what it loses, so it is copied before; quantised keys cannot be unquantised, so a forward
whose tokens may be taken back has to stay within those that are not quantised yet.
"""

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    QuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


def keeps_state(layer) -> bool:
    """Whether a cache layer keeps, or may keep, a state without a history."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def keeps_keys(layer) -> bool:
    """Whether a cache layer keeps keys, so that it knows how many tokens it has seen."""
    return isinstance(layer, CacheLayerMixin)


def states_of(layer) -> dict[tuple[str, int], torch.Tensor]:
    """The states that a cache layer has so far, by kind and index."""
    kinds = ("conv_states", "recurrent_states")
    return {(kind, i): state for kind in kinds for i, state in getattr(layer, kind).items() if state is not None}


def quantises_groups(layer) -> bool:
    """Whether a layer quantises its keys, all at once, whenever enough new ones have come together."""
    return isinstance(layer, QuantizedLayer) and type(layer).update is QuantizedLayer.update


def quantises_each(layer) -> bool:
    """Whether a layer quantises every key by itself, with a scale that its first tokens set (Transformers 5.24)."""
    kind = getattr(cache_utils, "Fp8QuantizedLayer", None)
    return kind is not None and isinstance(layer, kind) and type(layer).update is kind.update


def can_go_back(layer) -> bool:
    """Whether a cache layer can forget any number of its last tokens: not if it holds a state or lost old keys."""
    if isinstance(layer, StaticSlidingWindowLayer):
        return layer.cumulative_length_int <= layer.max_cache_len
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.get_seq_length() < layer.sliding_window
    return not (keeps_state(layer) or quantises_groups(layer))


def room_of(layer) -> int | None:
    """How many tokens a forward over several may add so that the last of them can be taken back; None: any number."""
    if isinstance(layer, StaticSlidingWindowLayer):
        return layer.max_cache_len
    if quantises_groups(layer):
        waiting = layer.keys.shape[-2] if layer.is_initialized and layer.keys.dim() == 4 else 0
        return max(1, layer.residual_length - 1 - waiting)
    return None


def crop_keys(layer, count: int) -> None:
    """Takes the last `count` keys from a cache layer. Layers that share or lack keys have none to crop.

    A static window that has lost keys goes back with `StaticWindow` instead.
    """
    if not (keeps_keys(layer) and layer.is_initialized):
        return
    if isinstance(layer, StaticLayer):  # what is beyond the length is masked, and overwritten by what comes next
        layer.cumulative_length.sub_(count)
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int -= count
    elif quantises_each(layer):
        _crop_each(layer, count)
    elif quantises_groups(layer):
        DynamicLayer.crop(layer, -count)
        layer.cumulative_length -= count
    else:
        kind = DynamicSlidingWindowLayer if isinstance(layer, DynamicSlidingWindowLayer) else DynamicLayer
        kind.crop(layer, -count)


def _crop_each(layer, count: int) -> None:
    for name in ("_quantized_keys", "_quantized_values"):
        stored, scale = getattr(layer, name)
        setattr(layer, name, (stored[..., : stored.shape[-2] - count, :], scale))
    layer.cumulative_length -= count


class StaticWindow:
    """A static sliding layer as it is before a forward over `tokens` tokens, for as many as its window at most."""

    def __init__(self, layer: StaticSlidingWindowLayer, tokens: int):
        self.layer, self.tokens = layer, tokens
        self.length = layer.cumulative_length_int
        # Only a window that loses keys is copied; one that does not is cropped.
        self.held = None
        if layer.is_initialized and self.length + tokens > layer.max_cache_len:
            self.held = layer.keys.clone(), layer.values.clone(), layer.cumulative_length.clone()

    def take_back(self, count: int) -> None:
        """Takes the last `count` of the forward's tokens back: restores the window, and adds those that stay."""
        layer, kept = self.layer, self.tokens - count
        if self.held is None or not count:
            crop_keys(layer, count)
            return
        keys, values = (states[:, :, -self.tokens :].clone() for states in (layer.keys, layer.values))
        for states, copy in zip((layer.keys, layer.values, layer.cumulative_length), self.held, strict=True):
            states.copy_(copy)
        layer.cumulative_length_int = self.length
        if kept:
            layer.update(keys[:, :, :kept], values[:, :, :kept])
