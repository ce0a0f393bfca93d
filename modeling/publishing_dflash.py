"""Saving and pushing a drafter so that what others get is complete, whoever does it, with or without a library."""

import inspect
import shutil
from pathlib import Path

from .generate_dflash import generate

_TAGS = ("dflash", "speculative-decoding")
# Arguments of `save_pretrained` that only concern `push_to_hub=True`.
_PUSH = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")


class DFlashPublishing:
    """What a drafter adds to Transformers' `save_pretrained` and `push_to_hub`.

    Transformers copies the modules of a class beside its config and weights; `custom_generate/generate.py`, which
    nothing imports, it does not know of.
    """

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, push_to_hub=False, **kwargs):
        """As in Transformers; the folder also gets `custom_generate/generate.py`."""
        details = {name: kwargs.pop(name) for name in _PUSH if name in kwargs}
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if is_main_process:
            path = Path(save_directory) / "custom_generate" / "generate.py"
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(inspect.getsourcefile(generate), path)
        if push_to_hub:
            repo_id = details.pop("repo_id", None) or Path(save_directory).name
            self.push_to_hub(repo_id, token=kwargs.get("token"), **details)

    def push_to_hub(self, repo_id, *, tags=None, **kwargs):
        """As in Transformers: config, weights and code in one commit, with a short model card, which gets tags."""
        return super().push_to_hub(repo_id, tags=[*_TAGS, *(tags or ())], **kwargs)
