"""Transformers' own assistant class (Muse Glimmer's): keys at top level, `encoder.fc` and `encoder.output_norm_enc`.

No layer is causal inside a block and none has biases. Neither the target's depth nor its vocabulary is in the file.
"""

from dflash.dialects.keys import causality, check_keys, layer_kinds, take

NAME = "assistant"
_TYPE, _CLASS = "muse_glimmer_assistant", "MuseGlimmerAssistantModel"


def matches(settings: dict, names: set[str]) -> bool:
    return settings.get("model_type") == _TYPE or settings.get("architectures") == [_CLASS]


def read(settings: dict, tensors: dict, findings) -> tuple[dict, dict]:
    settings = dict(settings)
    check_keys(settings, set(), findings)
    for key, value in (("model_type", _TYPE), ("architectures", [_CLASS])):
        if settings.get(key) != value:
            findings.add(f"{key} is {settings.get(key)!r} where this format has {value!r}")
    block, mask, taps = take(settings, "config.json", "block_size", "mask_token_id", "target_layer_ids")
    for key in ("attention_bias", "is_causal", "sample_from_anchor", "dflash_config"):
        if settings.get(key):
            findings.add(f"{key} is {settings[key]!r}, which this format's drafters do not know")
    layers = layer_kinds(settings)
    slides = "sliding_attention" in layers
    return {
        **settings,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "is_causal": causality(False, layers),
        "use_sliding_window": slides,
        "sliding_window": settings.get("sliding_window") if slides else None,
        "dflash_config": {"block_size": block, "mask_token_id": mask, "target_layer_ids": taps},
    }, tensors
