"""How many bytes of tensors are alive, as operators make and free them."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators allocate within this context; `peak` is the most that lived at once.

    Views share a storage and count once. `tallest` is the largest number of rows of a result [.., `columns`].
    """

    def __init__(self, columns: int = -1):
        super().__init__()
        self.live = self.peak = self.tallest = 0
        self.columns = columns
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), given)
                if tensor.dim() and tensor.shape[-1] == self.columns:
                    self.tallest = max(self.tallest, tensor.numel() // self.columns)
        return result

    def _note(self, storage, given) -> None:
        if storage in self.known or storage in given:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size
