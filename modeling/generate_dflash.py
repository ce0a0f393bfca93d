"""`generate` with a drafter, in the form that Transformers loads from a repository's `custom_generate/generate.py`.

Every checkpoint carries this file twice: among its modules, so that whoever saves the drafter again has it, and as
`custom_generate/generate.py`, from where it cannot import those modules. So it stands alone.
"""

import os
from functools import partial

from transformers import AutoModel
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria


def generate(
    model,
    *inputs,
    assistant_model=None,
    streamer=None,
    tokenizer=None,
    stop_strings=None,
    stopping_criteria=None,
    **settings,
):
    """What `target.generate(custom_generate="<repo>", trust_remote_code=True, assistant_model=...)` runs.

    Args:
        model (`PreTrainedModel`): the target.
        assistant_model: the drafter, or its folder or repository id, whose code is then run as this file's is. A
            function that comes from a repository is not told which, so it has to be named here again. A name is loaded
            at every call; load it once and pass the object to avoid that.
        streamer, tokenizer, stop_strings, stopping_criteria, settings: as in `GenerationMixin.generate`; those of
            `DFlashDraftModel.custom_generate` besides.

    Raises:
        ValueError: there is no `assistant_model`, it is no drafter, or `stop_strings` come without `tokenizer`.
    """
    draft = _drafter(assistant_model, model)
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError(f"stop_strings={stop_strings!r} need the target's tokenizer: pass tokenizer=...")
        text = StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings)
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), text])
    return type(model).generate(
        model,
        *inputs,
        stopping_criteria=stopping_criteria,
        custom_generate=partial(draft.custom_generate, streamer=streamer),
        **settings,
    )


def _drafter(given, target):
    if isinstance(given, (str, os.PathLike)):
        given = AutoModel.from_pretrained(given, trust_remote_code=True, dtype="auto").to(target.device).eval()
    if not hasattr(given, "custom_generate"):
        raise ValueError(
            f"assistant_model is {'missing' if given is None else type(given).__name__}; pass the drafter, loaded with "
            "AutoModel.from_pretrained(..., trust_remote_code=True), or its folder or repository id"
        )
    return given
