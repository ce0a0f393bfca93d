"""DeepSpec's format: keys at top level, all slots predict, embedding and head in the file.

It is DFlash only without a Markov head and without a confidence head; with either it is DSpark, which is not
implemented here.
"""

from dflash.dialects.keys import check_keys, take

NAME = "deepspec"
_KEYS = {
    *("num_anchors", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
}
_HEADS = ("markov_head.", "confidence_head.", "logit_head.")


def matches(settings: dict, names: set[str]) -> bool:
    architectures = settings.get("architectures")
    named = isinstance(architectures, list) and any("DSpark" in str(name) for name in architectures)
    return named or ("num_anchors" in settings and "markov_rank" in settings)


def read(settings: dict, tensors: dict, findings) -> tuple[dict, dict]:
    settings = dict(settings)
    check_keys(settings, _KEYS, findings)
    if settings.get("architectures") not in (None, ["Qwen3DSparkModel"]):
        raise ValueError(f"architectures is {settings['architectures']}; of DeepSpec's, only Qwen3DSparkModel is known")
    rank, confidence = take(settings, "config.json", "markov_rank", "enable_confidence_head")
    heads = sorted(name for name in tensors if name.startswith(_HEADS))
    if rank != 0 or confidence is not False or heads:
        raise ValueError(
            f"this is a DSpark drafter (markov_rank {rank!r}, enable_confidence_head {confidence!r}, "
            f"{', '.join(heads) or 'no tensors of either head'}); DSpark's heads are not implemented here"
        )
    for key in _KEYS:
        settings.pop(key, None)
    block, mask, taps = take(settings, "config.json", "block_size", "mask_token_id", "target_layer_ids")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in tensors:
            findings.add(f"{name} is missing; this format's drafters use their own")
    if "dflash_config" in settings:
        findings.add("dflash_config does not belong in this format, whose keys stand at top level")
    shifted = settings.pop("sample_from_anchor", None)
    if shifted not in (None, True):
        findings.add(f"sample_from_anchor is {shifted!r}, but all slots of this format's drafters predict")
    dflash = {
        "block_size": block,
        "mask_token_id": mask,
        "target_layer_ids": taps,
        "sample_from_anchor": True,
        "has_embed_tokens": "embed_tokens.weight" in tensors,
        "has_lm_head": "lm_head.weight" in tensors,
    }
    return {**settings, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": dflash}, tensors
