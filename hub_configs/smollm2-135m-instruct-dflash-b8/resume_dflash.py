"""What one call leaves for the next turn of a conversation: both caches, and the tokens that they stand for."""

import weakref

import torch
from transformers.cache_utils import Cache

from .cache_dflash import DFlashDraftCache
from .cache_layers_dflash import can_go_back, crop_keys
from .target_cache_dflash import admit_cache, check_room, make_cache, quantises


class DFlashSessionCache:
    """The target's cache with the drafter's: a prefix that only one of them knows would end acceptance in silence.

    `spec_generate(..., return_dict=True)` gives one; `spec_generate(..., cache=...)` continues it in place.
    `copy.deepcopy` branches a conversation.

    Attributes:
        ids: [1, L] the tokens that both caches hold; None while a call has it, and for good if that call failed.
    """

    def __init__(self, draft, target, draft_cache: DFlashDraftCache, target_cache: Cache):
        self.owners = weakref.ref(draft), weakref.ref(target)
        self.draft_cache, self.target_cache = draft_cache, target_cache
        self.ids: torch.LongTensor | None = None


def one_cache(cache, past_key_values):
    """The cache, under whichever of its two names in Transformers it was handed in."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument, and both are given; pass one")
    return past_key_values if cache is None else cache


def open_caches(draft, target, prompt: torch.Tensor, tokens: int, chunk=None, cache=None, kind=None, settings=None):
    """The target's cache and the drafter's to decode `prompt` [1, P] with; the latter is None for a new one.

    Args:
        tokens (`int`): how many the target's cache will have to hold at most.
        chunk (`int`, *optional*): positions that are prefilled at a time.
        cache (`DFlashSessionCache` or `Cache`, *optional*): what the caller handed in; the latter has to be empty.
        kind, settings: the cache to make if there is none; see `make_cache`.
    """
    if cache is not None and (kind is not None or settings is not None):
        raise ValueError(
            f"cache_implementation={kind!r} and cache_config={settings!r} say which cache to make, but cache is one "
            f"already (a {type(cache).__name__}); pass one or the other"
        )
    resumed = hasattr(cache, "draft_cache")
    if resumed:
        held = cache.target_cache
        check_room(held, target, tokens)
    elif cache is not None:
        held = cache
        admit_cache(held, target, tokens)
    else:
        held = make_cache(target, kind, settings, tokens)
    if chunk is not None and quantises(held):
        raise ValueError(
            f"prefill_chunk_size={chunk} changes what a quantised cache holds: it rounds what comes in one forward "
            "together, and generate prefills in one; leave it out"
        )
    if not resumed:
        return held, None
    take_cache(cache, draft, target, prompt)
    return held, cache.draft_cache


def take_cache(cache, draft, target, prompt: torch.Tensor) -> None:
    """Cuts a `DFlashSessionCache` to the longest prefix that it shares with `prompt` [1, P], less than P, and takes it.

    Raises:
        ValueError: it belongs to other models or to a call that failed, or cannot be cut that far.
    """
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
    obstacles = {type(layer).__name__ for layer in cache.target_cache.layers if not can_go_back(layer)}
    if cache.draft_cache.start and shared <= cache.draft_cache.start:
        obstacles.add(f"the drafter's context begins at {cache.draft_cache.start}")
    if obstacles:
        there = prompt[0, shared].item()
        raise ValueError(
            f"the cache stands for {ids.shape[1]} tokens and input_ids part from them at position {shared} (input_ids: "
            f"{there} of {prompt.shape[1]} tokens, cache: {ids[0, shared].item()}); it cannot go back there "
            f"({', '.join(sorted(obstacles))}); call without cache, or continue the text that it stands for"
        )


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
    if isinstance(value, (list, tuple)):
        return type(value)(_writable(part) for part in value)
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value
