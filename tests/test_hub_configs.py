"""The catalogue of published drafters: configs that load, weights of the published shape, and honest gaps."""

import json
import subprocess
import sys

import pytest
import torch

from dflash import DFlashConfig, DFlashDraftModel, cli
from dflash.catalogue import FOLDER, GIB, STATUSES, entries, find_entry, parameter_count
from dflash.checkpoint import AUTO_MAP
from dflash.modeling.configuration_dflash import ARCHITECTURES

ENTRIES = entries()
LOADABLE = [entry for entry in ENTRIES if entry.config is not None]
PARTIAL = [entry for entry in ENTRIES if entry.config is None]
# What without which a drafter is not one: nobody may infer these, and no config is written without them.
ESSENTIAL = {"target_layer_ids", "mask_token_id", "block_size", "hidden_size", "num_hidden_layers", "num_target_layers"}
# Transformers adds these to any config it writes.
WRITTEN_ANYWAY = {"transformers_version", "use_cache", "pad_token_id"}


def every(chosen):
    return pytest.mark.parametrize("entry", chosen, ids=lambda entry: entry.name)


def on_meta(entry):
    with torch.device("meta"):
        return DFlashDraftModel(DFlashConfig.from_pretrained(entry.folder))


def published_shapes(settings):
    """Names and shapes of z-lab's checkpoints, written out from their public description."""
    width, head, ffn = settings["hidden_size"], settings["head_dim"], settings["intermediate_size"]
    queries, keys = head * settings["num_attention_heads"], head * settings["num_key_value_heads"]
    shapes = {"fc.weight": (width, width * len(settings["target_layer_ids"]))}
    shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    for i in range(settings["num_hidden_layers"]):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {f"layers.{i}.input_layernorm.weight": (width,)}
        shapes |= {f"layers.{i}.post_attention_layernorm.weight": (width,)}
        shapes |= {f"{attention}q_proj.weight": (queries, width), f"{attention}o_proj.weight": (width, queries)}
        shapes |= {f"{attention}k_proj.weight": (keys, width), f"{attention}v_proj.weight": (keys, width)}
        shapes |= {f"{attention}q_norm.weight": (head,), f"{attention}k_norm.weight": (head,)}
        shapes |= {f"{mlp}gate_proj.weight": (ffn, width), f"{mlp}up_proj.weight": (ffn, width)}
        shapes |= {f"{mlp}down_proj.weight": (width, ffn)}
        if "selector_rank" in settings:
            kernel, group = settings["conv_kernel_size"], settings["conv_group_size"]
            for conv in (f"layers.{i}.attention_conv.", f"layers.{i}.mlp_conv."):
                shapes |= {f"{conv}base_kernel": (2, kernel, width)}
                shapes |= {f"{conv}kernel_projection.weight": (2 * kernel * width // group, width)}
    if "selector_rank" in settings:
        rank, vocabulary = settings["selector_rank"], settings["vocab_size"]
        shapes |= {"candidate_selector.hidden_projection.weight": (rank, width)}
        shapes |= {f"candidate_selector.{side}_codebook": (vocabulary, rank) for side in ("predecessor", "successor")}
    return shapes


@every(LOADABLE)
def test_tensors_are_the_published_ones(entry):
    """Names, shapes and numbers; a file is a short header and two bytes for each parameter."""
    settings, published = entry.settings, entry.source.get("published", {})
    found = {name: tuple(tensor.shape) for name, tensor in on_meta(entry).state_dict().items()}
    assert found == published_shapes(settings)
    per_layer, outside = (15, 6) if "selector_rank" in settings else (11, 3)
    assert len(found) == per_layer * settings["num_hidden_layers"] + outside
    assert len(found) == published.get("tensors", len(found))
    count = sum(torch.Size(shape).numel() for shape in found.values())
    assert count == parameter_count(settings) == published.get("parameters", count)
    if "file_bytes" in published:
        assert 0 < published["file_bytes"] - 2 * count < 20 * 1024
    if "file_gib" in published:
        assert 2 * count / GIB == pytest.approx(published["file_gib"], abs=0.006)


def test_a_drafter_with_biases_is_counted():
    """None of the loadable drafters has them."""
    settings = {**find_entry("qwen3-4b-dflash-b16").settings, "attention_bias": True}
    config = {key: value for key, value in settings.items() if key not in ("rope_theta", "auto_map")}
    with torch.device("meta"):
        model = DFlashDraftModel(DFlashConfig(**config))
    assert parameter_count(settings) == sum(tensor.numel() for tensor in model.state_dict().values())


@every(ENTRIES)
def test_files_are_strict_json(entry):
    for path in entry.folder.glob("*.json"):
        result = subprocess.run([sys.executable, "-S", "-m", "json.tool", str(path)], capture_output=True, text=True)
        assert result.returncode == 0, f"{path.name}: {result.stderr}"
        json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@every(LOADABLE)
def test_configs_are_canonical(entry, tmp_path):
    """What is read and saved again has the same keys and values: nothing is dropped, changed or left to a default."""
    DFlashConfig.from_pretrained(entry.folder).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for key, value in entry.config.items():
        assert saved.get(key) == value, key
    assert set(saved) - set(entry.config) <= WRITTEN_ANYWAY
    text = (entry.folder / "config.json").read_text()
    assert text == json.dumps(entry.config, indent=2, sort_keys=True) + "\n"


@every(LOADABLE)
def test_configs_are_what_serving_engines_read(entry):
    config, settings = entry.config, entry.settings
    assert config["auto_map"] == AUTO_MAP and config["model_type"] == "qwen3"
    assert len(config["architectures"]) == 1 and config["architectures"][0] in ARCHITECTURES
    assert config["block_size"] == config["dflash_config"]["block_size"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    taps = settings["target_layer_ids"]
    assert taps == sorted(set(taps)) and taps[-1] < settings["num_target_layers"] - 1
    assert "sliding_attention" not in settings["layer_types"] or config["use_sliding_window"] is True


@every(ENTRIES)
def test_sources_say_what_is_not_certain(entry):
    source = entry.source
    assert source["status"] in STATUSES and source["sources"] and source["repository"] and source["target"]
    assert (source["status"] == "partial") == (entry.config is None)
    doubts = {key.split(".")[0] for key in source["uncertain"]} - {"revision"}
    assert bool(doubts) == (source["status"] != "certain")
    if entry.config is not None:
        assert not doubts & ESSENTIAL and doubts <= set(entry.settings)
        assert set(source.get("changed", {})) <= set(entry.settings)


@every(PARTIAL)
def test_partial_ones_name_every_gap(entry):
    """They have no config, and each key that a config needs is either known or said not to be."""
    assert not (entry.folder / "config.json").exists()
    doubts = entry.source["uncertain"]
    gaps = ESSENTIAL - set(entry.settings) - set(doubts)
    assert not gaps or "everything" in doubts or "everything else" in doubts


def test_the_catalogue_has_every_folder():
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {entry.name for entry in ENTRIES} == folders
    assert len(LOADABLE) >= 20 and len(PARTIAL) >= 5
    assert find_entry("no-such-drafter") is None
    assert sum(path.stat().st_size for path in FOLDER.glob("*/*.json")) < 200_000


def test_list(capsys):
    assert cli.main(["list"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "target", "layers", "block", "taps", "window", "size", "status"]
    rows = {line.split()[0]: line for line in lines}
    assert list(rows) == [entry.name for entry in ENTRIES]
    line = rows["qwen3.5-4b-dflash"]
    assert line.split()[1:5] == ["Qwen/Qwen3.5-4B", "6", "16", "1,5,9,13,17,21,25,29"]
    assert line.split()[5:] == ["4096", "in", "5", "of", "6", "1.18", "GiB", "certain"]
    assert rows["qwen3-8b-dflash-b16"].split()[5:] == ["-", "1.95", "GiB", "certain"]
    assert rows["minimax-m2.7-dflash"].split()[2:] == ["?", "?", "?", "?", "1.04", "GiB", "partial"]


def test_list_as_json(capsys):
    assert cli.main(["list", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    entry = listed["qwen3.5-4b-dflash"]
    assert entry["loadable"] is True and entry["size_bytes"] == 2 * 634425856 and entry["mask_token_id"] == 248077
    assert entry["repository"] == "z-lab/Qwen3.5-4B-DFlash" and entry["published"]["tensors"] == 69
    assert listed["gpt-oss-20b-dflash"]["loadable"] is False and listed["gpt-oss-20b-dflash"]["uncertain"]
