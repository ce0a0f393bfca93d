"""Checkpoint folders: the one place that writes them, and the files that ship inside.

Run as `python -m dflash.checkpoint FOLDER...` to bring the shipped files of existing folders up to date.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import dflash.modeling

AUTO_MAP = {"AutoConfig": "configuration_dflash.DFlashConfig", "AutoModel": "modeling_dflash.DFlashDraftModel"}
SOURCES = Path(dflash.modeling.__path__[0])
# What a checkpoint carries a second time, where `generate(custom_generate=<folder>)` looks for it.
CUSTOM_GENERATE = Path("custom_generate") / "generate.py"


def shipped_files() -> list[Path]:
    """The sources that every checkpoint carries."""
    return sorted(SOURCES.glob("*_dflash.py"))


def write_checkpoint(model, folder: str | os.PathLike) -> Path:
    """Writes config, weights and shipped code of a drafter to a new folder, or to none at all.

    Raises:
        FileExistsError: `folder` exists; nothing is overwritten.
    """
    with new_folder(folder) as staged:
        model.save_pretrained(staged)
        ship(staged)
    return Path(folder)


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike):
    """Gives a folder to make and fill, beside `folder`, that becomes it in one step at the end, or vanishes.

    Raises:
        FileExistsError: `folder` exists; nothing is overwritten.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; choose a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        staged = Path(scratch) / folder.name
        yield staged
        os.rename(staged, folder)


def ship(folder: str | os.PathLike) -> None:
    """Puts the shipped files beside a config.json, and names them in its `auto_map`.

    Raises:
        FileNotFoundError: `folder` has no config.json.
    """
    folder = Path(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["auto_map"] = AUTO_MAP
    (folder / CUSTOM_GENERATE.parent).mkdir(exist_ok=True)
    copies = [(source, source.name) for source in shipped_files()]
    for source, name in [*copies, (SOURCES / "generate_dflash.py", CUSTOM_GENERATE)]:
        _replace(folder / name, lambda target, source=source: shutil.copyfile(source, target))
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    _replace(path, lambda target: target.write_text(text, encoding="utf-8"))


def _replace(path: Path, write) -> None:
    """Writes a file beside `path` and moves it there: a reader, or a crash, sees the old or the new one."""
    staged = path.with_name(f".{path.name}.new")
    try:
        write(staged)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        ship(argument)
