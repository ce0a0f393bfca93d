"""What becomes of a drafter's checkpoint in Transformers alone, with `trust_remote_code=True` and without.

This library loads a checkpoint with its own classes. Others load it by its `auto_map`, or, without
`trust_remote_code=True`, as the plain model that its `model_type` names, which nobody notices.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel

from dflash.checkpoint import AUTO_MAP, shipped_files
from dflash.modeling.configuration_dflash import DFlashConfig


@dataclass(frozen=True)
class CodeReport:
    """How Transformers loads a checkpoint without this library.

    Attributes:
        plain_class: what it builds without `trust_remote_code=True`; None: it refuses to.
        random: weights of that model which the checkpoint does not have, so that they are random.
        ignored: weights of the checkpoint which that model does not have.
        warnings: what is wrong with the `auto_map` and with the files beside config.json.
    """

    plain_class: str | None
    random: list[str]
    ignored: list[str]
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        plain = "without trust_remote_code=True Transformers refuses to load this checkpoint"
        if self.plain_class is not None:
            plain = (
                f"without trust_remote_code=True Transformers silently makes a plain {self.plain_class} of this "
                f"checkpoint: {', '.join(self.random)} random, {', '.join(self.ignored)} ignored"
            )
        good = [] if self.warnings else ["with trust_remote_code=True Transformers runs the files of this library"]
        return [f"code: {line}" for line in (*good, plain)] + [f"warning: {warning}" for warning in self.warnings]


def report_code(draft, name: str, revision: str | None = None) -> CodeReport:
    """The `CodeReport` of a drafter (`DFlashDraftModel`) that was loaded from the folder or Hub repository `name`.

    Of a repository only config.json is looked at, of a folder the shipped files too.
    """
    raw, _ = DFlashConfig.get_config_dict(name, revision=revision)
    plain = _plain_model(name, revision)
    ours, theirs = set(draft.state_dict()), set() if plain is None else set(plain.state_dict())
    warnings = _auto_map_warnings(raw.get("auto_map") or {})
    if not warnings and Path(name).is_dir():
        warnings = _file_warnings(Path(name))
    return CodeReport(
        plain_class=None if plain is None else type(plain).__name__,
        random=sorted(theirs - ours),
        ignored=sorted(ours - theirs) if plain is not None else [],
        warnings=warnings,
    )


def _plain_model(name: str, revision: str | None):
    """What AutoModel builds without remote code, without its weights; None: it has no class for this checkpoint."""
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModel.from_config(config, trust_remote_code=False)
    except ValueError:
        return None


def _auto_map_warnings(auto_map: dict) -> list[str]:
    """An `auto_map` of a file in a repository reads `repository--module.Class`."""
    found = {key: str(value).split("--")[-1] for key, value in auto_map.items()}
    if "AutoModel" not in found:
        return [
            "its config.json has no auto_map for AutoModel, so that Transformers makes the plain model of it even with "
            "trust_remote_code=True; `python -m dflash.checkpoint FOLDER` adds it, and the files it names"
        ]
    wrong = [f"{key} {found.get(key)!r}" for key in AUTO_MAP if found.get(key) != AUTO_MAP[key]]
    if not wrong:
        return []
    return [
        f"its auto_map names {', '.join(wrong)}: with trust_remote_code=True Transformers runs that instead of this "
        "library's code; `python -m dflash.checkpoint FOLDER` puts the library's there"
    ]


def _file_warnings(folder: Path) -> list[str]:
    """What is missing or old among the shipped files beside a config.json that names them."""
    sources = shipped_files()
    missing = [source.name for source in sources if not (folder / source.name).exists()]
    stale = [
        source.name
        for source in sources
        if source.name not in missing and (folder / source.name).read_bytes() != source.read_bytes()
    ]
    warnings = []
    if missing:
        warnings.append(
            f"its auto_map needs files that are not there ({', '.join(missing)}), so that it does not load with "
            f"trust_remote_code=True; `python -m dflash.checkpoint {folder}` adds them"
        )
    if stale:
        warnings.append(
            f"{', '.join(stale)} {'differs' if len(stale) == 1 else 'differ'} from this library's, and are what runs "
            f"with trust_remote_code=True; `python -m dflash.checkpoint {folder}` brings them up to date"
        )
    return warnings
