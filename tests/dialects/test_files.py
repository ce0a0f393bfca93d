"""Files of a checkpoint: shards, pickles, and what is missing or said twice."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash import load_drafter
from dflash.dialects.files import INDEX, fetch, read_settings, read_tensors
from samples import behaviour, drafter, same


@pytest.fixture
def sharded(tmp_path):
    drafter().save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / INDEX).exists()
    return tmp_path


def shard_of(folder, tensor):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def test_shards_are_one_checkpoint(sharded):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert same(behaviour(load_drafter(sharded)), behaviour(drafter()), tolerance=0)


def test_a_missing_shard_is_named(sharded):
    path = shard_of(sharded, "fc.weight")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        read_tensors(sharded)


def test_index_and_shards_have_to_agree(sharded):
    path = shard_of(sharded, "fc.weight")
    tensors = load_file(path)
    save_file({**tensors, "extra": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="extra"):
        read_tensors(sharded)
    tensors.pop("fc.weight")
    save_file({**tensors, "other": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"fc\.weight is in"):
        read_tensors(sharded)
    places = json.loads((sharded / INDEX).read_text())["weight_map"]
    twice = next(name for name, place in places.items() if place != path.name)
    save_file({**tensors, "fc.weight": torch.zeros(1), twice: torch.ones(1)}, path)
    with pytest.raises(ValueError, match=rf"{twice}.*another file too"):
        read_tensors(sharded)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "code.py"])
def test_an_index_points_into_its_folder(sharded, name):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["fc.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"not a \.safetensors file of the folder"):
        read_tensors(sharded)


def test_pickled_weights_are_read_only_when_asked(tmp_path):
    model = drafter()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        load_drafter(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*allow_pickle=True"):
        load_drafter(tmp_path)
    assert same(behaviour(load_drafter(tmp_path, allow_pickle=True)), behaviour(model), tolerance=0)


class Evil:
    def __reduce__(self):
        return print, ("run",)


def test_a_pickle_that_runs_code_is_refused_all_the_same(tmp_path, capsys):
    drafter().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        load_drafter(tmp_path, allow_pickle=True)
    assert "run" not in capsys.readouterr().out


def test_several_files_need_an_index(tmp_path):
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors, b\.safetensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "object"), ('{"block_size": 4, "block_size": 5}', "block_size more")],
)
def test_a_config_that_cannot_be_read(tmp_path, text, message):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read_settings(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(tmp_path)


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./nowhere", "nowhere"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(source):
    with pytest.raises(FileNotFoundError, match="neither a folder"):
        fetch(source)
