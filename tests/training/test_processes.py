"""Runs in processes of their own: several that share the work, and one that is killed."""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import toy_run

PROGRAM = toy_run.__file__
SETTINGS = {"max_steps": 6, "log_every": 1, "batch_size": 8, "micro_batch_size": 4, "save_every": 1}


def start(output, *flags, processes=1, **changes):
    arguments = [PROGRAM, str(output), json.dumps({**SETTINGS, **changes}), *flags]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-4000:]
    return output


def losses(output):
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def weights(output):
    return load_file(output / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    toy_run.run(str(output), SETTINGS, [])
    return output


def test_two_processes_give_the_losses_of_one(alone, tmp_path):
    output = finish(start(tmp_path, processes=2))
    assert "process 0 of 2" in output and "process 1 of 2" in output
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    for name, tensor in weights(tmp_path).items():
        assert torch.allclose(tensor, weights(alone)[name], atol=1e-4), name


def test_sharded_weights_give_the_losses_of_one_process_and_are_resumed_by_one(alone, tmp_path):
    """FSDP2, in two processes; its states and its drafter are whole ones."""
    output = finish(start(tmp_path, "--shard", processes=2, max_steps=6))
    assert output.count("sharded") == 2
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    shutil.rmtree(tmp_path / "final")
    shutil.rmtree(tmp_path / "states" / "step-00000006")
    toy_run.run(str(tmp_path), SETTINGS, ["--resume"])
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    for name, tensor in weights(tmp_path).items():
        assert torch.allclose(tensor, weights(alone)[name], atol=1e-4), name


def test_a_killed_run_goes_on_to_the_same_weights(alone, tmp_path):
    deaths = [f"{place}:{step}" for place, step in random_deaths(random.Random(0))]
    output = finish(start(tmp_path, *deaths))
    assert output.count("died in") == 5
    assert losses(tmp_path) == losses(alone)
    for name, tensor in weights(tmp_path).items():
        assert torch.equal(tensor, weights(alone)[name]), name
    assert not list(tmp_path.rglob(".*.new"))


def random_deaths(chance: random.Random) -> list[tuple[str, int]]:
    """Every kind of death, after steps that grow."""
    steps = sorted(chance.choices(range(1, 6), k=5))
    return list(zip(chance.sample(["step", "writing", "moving", "step", "writing"], 5), steps, strict=True))
