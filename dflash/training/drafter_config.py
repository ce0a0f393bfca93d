"""The config of a new drafter, derived from its target's: a plain Qwen3-style transformer, whatever the target is.

Sources: the shapes of z-lab's published drafters (head width 128, the target's own otherwise, taps spread from layer 1
to the fourth from the end).
"""

from dflash.modeling.configuration_dflash import DFlashConfig

HEAD_DIM = 128
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def drafter_config(
    target_config,
    tokenizer=None,
    *,
    layers: int = 5,
    block_size: int = 16,
    taps: list[int] | int = 5,
    mask_token_id: int | None = None,
    sliding_window: int | None = None,
) -> DFlashConfig:
    """The config of an untrained drafter.

    Args:
        target_config (`PreTrainedConfig`): of any decoder; a wrapper's text model is found.
        tokenizer (*optional*): the target's, to find a mask token.
        layers, block_size: of the drafter.
        taps: layers of the target to read, or how many.
        mask_token_id: default: see `mask_token`.
        sliding_window: of all layers but the last; default: full attention.

    Raises:
        ValueError: a value that cannot be right, or no token that can stand for a mask.
    """
    text = target_config.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    kinds = ["sliding_attention" if sliding_window else "full_attention"] * (layers - 1) + ["full_attention"]
    settings = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": text.hidden_size,
        "intermediate_size": _intermediate_size(text),
        **_heads(text),
        "num_hidden_layers": layers,
        "num_target_layers": depth,
        "layer_types": kinds,
        "use_sliding_window": "sliding_attention" in kinds,
        "sliding_window": sliding_window if "sliding_attention" in kinds else None,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": _rope_theta(text),
        "max_position_embeddings": text.max_position_embeddings,
        "vocab_size": text.vocab_size,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "target_layer_ids": spread_taps(depth, taps) if isinstance(taps, int) else taps,
        "mask_token_id": mask_token(text.vocab_size, tokenizer, mask_token_id),
    }
    if getattr(text, "final_logit_softcapping", None):
        settings["final_logit_softcapping"] = text.final_logit_softcapping
    return DFlashConfig(**settings)


def spread_taps(depth: int, count: int) -> list[int]:
    """`round(1 + i (depth - 4) / (count - 1))`, rounding halves up; over all layers of a target too shallow for it."""
    if not 1 <= count <= depth:
        raise ValueError(f"a target of {depth} layers has 1 to {depth} taps, {count} were asked for")
    first, last = (1, depth - 3) if depth - 3 >= count else (0, depth - 1)
    if count == 1:
        return [(first + last) // 2]
    return [int(first + i * (last - first) / (count - 1) + 0.5) for i in range(count)]


def mask_token(rows: int, tokenizer=None, explicit: int | None = None) -> int:
    """The token whose embedding stands for a position to fill: the explicit one, or the tokenizer's mask token, or an
    embedding row that no token uses.

    Args:
        rows: of the target's embedding.

    Raises:
        ValueError: there is none, or it has no row.
    """
    found = explicit
    if found is None and tokenizer is not None:
        found = tokenizer.mask_token_id
        if found is None and len(tokenizer) < rows:
            found = len(tokenizer)
    if found is None:
        raise ValueError(
            "no token can stand for a mask: the tokenizer has no mask token and uses every row of the embedding. "
            f"Give a token that never occurs in text as --mask-token-id{_candidates(tokenizer)}"
        )
    if not 0 <= found < rows:
        raise ValueError(f"mask_token_id {found} has no row in the target's embedding, which has {rows}")
    return found


def _candidates(tokenizer) -> str:
    """Special tokens that neither begin, end nor structure a text."""
    if tokenizer is None:
        return ""
    template = str(getattr(tokenizer, "chat_template", None))
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    tokens = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if id not in used}
    free = [f"{id} ({token})" for id, token in tokens.items() if token not in template]
    return f", such as {', '.join(free[:5])}" if free else ""


def _heads(text) -> dict:
    """Those of the target where they are plain ones; otherwise as many of width 128 as the hidden size holds."""
    heads, groups = _value(text, "num_attention_heads"), _value(text, "num_key_value_heads")
    width = _value(text, "head_dim") or text.hidden_size // heads
    latent = _value(text, "kv_lora_rank") is not None
    if latent or groups is None or heads % groups or width > HEAD_DIM or width % 2:
        width = min(HEAD_DIM, text.hidden_size)
        heads = max(1, text.hidden_size // width)
        groups = max(count for count in range(1, min(8, heads) + 1) if heads % count == 0)
    return {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width}


def _intermediate_size(text) -> int:
    """The target's; of a mixture of experts three times the hidden size, as in published drafters."""
    size = _value(text, "intermediate_size")
    if not isinstance(size, int) or any(_value(text, name) for name in _EXPERTS):
        return 3 * text.hidden_size
    return size


def _value(text, name: str):
    """A config's value; of one that differs between layers, which an attribute refuses to give, the general one."""
    settings = text.to_dict()
    return settings[name] if name in settings else getattr(text, name, None)


def _rope_theta(text) -> float:
    """That of the target's full attention, without its scaling and its sections; 10,000 if it has none."""
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention") or parameters
    return float(parameters.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)
