"""States of a run to resume from: float32 weights, optimiser and progress, whole and independent of the processes."""

import json
import os
import re
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

_NAME = re.compile(r"step-(\d+)$")
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class StateFolder:
    """The states of a run in one folder, `step-<number>` each.

    A state is written beside its place and moved there, so that a killed process leaves a whole one or none.

    Args:
        folder: of the run's states.
        keep: how many stay, the newest.
    """

    def __init__(self, folder, keep: int):
        self.folder, self.keep = Path(folder), keep

    def newest(self) -> Path | None:
        found = self._states()
        return found[-1] if found else None

    def save(self, step: int, model, optimizer, progress: dict, main: bool) -> None:
        """Writes the state after `step` steps; every process has to call it, the main one writes."""
        weights, moments = get_state_dict(model, optimizer, options=_WHOLE)
        if not main:
            return
        place, staged = self.folder / f"step-{step:08d}", self.folder / f".step-{step:08d}.new"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        torch.save({"model": weights, "optimizer": moments}, staged / "state.pt")
        (staged / "progress.json").write_text(json.dumps({"step": step, **progress}, indent=2), encoding="utf-8")
        for path in staged.iterdir():
            _flush(path)
        if place.exists():
            shutil.rmtree(place)
        os.rename(staged, place)
        for old in self._states()[: -self.keep]:
            shutil.rmtree(old)

    def load(self, place: Path, model, optimizer) -> dict:
        """Puts the state in folder `place` into model and optimiser, of any number of processes; gives its progress."""
        stored = torch.load(place / "state.pt", map_location="cpu", weights_only=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=stored["model"],
            optim_state_dict=stored["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        return json.loads((place / "progress.json").read_text(encoding="utf-8"))

    def _states(self) -> list[Path]:
        found = self.folder.glob("step-*") if self.folder.exists() else ()
        return sorted(path for path in found if _NAME.match(path.name))


def _flush(path: Path) -> None:
    """Has the file on the disk before it is moved to its place."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
