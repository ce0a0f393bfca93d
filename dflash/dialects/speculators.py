"""The format of vLLM's speculators library (versions up to 0.9.0), for drafters of type `dflash`.

Taps are counted from the embedding, so `aux_hidden_state_layer_ids` are `i + 1`. The transformer's keys stand in
`transformer_layer_config`. In sliding layers all slots see the `sliding_window` positions before the anchor, and the
block without a window; `sliding_window_non_causal` makes them bidirectional inside the block; full layers always are. A
head over a part of the vocabulary comes with `d2t` and `t2d`; older files also hold copies of the target's embedding
and head.
"""

from dflash.dialects import expressing
from dflash.dialects.keys import check_keys, layer_kinds, take

NAME = "speculators"
_MARKS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
_KEYS = {
    *_MARKS,
    *("speculators_version", "draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids"),
    *("mask_token_id", "sliding_window_non_causal", "sample_from_anchor", "tie_word_embeddings"),
}

# Keys that this format's code looks for on one level only.
_INSIDE = {
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("hidden_act", "vocab_size", "max_position_embeddings", "rms_norm_eps", "attention_bias", "layer_types"),
    *("sliding_window", "use_sliding_window", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
}


def matches(settings: dict, names: set[str]) -> bool:
    return any(key in settings for key in _MARKS)


def target_name(settings: dict) -> str | None:
    """The target that the file names, if any."""
    outer = settings.get("speculators_config")
    verifier = outer.get("verifier") if isinstance(outer, dict) else None
    return verifier.get("name_or_path") if isinstance(verifier, dict) else None


def read(settings: dict, tensors: dict, findings) -> tuple[dict, dict]:
    kind = settings.get("speculators_model_type")
    if kind != "dflash":
        raise ValueError(f"speculators_model_type is {kind!r}; this library reads 'dflash'")
    _check_outer_keys(settings, findings)
    rest = dict(settings)
    (layers,) = take(rest, "config.json", "transformer_layer_config")
    layers = dict(layers)
    check_keys(layers, set(), findings, "transformer_layer_config")
    if layers.get("model_type") != "qwen3":
        findings.add(f"transformer_layer_config.model_type is {layers.get('model_type')!r}; only 'qwen3' is known here")
    block, mask, taps, draft_vocabulary = take(
        rest, "config.json", "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size"
    )
    shifted, non_causal = rest.get("sample_from_anchor", False), rest.get("sliding_window_non_causal", False)
    for name, value in (("sample_from_anchor", shifted), ("sliding_window_non_causal", non_causal)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, config.json has {value!r}")
    _check_proposals(settings, block, shifted, findings)
    width = rest.get("target_hidden_size")
    if width not in (None, layers.get("hidden_size")):
        findings.add(f"target_hidden_size {width} differs from hidden_size {layers.get('hidden_size')}")
    slides = "sliding_attention" in layer_kinds(layers)
    dflash = {
        "block_size": block,
        "mask_token_id": mask,
        "target_layer_ids": _taps(taps),
        "sample_from_anchor": shifted,
        "window_from_anchor": slides,
        **_own_parts(draft_vocabulary, layers.get("vocab_size"), tensors, findings),
    }
    for key in ("architectures", "model_type", "is_causal"):
        layers.pop(key, None)
    return {
        **layers,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "is_causal": False if slides and non_causal else None,
        "dtype": rest.get("dtype", layers.get("dtype")),
        "draft_vocab_size": draft_vocabulary,
        "dflash_config": dflash,
    }, tensors


def _check_outer_keys(settings: dict, findings) -> None:
    """Keys of the transformer mean nothing at the outer level, so that one found there was probably moved."""
    check_keys({key: value for key, value in settings.items() if key not in _KEYS}, set(), findings)
    layers = settings.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise ValueError(f"transformer_layer_config must be a dictionary, config.json has {layers!r}")
    moved = sorted(key for key in set(settings) & _INSIDE if layers.get(key) != settings[key])
    if moved:
        findings.add(f"{', '.join(moved)} mean nothing outside transformer_layer_config")
    inside = sorted(set(layers) & (_KEYS - {"tie_word_embeddings"}))
    if inside:
        findings.add(f"{', '.join(inside)} mean nothing inside transformer_layer_config")


def _taps(ids) -> list[int]:
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"aux_hidden_state_layer_ids must be a list of integers, got {ids!r}")
    if 0 in ids:
        raise ValueError(f"aux_hidden_state_layer_ids {ids} taps the embedding (0), which is not implemented")
    return [i - 1 for i in ids]


def _check_proposals(settings: dict, block, shifted: bool, findings) -> None:
    """The number of proposals is said twice: here, and by block size and slot meaning."""
    outer = settings.get("speculators_config")
    if not isinstance(outer, dict):
        findings.add(f"speculators_config must be a dictionary, config.json has {outer!r}")
        return
    if outer.get("algorithm", "dflash") != "dflash":
        findings.add(f"speculators_config.algorithm is {outer['algorithm']!r}, not 'dflash'")
    methods = outer.get("proposal_methods")
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        findings.add(f"speculators_config.proposal_methods must be a list of dictionaries, it is {methods!r}")
        return
    counts = [method.get("speculative_tokens") for method in methods]
    if not isinstance(block, int):
        return
    proposals = block - (not shifted)
    for count in counts:
        said = f"speculative_tokens is {count!r}, but block_size {block}, sample_from_anchor {shifted} make {proposals}"
        if not isinstance(count, int) or count > proposals:
            findings.add(said)
        elif count < proposals:
            findings.warn(said)


def _own_parts(draft_vocabulary, vocabulary, tensors: dict, findings) -> dict:
    """Which of embedding and head the file brings; the `d2t` and `t2d` of a whole vocabulary say nothing."""
    reduced = draft_vocabulary != vocabulary
    embedding, head = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    for name in ("d2t", "t2d"):
        if name in tensors and not reduced:
            findings.add(f"{name} is there, but draft_vocab_size equals vocab_size, {vocabulary}")
    if not reduced and embedding != head:
        one, other = ("embed_tokens", "lm_head") if embedding else ("lm_head", "embed_tokens")
        findings.warn(f"the file has {one}.weight but no {other}.weight; the target's is used for the latter")
    return {"has_embed_tokens": embedding, "has_lm_head": head}


def check_expressible(config) -> None:
    """Sliding layers need speculators' window rule, full ones are never causal, and only a reduced head is stored."""
    allowed = ["sample_from_anchor", "window_from_anchor"]
    if config.has_draft_vocabulary:
        allowed += ["has_lm_head", "draft_vocab_size"]
    expressing.check_expressible(config, NAME, *allowed)
    slides = "sliding_attention" in config.layer_types
    if slides and not config.window_from_anchor:
        raise ValueError(
            f"the format {NAME!r} cannot express window_from_anchor=False: it counts a sliding layer's window from the "
            "anchor for all slots, not from each slot's own position"
        )
    causal = {kind: config.layer_is_causal(i) for i, kind in enumerate(config.layer_types)}
    if causal.get("full_attention"):
        raise ValueError(f"the format {NAME!r} cannot express is_causal=True in full layers")


def write(config, target: str | None, target_config) -> dict:
    """config.json for tensors that keep their names.

    Raises:
        ValueError: no target is given, or it is not this drafter's.
    """
    if target is None:
        raise ValueError(f"the format {NAME!r} names the target; give its folder or repository (--target)")
    text = target_config.get_text_config(decoder=True)
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, text.hidden_size),
        ("num_target_layers", config.num_target_layers, text.num_hidden_layers),
        ("vocab_size", config.vocab_size, text.vocab_size),
    ):
        if ours != theirs:
            raise ValueError(f"the drafter's {name} is {ours}, but {target} has {theirs}; it is another target")
    layers = expressing.layer_keys(config)
    layers.pop("rope_theta")  # stands in rope_parameters
    slides = "sliding_attention" in config.layer_types
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.proposals(),
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": target_config.architectures or []},
        },
        "transformer_layer_config": {**layers, "model_type": "qwen3"},
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": slides and config.is_causal is False,
        "tie_word_embeddings": False,
        "dtype": layers.get("dtype"),
    }
