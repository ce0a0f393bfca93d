"""What Transformers makes of a drafter's checkpoint without this library, as `dflash check` says it."""

import json
import runpy
import warnings

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from dflash import DFlashDraftModel, cli
from dflash.checkpoint import AUTO_MAP, shipped_files, write_checkpoint
from dflash.remote_code import report_code
from tiny import tiny_drafter


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tiny_drafter(dtype=torch.float32), tmp_path / "draft")


def report(folder):
    return report_code(DFlashDraftModel.from_pretrained(folder), str(folder))


def change(folder, **changes):
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def check(capsys, *arguments):
    code = cli.main(["check", *arguments])
    return code, *capsys.readouterr()


def test_a_checkpoint_of_this_library(folder):
    found = report(folder)
    assert found.plain_class == "Qwen3Model" and found.warnings == []
    assert found.random == ["embed_tokens.weight"] and found.ignored == ["fc.weight", "hidden_norm.weight"]


def loads(folder, trust):
    """The class that Transformers gives for the folder, and the package that it is from."""
    kind = type(AutoModel.from_pretrained(folder, trust_remote_code=trust))
    return kind.__name__, kind.__module__.split(".")[0]


def test_what_the_report_says_is_what_happens(folder):
    """With and without `trust_remote_code=True`, for a good checkpoint and for two that are not."""
    assert loads(folder, False) == ("Qwen3Model", "transformers")
    assert loads(folder, True) == ("DFlashDraftModel", "transformers_modules")
    change(folder, auto_map=None)
    assert "plain model of it even with trust_remote_code=True" in report(folder).warnings[0]
    assert loads(folder, True) == ("Qwen3Model", "transformers")
    change(folder, auto_map=AUTO_MAP)
    lacking = folder.rename(folder.with_name("lacking"))  # Transformers remembers the classes of a folder by its name
    (lacking / "modeling_dflash.py").unlink()
    assert "does not load with trust_remote_code=True" in report(lacking).warnings[0]
    with pytest.raises(OSError, match=r"modeling_dflash\.py"):
        loads(lacking, True)


def test_no_auto_map(folder):
    change(folder, auto_map=None)
    (warning,) = report(folder).warnings
    assert "no auto_map" in warning and "dflash.checkpoint" in warning
    change(folder, auto_map={"AutoConfig": AUTO_MAP["AutoConfig"]})
    assert "no auto_map for AutoModel" in report(folder).warnings[0]


def test_an_auto_map_of_somebody_else(folder):
    change(folder, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    (warning,) = report(folder).warnings
    assert "'dflash.DFlashDraftModel'" in warning and "instead of this library's" in warning
    change(folder, auto_map={key: f"somebody/drafter--{value}" for key, value in AUTO_MAP.items()})
    assert report(folder).warnings == []


def test_missing_and_stale_files(folder):
    (folder / "cache_dflash.py").unlink()
    stale = folder / "sampling_dflash.py"
    stale.write_text(stale.read_text() + "# changed\n")
    missing, old = report(folder).warnings
    assert "cache_dflash.py" in missing and "sampling_dflash.py" not in missing
    assert "sampling_dflash.py differs" in old and "cache_dflash.py" not in old
    for source in shipped_files():
        (folder / source.name).unlink(missing_ok=True)
    (warning,) = report(folder).warnings
    assert all(source.name in warning for source in shipped_files())


def test_the_advice_works(folder, monkeypatch):
    change(folder, auto_map=None)
    (folder / "cache_dflash.py").unlink()
    (folder / "sampling_dflash.py").write_text("old")
    monkeypatch.setattr("sys.argv", ["dflash.checkpoint", str(folder)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
        runpy.run_module("dflash.checkpoint", run_name="__main__")
    assert report(folder).warnings == []


def test_a_drafter_alone(folder, capsys):
    """`dflash check --draft FOLDER` says what happens to those who load it without remote code."""
    code, out, _ = check(capsys, "--draft", str(folder), "--device", "cpu")
    assert code == 0 and "silently makes a plain Qwen3Model" in out and "warning" not in out
    assert "embed_tokens.weight random" in out and "fc.weight, hidden_norm.weight ignored" in out
    change(folder, auto_map=None)
    code, out, _ = check(capsys, "--draft", str(folder), "--device", "cpu")
    assert (
        code == 0 and "warning: its config.json has no auto_map" in out and "runs the files of this library" not in out
    )
    code, out, _ = check(capsys, "--draft", str(folder), "--device", "cpu", "--json")
    found = json.loads(out)
    assert found["works"] is True and found["pair"] is None and len(found["code"]["warnings"]) == 1


def test_a_pair(pair, capsys):
    code, out, _ = check(capsys, *pair)
    assert code == 0 and "block_size: 8" in out and "silently makes a plain Qwen3Model" in out
    found = json.loads(check(capsys, *pair, "--json")[1])
    assert found["code"]["plain_class"] == "Qwen3Model" and found["code"]["warnings"] == []


def test_a_folder_that_is_no_drafter(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    code, _, err = check(capsys, "--draft", str(tmp_path), "--device", "cpu")
    assert code == 1 and "has no weights" in err
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    code, _, err = check(capsys, "--draft", str(tmp_path), "--device", "cpu")
    assert code == 1 and "Qwen3ForCausalLM" in err


@pytest.mark.parametrize("arguments", [["--target", "x"], [], ["--draft", "x", "--probe"]], ids=str)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["check", *arguments])
    assert error.value.code == 2 and "--target" in capsys.readouterr().err
