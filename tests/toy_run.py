"""Trains the toy drafter in a process of its own: `python toy_run.py FOLDER SETTINGS-AS-JSON [--resume] [--shard]`."""

import json
import sys

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


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = toy_target()
    config = toy_config(sys.argv[1], **json.loads(sys.argv[2]))
    accelerator = Sharding(cpu=True) if "--shard" in sys.argv else None
    trainer = Trainer(config, toy_drafter(), target, toy_documents(), toy_source(target), accelerator=accelerator)
    print(f"process {trainer.accelerator.process_index} of {trainer.accelerator.num_processes}", flush=True)
    if all(hasattr(parameter, "full_tensor") for parameter in trainer.model.parameters()):
        print("sharded", flush=True)
    trainer.run("--resume" in sys.argv)
