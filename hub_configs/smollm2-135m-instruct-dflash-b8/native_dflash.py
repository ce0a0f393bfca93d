"""What Transformers' own DFlash loop, `generate(speculation_type="dflash")`, cannot express of a drafter."""

import warnings


def check_native(config) -> None:
    """Raises `ValueError`, naming the setting, for a drafter that the loop would run as another model.

    That loop embeds a block with the target's embedding module, reads the outputs of slots 1 to B - 1 as positions
    p + 1 to p + B - 1, gives them to the target's head, and keeps a cache of its own with windows counted per slot.
    What only costs acceptance is a warning.
    """
    obstacles = {
        "sample_from_anchor=True: its slot k predicts position p + k + 1, not p + k": config.sample_from_anchor,
        "window_from_anchor=True: its windows begin at the anchor's": config.window_from_anchor,
        "has_embed_tokens=True: it does not use the target's embedding": config.has_embed_tokens,
        "has_lm_head=True: it does not use the target's head": config.has_lm_head,
    }
    found = [obstacle for obstacle, present in obstacles.items() if present]
    if found:
        raise ValueError(
            f'generate(speculation_type="dflash") cannot express this drafter, which has {"; ".join(found)}; use '
            "draft.spec_generate(target=...)"
        )
    if config.has_correction:
        warnings.warn('generate(speculation_type="dflash") leaves out the candidate selector of DFlash 2', stacklevel=3)
    if config.input_embedding_scale != 1.0:
        warnings.warn(
            f'generate(speculation_type="dflash") embeds as the target does, without input_embedding_scale='
            f"{config.input_embedding_scale}",
            stacklevel=3,
        )
