"""The target's cache: made as `generate` makes it, or the caller's own; only if tokens can be taken back exactly."""

import warnings

from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache, StaticLayer

from .cache_layers_dflash import keeps_state, quantises_each, quantises_groups
from .target_dflash import unwrap

# Layers that roll back; quantising ones are known by what they do, as each backend has its own.
_LAYERS = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "DummyLayer",
}
_OFFLOADED = {"offloaded": "dynamic", "offloaded_static": "static"}
_KINDS = ("dynamic", "static", "quantized")


def make_cache(target, implementation: str | None, settings: dict | None, tokens: int) -> Cache:
    """A new cache for up to `tokens` tokens.

    Args:
        target (`PreTrainedModel`): the target, whose generation config says what is not said here.
        implementation (`str`, *optional*): "dynamic", "static" or "quantized", as `generate`'s `cache_implementation`.
        settings (`dict`, *optional*): `max_cache_len` of a static cache, to have room for later turns; `backend` and
            the other arguments of a `QuantizedCache`.

    Raises:
        ValueError: there is no such implementation or setting, or the cache could not be rolled back.
    """
    if implementation is None:
        implementation, settings = _configured(target, settings)
    if implementation not in _KINDS:
        raise ValueError(
            f"cache_implementation must be one of {', '.join(_KINDS)}, got {implementation!r}; an offloaded cache "
            "cannot be rolled back between its copies"
        )
    config, settings = unwrap(target).config, dict(settings or {})
    allowed = {"static": {"max_cache_len"}, "dynamic": set()}.get(implementation, set(settings))
    if unknown := set(settings) - allowed:
        raise ValueError(
            f"cache_config has {', '.join(sorted(unknown))}, but a {implementation} cache takes "
            f"{', '.join(allowed) or 'no settings'}"
        )
    if implementation == "static":
        cache = StaticCache(config=config, max_cache_len=max(tokens, settings.get("max_cache_len") or 0))
    elif implementation == "quantized":
        backend = settings.pop("backend", "quanto")
        cache = QuantizedCache(backend, **{"config": config.get_text_config(decoder=True), **settings})
    else:
        cache = DynamicCache(config=config)
    admit_cache(cache, target, tokens)
    return cache


def _configured(target, settings: dict | None) -> tuple[str, dict | None]:
    """The implementation that the target's generation config names, with settings."""
    generation = getattr(target, "generation_config", None)
    implementation = getattr(generation, "cache_implementation", None) or "dynamic"
    if implementation in _OFFLOADED:
        warnings.warn(
            f"the generation config's cache_implementation={implementation!r} cannot be rolled back between its "
            f"copies; a {_OFFLOADED[implementation]} cache on the target's device is used",
            stacklevel=6,
        )
        implementation = _OFFLOADED[implementation]
    if implementation not in _KINDS:  # as in `generate`: old names of what a dynamic cache does by itself
        implementation = "dynamic"
    if settings is None and implementation == "quantized":
        settings = generation.cache_config
    if settings is None and implementation == "static":
        settings = {"max_cache_len": getattr(generation, "max_cache_len", None)}
    return implementation, settings


def admit_cache(cache, target, tokens: int) -> None:
    """Raises unless `cache`, a caller's, can be filled with up to `tokens` tokens of `target` and rolled back.

    Raises:
        TypeError: it is no `Cache`.
        ValueError: it is not empty, not made for this target, too short, or cannot be rolled back exactly.
    """
    name = type(cache).__name__
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise TypeError(
            f"cache is a {name}; pass the `cache` of what spec_generate(..., return_dict=True) gave, an empty Cache of "
            "Transformers, or none"
        )
    if held := int(cache.get_seq_length()):
        raise ValueError(
            f"cache is a {name} with {held} tokens, but lacks the drafter's context of them, without which hardly any "
            "draft is accepted; pass an empty one, or the `cache` of what spec_generate(..., return_dict=True) gave"
        )
    if getattr(cache, "offloading", False):
        raise ValueError(f"cache is an offloaded {name}, which cannot be rolled back between its copies; not supported")
    _check_layers(cache, unwrap(target).config)
    check_room(cache, target, tokens)


def _check_layers(cache: Cache, config) -> None:
    name, expected = type(cache).__name__, DynamicCache(config=config).layers
    advice = f"make it with {name}(config=target.config, ...)"
    if not cache.layers:
        if any(keeps_state(layer) for layer in expected):
            raise ValueError(f"cache is a {name} without layers, but this target has layers with a state; {advice}")
        return
    if len(cache.layers) != len(expected):
        raise ValueError(f"cache is a {name} of {len(cache.layers)} layers, the target has {len(expected)}; {advice}")
    for layer, own in zip(cache.layers, expected, strict=True):
        kind = type(layer).__name__
        if kind not in _LAYERS and not quantises_groups(layer) and not quantises_each(layer):
            raise ValueError(f"cache is a {name} whose layers cannot be rolled back exactly ({kind}); not supported")
        window, wanted = (getattr(each, "sliding_window", None) for each in (layer, own))
        if keeps_state(layer) != keeps_state(own) or (window is not None and window != wanted):
            raise ValueError(
                f"cache has a {kind} (window: {window}) where the target has a {type(own).__name__} (window: "
                f"{wanted}); {advice}"
            )


def check_room(cache: Cache, target, tokens: int) -> None:
    """Raises `ValueError` if a static `cache` ends before `tokens` tokens; a sliding layer has to span its window."""
    for layer, own in zip(cache.layers, DynamicCache(config=unwrap(target).config).layers, strict=False):
        if isinstance(layer, StaticLayer):
            needed = min(tokens, getattr(own, "sliding_window", tokens)) if layer.is_sliding else tokens
            if layer.max_cache_len < needed:
                raise ValueError(
                    f"the {type(cache).__name__} has room for {layer.max_cache_len} tokens, but prompt and budget need "
                    f"{needed}; make it longer (cache_config={{'max_cache_len': n}} or StaticCache(max_cache_len=n))"
                )


def quantises(cache: Cache) -> bool:
    """Whether the cache rounds keys, so that what a prompt's tokens are depends on which came in one forward."""
    return any(quantises_groups(layer) or quantises_each(layer) for layer in cache.layers)
