"""What one call leaves for the next turn of a conversation: both caches, and the tokens that they stand for."""

import weakref

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from .cache_dflash import DFlashDraftCache
from .rollback_dflash import crop_keys, keeps_state


class DFlashSessionCache:
    """The target's cache with the drafter's: a prefix that only one of them knows would end acceptance in silence.

    `spec_generate(..., return_dict=True)` gives one; `spec_generate(..., cache=...)` continues it in place.
    `copy.deepcopy` branches a conversation.

    Attributes:
        ids: [1, L] the tokens that both caches hold; None while a call has it, and for good if that call failed.
    """

    def __init__(self, draft, target, draft_cache: DFlashDraftCache, target_cache: DynamicCache):
        self.owners = weakref.ref(draft), weakref.ref(target)
        self.draft_cache, self.target_cache = draft_cache, target_cache
        self.ids: torch.LongTensor | None = None


def take_cache(cache, draft, target, prompt: torch.Tensor) -> None:
    """Cuts `cache` to the longest prefix that it shares with `prompt` [1, P], of P - 1 tokens at most, and takes it.

    Raises:
        TypeError: it is no `DFlashSessionCache`.
        ValueError: it belongs to other models or to a call that failed, or cannot be cut that far.
    """
    if not hasattr(cache, "draft_cache"):
        raise TypeError(
            f"cache is a {type(cache).__name__}, which lacks the drafter's context of the tokens it holds; pass the "
            "`cache` of what spec_generate(..., return_dict=True) gave, or none"
        )
    for what, owner, given in zip(("drafter", "target"), cache.owners, (draft, target), strict=True):
        if owner() is not given:
            raise ValueError(f"this cache was made with another {what} than the one given; call without cache")
    if cache.ids is None:
        raise ValueError("this cache is in use, or was when a call failed, so what it holds is unknown; call without")
    held, ids = cache.ids.shape[1], cache.ids.to(prompt.device)
    shared = shared_prefix(ids, prompt)
    if shared < held:
        _check_cut(cache, shared, ids, prompt)
        for layer in cache.target_cache.layers:
            crop_keys(layer, held - shared)
        cache.draft_cache.cut(shared)
    cache.ids = None


def shared_prefix(ids: torch.Tensor, prompt: torch.Tensor) -> int:
    """Length of the common prefix of ids [1, L] and prompt [1, P], at most P - 1: one token has to be run."""
    length = min(ids.shape[1], prompt.shape[1])
    same = (ids[0, :length] == prompt[0, :length]).long().cumprod(0).sum().item()
    return min(same, prompt.shape[1] - 1)


def _check_cut(cache: DFlashSessionCache, shared: int, ids, prompt) -> None:
    obstacles = {type(layer).__name__ for layer in cache.target_cache.layers if not _can_go_back(layer)}
    if cache.draft_cache.start and shared <= cache.draft_cache.start:
        obstacles.add(f"the drafter's context begins at {cache.draft_cache.start}")
    if obstacles:
        there = prompt[0, shared].item()
        raise ValueError(
            f"the cache stands for {ids.shape[1]} tokens and input_ids part from them at position {shared} (input_ids: "
            f"{there} of {prompt.shape[1]} tokens, cache: {ids[0, shared].item()}); it cannot go back there "
            f"({', '.join(sorted(obstacles))}); call without cache, or continue the text that it stands for"
        )


def _can_go_back(layer) -> bool:
    """Whether a cache layer can forget any number of its last tokens: not if it holds a state or lost old keys."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.get_seq_length() < layer.sliding_window
    return not keeps_state(layer)


def give_cache(cache: DFlashSessionCache, ids: torch.Tensor) -> None:
    """Says what `cache` stands for, ids [1, L], and copies those of its tensors that only inference mode may write.

    Decoding stays in that mode, as its absence costs a part of every operator's overhead; a copy is made once a turn.
    """
    with torch.inference_mode(False), torch.no_grad():
        for holder in (*cache.target_cache.layers, cache.draft_cache):
            for name, value in vars(holder).items():
                setattr(holder, name, _writable(value))
        cache.ids = ids.clone()


def _writable(value):
    if isinstance(value, dict):
        return {key: _writable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_writable(part) for part in value]
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value
