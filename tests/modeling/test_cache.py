"""The drafter's cache against plain concatenation."""

import torch

from dflash.modeling.cache_dflash import DFlashDraftCache


def test_cache_equals_concatenation():
    windows, block = [None, 5, 1], 4
    cache = DFlashDraftCache(windows, capacity=2)
    context = torch.zeros(2, 3, 0, 6)
    for fresh in (7, 1, 3, 20, 2):
        new = torch.randn(2, 3, fresh + block, 6)
        everything = torch.cat([context, new], dim=2)
        for layer, window in enumerate(windows):
            keys, values = cache.update(new, -new, layer, block)
            oldest = 0 if window is None else max(0, everything.shape[2] - block - (window - 1))
            assert torch.equal(keys, everything[:, :, oldest:]) and torch.equal(values, -keys)
        cache.keep_context(fresh)
        context = everything[:, :, :-block]
        assert cache.get_seq_length() == context.shape[2]
