"""A checkpoint folder is whole or absent, carries our code byte for byte, and needs nothing else."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from dflash.checkpoint import ship, shipped_files, write_checkpoint
from dflash.demo import DRAFTER
from tiny import plain, tiny_drafter, tiny_prompt, tiny_target


def assert_ships_our_files(folder):
    for source in shipped_files():
        assert (folder / source.name).read_bytes() == source.read_bytes(), f"{source.name} is out of date"
    entry = folder / "custom_generate" / "generate.py"
    assert entry.read_bytes() == (folder / "generate_dflash.py").read_bytes()
    found = {path for path in folder.rglob("*.py")}
    assert found == {folder / source.name for source in shipped_files()} | {entry}


def test_written_folders_carry_our_files(tmp_path):
    folder = write_checkpoint(tiny_drafter(), tmp_path / "draft")
    assert_ships_our_files(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_save_pretrained_alone_carries_them_too(tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    assert_ships_our_files(tmp_path)


def test_the_drafter_in_the_repository_is_up_to_date():
    assert_ships_our_files(DRAFTER)
    settings = json.loads((DRAFTER / "config.json").read_text())
    assert settings["auto_map"]["AutoModel"] == "modeling_dflash.DFlashDraftModel"


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="draft"):
        write_checkpoint(tiny_drafter(), tmp_path / "draft")
    assert (tmp_path / "draft" / "mine.txt").read_text() == "keep"


def test_a_failing_write_leaves_nothing(tmp_path):
    draft = tiny_drafter()
    draft.save_pretrained = lambda folder: (folder.mkdir(), (folder / "half").write_text("x"), 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(draft, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


def test_shipping_a_broken_config_keeps_it(tmp_path):
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError):
        ship(tmp_path)
    assert (tmp_path / "config.json").read_text() == "{broken"
    with pytest.raises(FileNotFoundError):
        ship(tmp_path / "nowhere")


FRESH = """
import sys
sys.modules["dflash"] = None  # importing it fails from here on
import torch
from transformers import AutoModel, AutoModelForCausalLM

draft = AutoModel.from_pretrained("draft", trust_remote_code=True, dtype="auto")
target = AutoModelForCausalLM.from_pretrained("target", dtype="auto")
ids = torch.tensor([{ids}])
output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=20, return_dict=True)
assert output.emitted.shape[1] > 0
assert type(draft).__module__.startswith("transformers_modules."), type(draft)
assert not any(name == "modeling" or name.startswith("dflash.") for name in sys.modules)
prompt = dict(inputs=ids, attention_mask=torch.ones_like(ids))
again = target.generate(**prompt, max_new_tokens=20, custom_generate=draft.custom_generate)
assert torch.equal(again, output.sequences)
print("TOKENS", output.sequences[0].tolist())
draft.save_pretrained("again")
"""


def test_a_checkpoint_decodes_in_a_fresh_process_without_this_library(tmp_path):
    target, ids = tiny_target("qwen3"), tiny_prompt(7)
    target.save_pretrained(tmp_path / "target")
    write_checkpoint(tiny_drafter("mixed"), tmp_path / "draft")
    code = textwrap.dedent(FRESH).format(ids=ids[0].tolist())
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    tokens = json.loads(result.stdout.split("TOKENS", 1)[1].splitlines()[0])
    assert torch.equal(torch.tensor([tokens]), plain(target, ids, 20))
    assert_ships_our_files(tmp_path / "again")
