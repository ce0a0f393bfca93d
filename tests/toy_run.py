"""Trains the toy drafter: `python toy_run.py FOLDER SETTINGS-AS-JSON [--resume] [--shard] [PLACE:STEP ...]`.

Each PLACE:STEP is a run that is killed there; the last one goes on to the end.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dflash.training.loop import Trainer
from toy import toy_config, toy_documents, toy_drafter, toy_source, toy_target


class Sharding(Accelerator):
    """Shards by FSDP2, which accelerate itself does on an accelerator only."""

    def prepare(self, model, optimizer):
        mesh = init_device_mesh("cpu", (self.num_processes,))
        groups = [[name for name, p in model.named_parameters() if any(p is q for q in group["params"])]
                  for group in optimizer.param_groups]  # fmt: skip
        for layer in model.draft.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded = dict(model.named_parameters())
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [sharded[name] for name in names]
        return model, super().prepare(optimizer)


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(contents, path):
    Path(path).write_bytes(b"half")
    die()


# Where a process dies: in the middle of a step, in the middle of writing a state, and before moving it to its place.
DEATHS = {"step": ("_scale_gradients", die), "writing": ("save", write_half), "moving": ("rename", die)}


def arm(trainer, place: str, step: int) -> None:
    """Makes the process die in `place` once `step` steps are done."""
    name, deadly = DEATHS[place]
    owner = {"step": trainer, "writing": torch, "moving": os}[place]
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (deadly if trainer.step >= step else original)(*args, **kwargs))


def run(output: str, settings: dict, flags: list[str], death: tuple[str, int] | None = None) -> None:
    target = toy_target()
    accelerator = Sharding(cpu=True) if "--shard" in flags else None
    config = toy_config(output, **settings)
    trainer = Trainer(config, toy_drafter(), target, toy_documents(), toy_source(target), accelerator=accelerator)
    print(f"process {trainer.accelerator.process_index} of {trainer.accelerator.num_processes}", flush=True)
    if all(hasattr(parameter, "full_tensor") for parameter in trainer.model.parameters()):
        print("sharded", flush=True)
    if death is not None:
        arm(trainer, *death)
    trainer.run("--resume" in flags)


def run_and_die(output: str, settings: dict, death: tuple[str, int]) -> None:
    """Runs, in a child process that has to be killed by itself."""
    child = os.fork()
    if child == 0:
        run(output, settings, ["--resume"], death)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{death}: it lived, status {status}"
    print(f"died in {death[0]} after {death[1]}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, settings, *flags = sys.argv[1:]
    deaths = [flag.split(":") for flag in flags if ":" in flag]
    for place, step in deaths:
        run_and_die(output, json.loads(settings), (place, int(step)))
    run(output, json.loads(settings), ["--resume"] if deaths else flags)
