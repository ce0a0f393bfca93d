"""Settings for serving engines: the right K for each, and no engine is given a drafter that it would run wrongly."""

import dataclasses
import json
import shlex

import pytest

from dflash import DFlashConfig, cli, serving
from dflash.catalogue import entries
from dflash.checkpoint import write_checkpoint
from dflash.commands import serve_config
from tiny import MASK, drafter_settings, tiny_drafter

LOADABLE = [entry for entry in entries() if entry.config is not None]
CORRECTION = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}


def drafter(layers="full", keys=None, nested=None, read=None, **changes):
    """A drafter whose config.json has `keys` at top level and `nested` in dflash_config, for the engines' eyes only.

    `read` and `changes` are also what its config reads.
    """
    settings = drafter_settings(layers, **changes)
    settings["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": [0, 2], **(read or {})}
    raw = {**DFlashConfig(**settings).to_dict(), **(keys or {})}
    raw["dflash_config"] = {**raw["dflash_config"], **(nested or {})}
    return serving.Drafter("drafter", raw, DFlashConfig(**settings), "target")


def command(capsys, *arguments):
    code = cli.main(["serve-config", *arguments])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("entry", LOADABLE, ids=lambda entry: entry.name)
def test_k_of_every_known_drafter(entry):
    found = serving.read_drafter(entry.name)
    block = entry.settings["block_size"]
    assert serving.vllm(found).settings["num_speculative_tokens"] == block - 1
    assert serving.sglang(found).settings["--speculative-num-draft-tokens"] == block
    assert serving.trtllm(found).settings["max_draft_len"] == block - 1
    assert serving.vllm(found).problems == serving.sglang(found).problems == []
    assert bool(serving.trtllm(found).problems) == ("DFlash2DraftModel" in entry.config["architectures"])


def test_what_each_engine_is_given():
    """The very keys that the engines take; K differs by one."""
    plan = serving.vllm(drafter())
    assert plan.settings == {"method": "dflash", "model": "drafter", "num_speculative_tokens": 7}
    *_, flag, value = shlex.split(plan.command)
    assert flag == "--speculative-config" and json.loads(value) == plan.settings
    plan = serving.sglang(drafter())
    words = shlex.split(plan.command)
    assert dict(zip(words[-6::2], words[-5::2], strict=True)) == {
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": "drafter",
        "--speculative-num-draft-tokens": "8",
    }
    plan = serving.trtllm(drafter())
    assert json.loads(plan.command) == plan.settings
    assert plan.settings == {"decoding_type": "DFlash", "max_draft_len": 7, "speculative_model": "drafter"}


def test_names_with_spaces_survive_a_shell():
    odd = dataclasses.replace(drafter(), name="it's a drafter", target="my target")
    for engine in ("vllm", "sglang"):
        words = shlex.split(serving.ENGINES[engine](odd).command)
        assert "my target" in words
    assert json.loads(shlex.split(serving.vllm(odd).command)[-1])["model"] == "it's a drafter"
    assert "it's a drafter" in shlex.split(serving.sglang(odd).command)


# What differs from a plain drafter -> the engines that cannot run it, and the word that says why.
PROBLEMS = {
    "plain": (drafter(), {}),
    "sliding": (drafter("sliding"), {}),
    "mixed": (drafter("mixed"), {}),
    "correction": (drafter(architectures=["DFlash2DraftModel"], read=CORRECTION), {"trtllm": "DFlash 2"}),
    "sinks": (drafter(nested={"attention_sink_bias": True}), {"trtllm": "attention_sink_bias"}),
    "no sinks": (drafter(nested={"attention_sink_bias": False}), {}),
    "not causal": (drafter("sliding", is_causal=False), {"trtllm": "is_causal"}),
    "causal": (drafter(is_causal=True), {"trtllm": "is_causal"}),
    "as by default": (drafter("sliding", is_causal=True), {}),
    "nested causal": (
        drafter("sliding", keys={"is_causal": None}, is_causal=False),
        {"sglang": "is_causal", "trtllm": "is_causal"},
    ),
    "from anchor": (
        drafter(nested={"sample_from_anchor": True}),
        {"vllm": "sample_from_anchor", "sglang": "sample_from_anchor", "trtllm": "sample_from_anchor"},
    ),
    "shifted": (
        drafter(nested={"shift_label": True}),
        {"vllm": "anchor", "sglang": "anchor", "trtllm": "anchor"},
    ),
    "own head": (drafter(keys={"has_lm_head": True}), {"sglang": "has_lm_head", "trtllm": "has_lm_head"}),
    "own vocabulary": (
        drafter(keys={"draft_vocab_size": 7}),
        {"sglang": "draft_vocab_size", "trtllm": "draft_vocab_size"},
    ),
    "own model type": (drafter(keys={"model_type": "dflash"}), {"trtllm": "model_type is 'dflash'"}),
    "nested window": (
        drafter("sliding", keys={"sliding_window": None}, nested={"use_swa": True, "swa_window_size": 6}),
        {"sglang": "swa_window_size"},
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_an_engine_cannot_run(case):
    found, expected = PROBLEMS[case]
    for engine, plan in serving.ENGINES.items():
        problems = plan(found).problems
        assert bool(problems) == (engine in expected), (engine, problems)
        if problems:
            assert expected[engine] in " ".join(problems)


def test_the_last_layer_is_never_tapped_for_serving():
    last = drafter(read={"target_layer_ids": [0, 3]})
    plans = {engine: plan(last) for engine, plan in serving.ENGINES.items()}
    assert "last layer" in plans["vllm"].warnings[0] and "last layer" in plans["sglang"].problems[0]
    assert not any("last layer" in str(plan(drafter())) for plan in serving.ENGINES.values())


def test_runner_and_backends_of_vllm():
    def notes(found):
        return " ".join(serving.vllm(found).notes)

    assert "V2" not in notes(drafter()) and "V2" not in notes(drafter("sliding"))
    assert "sliding and full layers together need the V2" in notes(drafter("mixed"))
    assert "DFlash 2 needs the V2" in notes(drafter(architectures=["DFlash2DraftModel"], read=CORRECTION))
    assert "non-causal" in notes(drafter()) and "non-causal" in notes(drafter("mixed"))
    assert "non-causal" not in notes(drafter("sliding")) and "non-causal" not in notes(drafter(is_causal=True))


def test_backends_of_sglang():
    def backends(found):
        return next(note for note in serving.sglang(found).notes if "backend" in note)

    assert "trtllm_mha" in backends(drafter("sliding")) and "trtllm_mha" in backends(drafter(is_causal=True))
    assert "trtllm_mha" not in backends(drafter()) and "trtllm_mha" not in backends(drafter("mixed"))


def test_what_an_engine_does_not_read_is_a_warning():
    scaled = drafter(read={"input_embedding_scale": 5.5, "final_logit_softcapping": 30.0})
    for engine, plan in serving.ENGINES.items():
        text = " ".join(plan(scaled).warnings)
        assert "input_embedding_scale 5.5" in text
        assert ("final_logit_softcapping" in text) == (engine == "trtllm")
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    assert "rope_parameters" in serving.trtllm(drafter(rope_parameters=yarn)).warnings[0]
    assert "rope_parameters" in serving.trtllm(drafter(keys={"rope_theta": None})).warnings[0]
    assert serving.trtllm(drafter()).warnings == []
    for engine in serving.ENGINES.values():
        some, every = engine(drafter(draft_token_ids="0-3")), engine(drafter())
        assert "draft_token_ids" in " ".join(some.notes)
        assert "draft_token_ids" not in " ".join(every.notes) and some.problems == every.problems
    assert "not checked" in serving.trtllm(drafter(keys={"block_size": None})).notes[0]


def test_the_command_knows_every_engine():
    assert tuple(serving.ENGINES) == serve_config.ENGINES


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_the_command_prints_json_alone(engine, capsys):
    code, out, err = command(capsys, "qwen3-4b-dflash-b16", "--engine", engine)
    settings = json.loads(out)
    key = {"vllm": "num_speculative_tokens", "trtllm": "max_draft_len"}[engine]
    assert code == 0 and settings[key] == 15 and "z-lab/Qwen3-4B-DFlash-b16" in settings.values()
    assert "b74e3a329c" in err and "certain" in err


def test_the_command_prints_flags_alone(capsys):
    code, out, _ = command(capsys, "qwen3-4b-dflash-b16", "--engine", "sglang")
    assert code == 0 and shlex.split(out) == [
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "z-lab/Qwen3-4B-DFlash-b16"),
        *("--speculative-num-draft-tokens", "16"),
    ]


def test_the_command_prints_all_engines(capsys):
    code, out, _ = command(capsys, "qwen3.8-27b-dflash2", "--target", "mine")
    assert code == 0 and out.count("\n# ") >= 5 and "--model mine " in out and "--model-path mine " in out
    assert "cannot serve this drafter: it is a DFlash 2 drafter" in out.split("# trtllm")[1]
    plans = json.loads(command(capsys, "qwen3.8-27b-dflash2", "--json")[1])
    assert list(plans) == ["vllm", "sglang", "trtllm"] and plans["trtllm"]["problems"]
    assert plans["sglang"]["settings"]["--speculative-num-draft-tokens"] == 8


def test_an_engine_that_cannot_is_an_exit_code(capsys):
    code, out, err = command(capsys, "qwen3.8-27b-dflash2", "--engine", "trtllm")
    assert code == 1 and out == "" and "cannot serve" in err


def test_a_folder_comes_before_a_name(tmp_path, capsys, monkeypatch):
    write_checkpoint(tiny_drafter(block_size=5), tmp_path / "qwen3-4b-dflash-b16")
    monkeypatch.chdir(tmp_path)
    _, out, err = command(capsys, "qwen3-4b-dflash-b16", "--engine", "vllm")
    assert json.loads(out)["num_speculative_tokens"] == 4 and "certain" not in err
    _, out, _ = command(capsys, "./qwen3-4b-dflash-b16")
    assert f"--model {serving.UNKNOWN_TARGET} " in out


def test_the_embedded_drafter_is_served_from_its_folder():
    found = serving.read_drafter("smollm2-135m-instruct-dflash-b8")
    assert found.name.endswith("hub_configs/smollm2-135m-instruct-dflash-b8") and found.target


def test_a_partial_drafter_names_its_gaps(capsys):
    code, _, err = command(capsys, "gpt-oss-20b-dflash")
    assert code == 1 and "rope_parameters" in err and "z-lab/gpt-oss-20b-DFlash" in err


def test_what_is_no_drafter(tmp_path, capsys):
    code, _, err = command(capsys, str(tmp_path))
    assert code == 1 and "config.json" in err
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    code, _, err = command(capsys, str(tmp_path))
    assert code == 1 and "Qwen3ForCausalLM" in err
