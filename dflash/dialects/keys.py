"""Keys of a config.json: which this library reads, which change nothing, and how one causality is said."""

from transformers import PretrainedConfig

from dflash.modeling.configuration_dflash import ARCHITECTURES, KNOWN_KEYS

# Keys of Transformers' configs that do not change what a drafter computes.
_WITHOUT_EFFECT = {
    *PretrainedConfig().to_dict(),
    *("_attn_implementation", "_commit_hash", "_name_or_path", "attention_dropout", "auto_map", "bos_token_id"),
    *("dtype", "eos_token_id", "initializer_range", "max_window_layers", "pad_token_id", "provenance"),
    *("tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache"),
}


def check_keys(settings: dict, known: set[str], findings, place: str = "config.json") -> None:
    """Finds keys that neither `known` nor this library's config names: they may change what the model is."""
    unknown = sorted(set(settings) - known - KNOWN_KEYS - _WITHOUT_EFFECT)
    if unknown:
        said = ", ".join(f"{key}={settings[key]!r}" for key in unknown)
        findings.add(f"{place} has keys whose meaning is not known here: {said}")


def check_architectures(settings: dict) -> None:
    """Raises `ValueError` for another kind of model, before its keys are found to be unknown."""
    names = settings.get("architectures")
    if isinstance(names, list) and names and not any(name in ARCHITECTURES for name in names):
        raise ValueError(f"architectures is {names}; this library reads {' and '.join(ARCHITECTURES)}")


def take(settings: dict, place: str, *keys: str) -> list:
    """Removes `keys` from settings and gives their values.

    Raises:
        ValueError: one is absent or null.
    """
    missing = [key for key in keys if settings.get(key) is None]
    if missing:
        raise ValueError(f"{place} lacks {', '.join(missing)}; no value is guessed")
    return [settings.pop(key) for key in keys]


def layer_kinds(settings: dict) -> list:
    """`layer_types` if it is a list; the config refuses anything else."""
    kinds = settings.get("layer_types")
    return kinds if isinstance(kinds, list) else []


def causality(causal: bool | None, layer_types: list) -> bool | None:
    """`is_causal` as it is written: None where it says the same as the default, sliding layers causal, others not."""
    if causal is None or all((kind == "sliding_attention") == causal for kind in layer_types):
        return None
    return causal
