"""What a format cannot express is an error that names the setting."""


def check_expressible(config, dialect: str, *expressible: str) -> None:
    """Raises `ValueError` for settings beyond plain DFlash that are not among the `expressible` names.

    `draft_token_ids` only save time, so a format without them leaves them out.

    Args:
        config (`DFlashConfig`): the drafter's.
        dialect (`str`): the format's name, for the message.
    """
    slides = "sliding_attention" in config.layer_types
    used = {
        "sample_from_anchor": config.sample_from_anchor,
        "window_from_anchor": config.window_from_anchor and slides,
        "attention_sink_bias": config.attention_sink_bias,
        "has_embed_tokens": config.has_embed_tokens,
        "has_lm_head": config.has_lm_head,
        "draft_vocab_size": config.has_draft_vocabulary,
        "input_embedding_scale": config.input_embedding_scale != 1.0,
        "output_multiplier": config.output_multiplier != 1.0,
        "final_logit_softcapping": bool(config.final_logit_softcapping),
        "selector_rank": config.has_correction,
    }
    found = [
        f"{name}={getattr(config, name)!r}" for name, present in used.items() if present and name not in expressible
    ]
    if found:
        raise ValueError(f"the format {dialect!r} cannot express {', '.join(found)} of this drafter")


def layer_keys(config) -> dict:
    """The transformer's keys and what has no effect: a config's own ones without those that only DFlash has."""
    ours = {
        *("architectures", "auto_map", "block_size", "dflash_config", "draft_vocab_size", "is_causal"),
        *("model_type", "num_target_layers", "transformers_version"),
    }
    return {key: value for key, value in config.to_dict().items() if key not in ours}
