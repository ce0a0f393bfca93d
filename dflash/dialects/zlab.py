"""z-lab's format, legacy and nested, which SpecForge writes too, and which this library's own files are in."""

from dflash.dialects import expressing
from dflash.dialects.keys import check_architectures, check_keys

NAME = "zlab"


def matches(settings: dict, names: set[str]) -> bool:
    """What no other format claims."""
    return True


def read(settings: dict, tensors: dict, findings) -> tuple[dict, dict]:
    """Settings and tensors are this library's own; see `DFlashConfig` for the keys."""
    check_architectures(settings)
    check_keys(settings, set(), findings)
    if settings.get("model_type") != "qwen3":
        findings.add(f"model_type is {settings.get('model_type')!r} where this format has 'qwen3'")
    return settings, tensors


def check_expressible(config) -> None:
    """Also refuses what the serving engines that read this format would run as another model.

    Their rule is that of vLLM, SGLang and TensorRT-LLM at once: all read the features in ascending order, and none
    reads the last layer as Transformers does, after the final norm.
    """
    expressing.check_expressible(
        config,
        NAME,
        *("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "selector_rank"),
    )
    last = config.target_layer_ids[-1]
    if last >= config.num_target_layers - 1:
        raise ValueError(
            f"target_layer_ids ends with {last}, the last of {config.num_target_layers} target layers, which serving "
            "engines read before the final norm, or not at all"
        )
