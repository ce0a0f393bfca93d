"""Trains the toy drafter in a process of its own: `python toy_run.py FOLDER SETTINGS-AS-JSON [--resume]`."""

import json
import sys

import torch

from dflash.training.loop import Trainer
from toy import toy_config, toy_documents, toy_drafter, toy_source, toy_target

if __name__ == "__main__":
    torch.set_num_threads(1)
    target = toy_target()
    config = toy_config(sys.argv[1], **json.loads(sys.argv[2]))
    trainer = Trainer(config, toy_drafter(), target, toy_documents(), toy_source(target))
    print(f"process {trainer.accelerator.process_index} of {trainer.accelerator.num_processes}", flush=True)
    trainer.run("--resume" in sys.argv)
