"""NVIDIA Model-Optimizer's export: z-lab's format, with causality and windows said in keys of its own.

`dflash_config.causal` holds for all layers and is always written. `use_swa` and `swa_window_size` give all layers one
window, while `layer_types` calls them full. `attention_sink_bias` stands at both levels, `shift_label` is
`sample_from_anchor`. Read without these keys such a file is another model, and nothing in it would show.
"""

from dflash.dialects import expressing
from dflash.dialects.keys import causality, check_keys, layer_kinds

NAME = "modelopt"
_WINDOW_KEYS = ("use_swa", "swa_window_size")


def matches(settings: dict, names: set[str]) -> bool:
    nested = settings.get("dflash_config")
    return isinstance(nested, dict) and (
        any(key in nested for key in ("causal", *_WINDOW_KEYS)) or "attention_sink_bias" in settings
    )


def read(settings: dict, tensors: dict, findings) -> tuple[dict, dict]:
    settings, nested = dict(settings), dict(settings["dflash_config"])
    check_keys(settings, set(), findings)
    if settings.get("model_type") != "qwen3":
        findings.add(f"model_type is {settings.get('model_type')!r} where this format has 'qwen3'")
    complete = "attention_sink_bias" in settings or any(key in nested for key in _WINDOW_KEYS)
    use_window, window = nested.pop("use_swa", None), nested.pop("swa_window_size", None)
    if complete and not isinstance(use_window, bool):
        findings.add(f"dflash_config.use_swa must be true or false, it is {use_window!r}")
    _windows(settings, use_window, window, findings)
    _causality(settings, nested.pop("causal", None), findings)
    return {**settings, "dflash_config": nested}, tensors


def check_embedding(target, given: dict | None, findings) -> None:
    """Warns if the target's embedding module scales its rows, which drafters of this project are then trained on.

    Serving engines disagree about it, and the file does not say; `given` are the settings that the user adds.
    """
    embedding = target.get_input_embeddings() if hasattr(target, "get_input_embeddings") else None
    scale = getattr(embedding, "scalar_embed_scale", 1.0)
    if scale != 1.0 and "input_embedding_scale" not in (given or {}):
        findings.warn(
            f"Model-Optimizer trains on the target's embedding module, which multiplies its rows by {scale:g}; the "
            f"file does not say so, and raw rows are used. Pass settings={{'input_embedding_scale': {scale:g}}} or "
            "1.0, whichever is accepted more"
        )


def _windows(settings: dict, use_window, window, findings) -> None:
    if use_window is not True:
        if window is not None:
            findings.add(f"dflash_config.swa_window_size is {window!r} but use_swa is {use_window!r}")
        return
    if window is None:
        findings.add("dflash_config.use_swa is true but swa_window_size is missing")
        return
    layers = layer_kinds(settings)
    if "sliding_attention" in layers or settings.get("sliding_window") not in (None, window):
        findings.add(
            f"dflash_config.use_swa gives all layers a window of {window}, but layer_types is {layers} and "
            f"sliding_window {settings.get('sliding_window')!r}"
        )
    count = settings.get("num_hidden_layers")
    if isinstance(count, int):
        settings["layer_types"] = ["sliding_attention"] * count
    settings["sliding_window"], settings["use_sliding_window"] = window, True


def _causality(settings: dict, causal, findings) -> None:
    if not isinstance(causal, bool):
        findings.add(f"dflash_config.causal must be true or false, it is {causal!r}")
        return
    if settings.get("is_causal") not in (None, causal):
        findings.add(f"is_causal is {settings['is_causal']!r} but dflash_config.causal is {causal!r}")
    settings["is_causal"] = causality(causal, layer_kinds(settings))


def check_expressible(config) -> None:
    """This format has one causality and one window for all layers."""
    expressing.check_expressible(config, NAME, "sample_from_anchor", "attention_sink_bias")
    layers = range(config.num_hidden_layers)
    for name, values in (
        ("layer_types", set(config.layer_types)),
        ("causality", {config.layer_is_causal(i) for i in layers}),
    ):
        if len(values) > 1:
            raise ValueError(f"the format {NAME!r} has one {name} for all layers; this drafter's differ")


def write(config, target: str | None, target_config) -> dict:
    """config.json for tensors that keep their names."""
    window = config.layer_window(0)
    dflash = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "causal": config.layer_is_causal(0),
        "attention_sink_bias": config.attention_sink_bias,
        "use_swa": window is not None,
    }
    if window is not None:
        dflash["swa_window_size"] = window
    if config.sample_from_anchor:
        dflash["shift_label"] = True
    settings = expressing.layer_keys(config)
    settings.update(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        block_size=config.block_size,
        num_target_layers=config.num_target_layers,
        attention_sink_bias=config.attention_sink_bias,
        layer_types=["full_attention"] * config.num_hidden_layers,
        sliding_window=None,
        use_sliding_window=False,
        dflash_config=dflash,
    )
    return settings
