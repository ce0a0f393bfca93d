"""The drafter's own key/value cache: context stays, the block is overwritten by the next round."""

import torch


class DFlashDraftCache:
    """Keys and values of the target's context, per layer, in buffers that grow by doubling.

    A round appends the new context and the block with `update`; `keep_context` then forgets the block by moving the
    length, so that nothing is copied or cut. A layer with a sliding window returns only the keys its block can see.

    Args:
        windows (`list[int | None]`): sliding window of each layer.
        capacity (`int`): positions to allocate at first.

    Attributes:
        start (`int`): context positions forgotten for good; those held count from 0 again.
        length (`int`): context positions held.
    """

    def __init__(self, windows: list, capacity: int = 256):
        self.windows = windows
        self.capacity = capacity
        self.start = 0
        self.length = 0
        self._keys: list[torch.Tensor | None] = [None] * len(windows)
        self._values: list[torch.Tensor | None] = [None] * len(windows)

    def get_seq_length(self) -> int:
        return self.length

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, block: int):
        """Writes [N, heads, n + block, head_dim] after the context; gives all that `block` queries may see."""
        fresh = keys.shape[2]
        end = self.length + fresh
        self._reserve(layer_idx, keys, end)
        stored_keys, stored_values = self._keys[layer_idx], self._values[layer_idx]
        stored_keys.narrow(2, self.length, fresh).copy_(keys)
        stored_values.narrow(2, self.length, fresh).copy_(values)
        window = self.windows[layer_idx]
        start = 0 if window is None else max(0, end - block - window + 1)
        return stored_keys.narrow(2, start, end - start), stored_values.narrow(2, start, end - start)

    def keep_context(self, count: int) -> None:
        """Counts the first `count` positions that the last round wrote as context; the rest is forgotten."""
        self.length += count

    def cut(self, end: int) -> None:
        """Forgets all positions from `end` on, counted with those forgotten for good."""
        self.length = min(self.length, max(0, end - self.start))

    def forget_oldest(self, count: int, turn_back) -> None:
        """Moves the beginning of the context on by `count` positions, also past the end of what is held.

        Args:
            count (`int`): positions to forget.
            turn_back (`Callable`): turns the keys that stay, [N, heads, n, head_dim], to positions lower by `count`.
        """
        stays = max(0, self.length - count)
        for keys, values in zip(self._keys, self._values, strict=True):
            if stays and keys is not None:
                keys[:, :, :stays] = turn_back(keys[:, :, count : count + stays], count)
                values[:, :, :stays] = values[:, :, count : count + stays].clone()
        self.start, self.length = self.start + count, stays

    def _reserve(self, layer_idx: int, like: torch.Tensor, needed: int) -> None:
        stored = self._keys[layer_idx]
        if stored is not None and stored.shape[2] >= needed:
            return
        while self.capacity < needed:
            self.capacity *= 2
        for store in (self._keys, self._values):
            grown = like.new_empty(*like.shape[:2], self.capacity, like.shape[3])
            if store[layer_idx] is not None:
                grown[:, :, : self.length] = store[layer_idx][:, :, : self.length]
            store[layer_idx] = grown
