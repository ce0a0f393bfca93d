"""What Transformers' own DFlash loop, `generate(speculation_type="dflash")`, cannot express of a drafter."""


def check_native(config) -> None:
    """Raises `ValueError`, naming the setting, for a drafter that the loop would run as another model.

    That loop embeds a block with the target's embedding module, reads the outputs of slots 1 to B - 1 as positions
    p + 1 to p + B - 1, and gives them to the target's head.
    """
    if config.sample_from_anchor:
        raise ValueError(
            'generate(speculation_type="dflash") reads slot k of a block as position p + k, but this drafter has '
            "sample_from_anchor=True: its slot k predicts position p + k + 1; use draft.spec_generate(target=...)"
        )
