"""TorchSpec's and AngelSpec's format: other names for three tensors, keys at top level, the embedding in the file.

`num_target_layers` is the number of taps and `target_num_hidden_layers` the target's depth. All layers attend fully and
in both directions, without biases. The block size is not in the file.
"""

from dflash.dialects.keys import check_keys, take

NAME = "torchspec"
_KEYS = {"target_num_hidden_layers", "target_hidden_size", "confidence_head_with_markov"}


def matches(settings: dict, names: set[str]) -> bool:
    renamed = any(name.endswith("context_proj.weight") for name in names)
    return settings.get("model_type") == "dflash" or "target_num_hidden_layers" in settings or renamed


def read(settings: dict, tensors: dict, findings) -> tuple[dict, dict]:
    settings = dict(settings)
    check_keys(settings, _KEYS, findings)
    count, depth, width, mask = take(
        settings,
        "config.json",
        *("num_target_layers", "target_num_hidden_layers", "target_hidden_size", "mask_token_id"),
    )
    taps = settings.pop("target_layer_ids", None)
    if taps is None:
        taps = even_taps(count, depth)
        findings.warn(f"target_layer_ids is missing, so the taps are those that this format's rule gives: {taps}")
    if not isinstance(taps, list) or len(taps) != count:
        findings.add(f"target_layer_ids is {taps!r}, but num_target_layers, the number of taps here, is {count}")
    if width != settings.get("hidden_size"):
        findings.add(f"target_hidden_size {width} differs from hidden_size {settings.get('hidden_size')}")
    if "dflash_config" in settings:
        findings.add("dflash_config does not belong in this format, whose keys stand at top level")
    for head in ("markov_head_type", "confidence_head_with_markov"):
        settings.pop(head, None)  # mean nothing without the rank or the head that they describe
    _fix(settings, findings)
    dflash = {"mask_token_id": mask, "target_layer_ids": taps, "has_embed_tokens": "embed_tokens.weight" in tensors}
    if not dflash["has_embed_tokens"]:
        findings.warn("embed_tokens.weight is missing; the target's is used")
    return {
        **settings,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_target_layers": depth,
        "dflash_config": dflash,
    }, tensors


def _fix(settings: dict, findings) -> None:
    """Writes out what this format's code has no setting for."""
    layers, heads, width = (settings.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not all(isinstance(value, int) and value > 0 for value in (layers, heads, width)):
        return
    fixed = {"hidden_act": "silu", "attention_bias": False, "layer_types": ["full_attention"] * layers}
    for key, value in fixed.items():
        if settings.get(key) not in (None, value):
            findings.add(f"{key} is {settings[key]!r}, but this format's drafters have {value!r}")
        settings[key] = value
    settings.setdefault("head_dim", width // heads)
    for key in ("use_sliding_window", "sliding_window", "is_causal", "rope_scaling"):
        if settings.get(key):
            findings.add(f"{key} is {settings[key]!r}, which this format's drafters do not know")


def even_taps(count: int, depth: int) -> list[int]:
    """The taps of TorchSpec and SpecForge where none are given: spread evenly from layer 1 to the third last."""
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]
