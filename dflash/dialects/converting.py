"""Writes a drafter in another format, or says what that format cannot express; nothing is lost on the way."""

import json
import os
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig

from dflash.checkpoint import new_folder, write_checkpoint
from dflash.dialects import modelopt, speculators, zlab
from dflash.dialects.reading import load_drafter, read_checkpoint

WRITERS = {writer.NAME: writer for writer in (zlab, speculators, modelopt)}


def convert(
    source,
    folder: str | os.PathLike,
    to: str,
    *,
    target: str | None = None,
    change_window_rule: bool = False,
    **reading,
) -> Path:
    """Reads a drafter of any known format and writes it to a new folder in the format `to`, or writes nothing.

    Args:
        source: folder or repository of the drafter.
        folder: where to write; it must not exist.
        to (`str`): a name in `WRITERS`.
        target (`str`, *optional*): folder or repository of the target, whose config is read. speculators' format names
            it, and needs it.
        change_window_rule (`bool`): give sliding layers the rule that `to` has, by which up to `block_size - 1` of the
            oldest keys in a slot's window differ; without this they are an error if the rules differ.
        reading: `revision`, `strict`, `allow_pickle` and `settings`, as `load_drafter` takes them.

    Raises:
        FileExistsError: `folder` exists.
        ValueError: `to` cannot express the drafter, or it cannot be read.
    """
    folder, writer = Path(folder), WRITERS[to]
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; choose a new folder")
    target_config = None if target is None else AutoConfig.from_pretrained(target)
    checkpoint = read_checkpoint(source, target=target_config, **reading)
    config = checkpoint.config
    if change_window_rule:
        config.window_from_anchor = to == speculators.NAME and "sliding_attention" in config.layer_types
    writer.check_expressible(config)
    if writer is zlab:
        model = load_drafter(source, target=target_config, **reading)
        model.config.window_from_anchor = config.window_from_anchor
        return write_checkpoint(model, folder)
    settings = writer.write(config, target, target_config)
    with new_folder(folder) as staged:
        staged.mkdir()
        save_torch_state_dict(checkpoint.tensors, staged)
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (staged / "config.json").write_text(text, encoding="utf-8")
    return folder
