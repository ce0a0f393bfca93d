"""Formats are written so that nothing is lost, and so that the other projects and the serving engines read them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dflash import cli, load_drafter
from dflash.checkpoint import shipped_files, write_checkpoint
from dflash.dialects.converting import convert
from dflash.dialects.reading import read_checkpoint
from samples import BLOCK, DEPTH, GOLDEN, SLIDES, VOCAB, WIDTH, behaviour, drafter, same
from tiny import tiny_target

SETTINGS = {"num_target_layers": DEPTH}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    shape = {"hidden_size": WIDTH, "vocab_size": VOCAB, "num_hidden_layers": DEPTH}
    tiny_target("qwen3", dtype=torch.float32, **shape).save_pretrained(folder)
    return str(folder)


def written(model, folder):
    write_checkpoint(model, folder)
    return folder


def assert_same_checkpoint(one, other, target):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target)
    first, second = (read_checkpoint(folder, target=config) for folder in (one, other))
    apart = ("auto_map", "transformers_version", "_name_or_path")
    settings = [
        {key: value for key, value in checkpoint.config.to_dict().items() if key not in apart}
        for checkpoint in (first, second)
    ]
    assert settings[0] == settings[1]
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        assert tensor.dtype == second.tensors[name].dtype and torch.equal(tensor, second.tensors[name]), name


ROUND_TRIPS = {
    "full": ({}, ("speculators", "modelopt")),
    "full causal": ({"is_causal": True}, ("modelopt",)),
    "yarn": (
        {
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        ("speculators", "modelopt"),
    ),
    "biased": ({"attention_bias": True}, ("speculators", "modelopt")),
    "sliding": (dict(SLIDES), ("modelopt",)),
    "sliding not causal": ({**SLIDES, "is_causal": False}, ("modelopt",)),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_round_trips_from_zlab(case, target, tmp_path):
    changes, formats = ROUND_TRIPS[case]
    first = written(drafter(**changes), tmp_path / "a")
    for to in formats:
        there = convert(first, tmp_path / to, to, target=target)
        assert read_checkpoint(there, settings=SETTINGS).dialect == to
        assert same(behaviour(load_drafter(there, settings=SETTINGS)), behaviour(load_drafter(first)), tolerance=0)
        back = convert(there, tmp_path / f"{to}-back", "zlab", target=target)
        assert_same_checkpoint(first, back, target)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_speculators_own_files_are_written_as_they_were(name, target, tmp_path):
    """Every key that means something, and all tensors."""
    there = convert(GOLDEN / name, tmp_path / "again", "speculators", target=target)
    assert_same_checkpoint(GOLDEN / name, there, target)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (there, GOLDEN / name))
    apart = ("auto_map", "transformers_version", "target_hidden_size")
    verifier, layers = ours["speculators_config"].pop("verifier"), ours.pop("transformer_layer_config")
    theirs["speculators_config"].pop("verifier")
    expected_layers = theirs.pop("transformer_layer_config")
    assert verifier == {"name_or_path": target, "architectures": ["Qwen3ForCausalLM"]}
    assert ours.items() >= {key: value for key, value in theirs.items() if key not in apart}.items()
    assert layers.items() >= expected_layers.items() and "rope_theta" not in layers


@pytest.mark.parametrize("changes", [{}, SLIDES, {**SLIDES, "is_causal": False}], ids=["full", "sliding", "not causal"])
def test_the_canonical_form_serves_all_engines(changes, target, tmp_path):
    """Each key where vLLM, SGLang and TensorRT-LLM look for it; z-lab's names and nothing else among the tensors."""
    middle = convert(written(drafter(**changes), tmp_path / "a"), tmp_path / "b", "modelopt")
    folder = convert(middle, tmp_path / "c", "zlab")
    settings, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    nested = settings["dflash_config"]
    assert settings["architectures"] == ["DFlashDraftModel"] and settings["model_type"] == "qwen3"
    assert settings["block_size"] == nested["block_size"] == BLOCK
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"] == 10000.0
    taps = nested["target_layer_ids"]
    assert taps == sorted(set(taps)) and taps[-1] < settings["num_target_layers"] - 1
    slides = "sliding_attention" in settings["layer_types"]
    assert settings["use_sliding_window"] is slides and bool(settings["sliding_window"]) is slides
    assert settings.get("is_causal") == changes.get("is_causal"), "only where it deviates"
    assert not {"causal", "use_swa", "swa_window_size"} & nested.keys()
    assert set(tensors) == set(drafter(**changes).state_dict()) and len(tensors) == 11 * 2 + 3
    assert {path.name for path in folder.glob("*.py")} == {path.name for path in shipped_files()}


INEXPRESSIBLE = [
    ({"sample_from_anchor": True}, "zlab", "sample_from_anchor=True"),
    ({"attention_sink_bias": True}, "zlab", "attention_sink_bias=True"),
    ({"has_embed_tokens": True}, "zlab", "has_embed_tokens=True"),
    ({**SLIDES, "window_from_anchor": True}, "zlab", "window_from_anchor=True"),
    ({"dflash_config": {"target_layer_ids": [0, 2, 5]}}, "zlab", "ends with 5, the last of 6"),
    ({"attention_sink_bias": True}, "speculators", "attention_sink_bias=True"),
    ({"is_causal": True}, "speculators", "is_causal=True in full layers"),
    ({"input_embedding_scale": 4.0}, "speculators", "input_embedding_scale=4.0"),
    ({"final_logit_softcapping": 4.0}, "speculators", "final_logit_softcapping=4.0"),
    (dict(SLIDES), "speculators", "window_from_anchor=False"),
    ({"has_lm_head": True}, "speculators", "has_lm_head=True"),
    ({"output_multiplier": 2.0}, "modelopt", "output_multiplier=2.0"),
    ({**SLIDES, "window_from_anchor": True}, "modelopt", "window_from_anchor=True"),
    ({**SLIDES, "layer_types": ["full_attention", "sliding_attention"]}, "modelopt", "one layer_types"),
]


@pytest.mark.parametrize(("changes", "to", "message"), INEXPRESSIBLE)
def test_what_a_format_cannot_express_is_an_error(changes, to, message, target, tmp_path):
    first = written(drafter(**changes), tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        convert(first, tmp_path / "b", to, target=target)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_only_zlab_keeps_the_tokens_that_are_proposed(target, tmp_path):
    """They save time; a format without them drafts over all tokens, by the same model."""
    first = written(drafter(draft_token_ids="0-4,7"), tmp_path / "a")
    for to, expected in (("zlab", [0, 1, 2, 3, 4, 7]), ("speculators", None), ("modelopt", None)):
        loaded = load_drafter(convert(first, tmp_path / to, to, target=target), settings=SETTINGS)
        assert loaded.config.draft_token_ids == expected
        assert same(behaviour(loaded), behaviour(load_drafter(first)), tolerance=0)


def test_sinks_and_slots_go_to_modelopt_and_back(target, tmp_path):
    first = written(drafter(attention_sink_bias=True, sample_from_anchor=True), tmp_path / "a")
    there = convert(first, tmp_path / "b", "modelopt")
    settings = json.loads((there / "config.json").read_text())
    assert settings["attention_sink_bias"] is settings["dflash_config"]["attention_sink_bias"] is True
    assert settings["dflash_config"]["shift_label"] is True
    assert_same_checkpoint(first, there, target)


def test_the_window_rule_changes_only_on_request(target, tmp_path):
    first = written(drafter(**SLIDES), tmp_path / "a")
    there = convert(first, tmp_path / "b", "speculators", target=target, change_window_rule=True)
    assert load_drafter(there, settings=SETTINGS).config.window_from_anchor is True
    back = convert(there, tmp_path / "c", "zlab", target=target, change_window_rule=True)
    assert_same_checkpoint(first, back, target)


def test_another_target_is_refused(target, tmp_path):
    first = written(drafter(num_target_layers=DEPTH + 1), tmp_path / "a")
    with pytest.raises(ValueError, match=f"num_target_layers is {DEPTH + 1}.*{DEPTH}"):
        convert(first, tmp_path / "b", "speculators", target=target)


def test_nothing_is_overwritten_or_half_written(target, tmp_path, monkeypatch):
    first = written(drafter(), tmp_path / "a")
    with pytest.raises(FileExistsError, match="a exists"):
        convert(first, first, "modelopt")
    monkeypatch.setattr("dflash.dialects.converting.save_torch_state_dict", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(first, tmp_path / "b", "modelopt")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_command(target, tmp_path, capsys):
    folder = tmp_path / "out"
    source = str(GOLDEN / "speculators_full")
    assert cli.main(["convert", source, str(folder), "--to", "zlab", "--set", f"num_target_layers={DEPTH}"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert read_checkpoint(folder).dialect == "zlab"
    assert cli.main(["convert", source, str(folder), "--to", "zlab", "--target", target]) == 1
    assert "exists already" in capsys.readouterr().err
    for wrong in (["--to", "speculators"], ["--to", "zlab", "--set", "block_size"], ["--to", "gguf"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["convert", source, str(tmp_path / "x"), *wrong])
        assert stopped.value.code == 2
