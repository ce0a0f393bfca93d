"""`dflash train` from files: what it loads belongs together, and what it writes decodes."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from dflash import DFlashDraftModel
from dflash.cli import main
from dflash.evaluation import real_tau
from dflash.modeling.pairing_dflash import chat_template_hash, tokenizer_hash
from dflash.training.config import build_config, read_settings
from dflash.training.documents import Document, format_document
from dflash.training.initialise import copy_target_layers
from dflash.training.run import make_drafter
from families import build_target
from tiny import drafter_settings, plain, tiny_drafter, tiny_prompt, tiny_target, word_tokenizer


@pytest.fixture
def settings(pair, tmp_path):
    """A config file of a run of the tiny pair's target, in a folder of its own."""
    documents = [
        Document(str(seed), tiny_prompt(20 + seed, seed, 60)[0], torch.arange(20 + seed) > 4) for seed in range(6)
    ]
    (tmp_path / "documents.jsonl").write_text("".join(format_document(document) + "\n" for document in documents))
    (tmp_path / "config.json").write_text(json.dumps(drafter_settings("mixed", block_size=4)))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "w5 w6 w7"}) + "\n")
    values = {
        "target": pair[1],
        "documents": str(tmp_path / "documents.jsonl"),
        "draft_config": str(tmp_path / "config.json"),
        "output": str(tmp_path / "run"),
        "batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": 2,
        "log_every": 1,
        "cpu": True,
    }
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_from_files(settings, tmp_path, capsys):
    prompts = ["--eval-prompts", str(tmp_path / "prompts.jsonl"), "--eval-max-new-tokens", "6", "--eval-every", "1"]
    assert main(["train", str(settings), *prompts]) == 0
    assert "best held-out tau" in capsys.readouterr().err
    run = tmp_path / "run"
    assert build_config(read_settings(run / "train.yaml")).eval_max_new_tokens == 6
    taus = [json.loads(line).get("eval_tau") for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len([tau for tau in taus if tau is not None and tau >= 1.0]) == 2
    for name in ("best", "final"):
        drafter = DFlashDraftModel.from_pretrained(run / name, dtype="auto")
        provenance = drafter.config.provenance
        assert provenance["target_tokenizer_hash"] == tokenizer_hash(word_tokenizer())
        assert provenance["target_chat_template_hash"] == chat_template_hash(word_tokenizer())
        assert "target" not in provenance  # a local folder
        assert drafter.dtype == torch.bfloat16 and (run / name / "modeling_dflash.py").exists()
        target = AutoModelForCausalLM.from_pretrained(build_config(read_settings(settings)).target).eval()
        output = drafter.float().spec_generate(target, tiny_prompt(5), max_new_tokens=4, return_dict=True)
        assert output.sequences.shape[1] == 9
        assert not any("hash" in warning for warning in drafter.check_target(target, word_tokenizer()).warnings)
    assert main(["train", str(settings), *prompts]) == 1
    assert "holds a run already; pass --resume" in capsys.readouterr().err
    assert main(["train", str(settings), *prompts, "--resume"]) == 0


def test_held_out_texts_choose_the_best_as_decoding_them_would(settings, tmp_path, capsys):
    target = AutoModelForCausalLM.from_pretrained(read_settings(settings)["target"], dtype=torch.float32).eval()
    held, prompts = tmp_path / "held.jsonl", [tiny_prompt(4 + seed, 90 + seed) for seed in range(3)]
    texts = [plain(target, prompt, 9)[0] for prompt in prompts]
    documents = [Document(str(seed), text, torch.arange(len(text)) >= 4 + seed) for seed, text in enumerate(texts)]
    held.write_text("".join(format_document(document) + "\n" for document in documents))
    replay = ["--eval-documents", str(held), "--eval-limit", "2", "--eval-max-new-tokens", "7", "--eval-every", "1"]
    assert main(["train", str(settings), *replay, "--save-dtype", "float32"]) == 0
    run = tmp_path / "run"
    taus = [json.loads(line).get("eval_tau") for line in (run / "metrics.jsonl").read_text().splitlines()]
    drafter = DFlashDraftModel.from_pretrained(run / "final", dtype="auto").eval()
    assert [tau for tau in taus if tau is not None][-1] == pytest.approx(real_tau(drafter, target, prompts[:2], 7))
    (tmp_path / "held.jsonl.meta.json").write_text(json.dumps({"generation": {"temperature": 0.5}}))
    capsys.readouterr()
    assert main(["train", str(settings), *replay, "--output", str(tmp_path / "other")]) == 1
    assert "sampled at temperature 0.5" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_cached_features_train_as_online_ones(settings, tmp_path):
    assert main(["train", str(settings)]) == 0
    values = read_settings(settings)
    features = [
        "--target",
        values["target"],
        "--draft-config",
        values["draft_config"],
        "--output",
        str(tmp_path / "features"),
    ]
    assert main(["features", values["documents"], *features, "--stored-dtype", "float32"]) == 0
    cached = ["--features", str(tmp_path / "features"), "--output", str(tmp_path / "cached")]
    assert main(["train", str(settings), *cached]) == 0
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)


def test_going_on_from_a_drafter(settings, tmp_path, pair):
    values = {name: value for name, value in read_settings(settings).items() if name != "draft_config"}
    config = build_config({**values, "init_from": pair[3]})
    own, given = make_drafter(config, tiny_target()), DFlashDraftModel.from_pretrained(pair[3])
    assert own.dtype == torch.float32
    assert all(torch.equal(a, b.float()) for a, b in zip(own.parameters(), given.parameters(), strict=True))


def test_training_at_another_block_size(settings, tmp_path):
    assert main(["train", str(settings), "--block-size", "3"]) == 0
    slots = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["slot_accuracy"]
    assert len(slots) == 2
    saved = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert saved["block_size"] == saved["dflash_config"]["block_size"] == 3
    assert DFlashDraftModel.from_pretrained(tmp_path / "run" / "final").config.block_size == 3


def test_a_block_that_predicts_nothing_is_refused(settings, tmp_path, capsys):
    assert main(["train", str(settings), "--block-size", "1"]) == 1
    assert "block_size 1" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_new_drafter_depends_on_the_seed(settings):
    values = read_settings(settings)
    first, same, other = (make_drafter(build_config({**values, "seed": seed}), None) for seed in (0, 0, 1))
    assert torch.equal(first.fc.weight, same.fc.weight) and not torch.equal(first.fc.weight, other.fc.weight)


def test_documents_of_another_target_are_refused(settings, tmp_path, capsys):
    record = {"target_weights_hash": "0" * 64}
    (tmp_path / "documents.jsonl.meta.json").write_text(json.dumps(record))
    assert main(["train", str(settings)]) == 1
    assert "was not written by this target" in capsys.readouterr().err


def test_a_drafter_of_another_shape_is_refused(settings, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(drafter_settings(hidden_size=64)))
    assert main(["train", str(settings)]) == 1
    assert "hidden_size is 64, which has to equal the target's hidden size, 32" in capsys.readouterr().err


def test_layers_of_the_target():
    draft, target = tiny_drafter(), tiny_target("qwen3")
    before = draft.layers[1].mlp.up_proj.weight.clone()
    copy_target_layers(draft, target, [3, 1])
    for own, theirs in zip(draft.layers, (target.model.layers[3], target.model.layers[1]), strict=True):
        for name, parameter in own.named_parameters():
            assert torch.allclose(parameter, theirs.get_parameter(name), atol=1e-6), name
    assert not torch.equal(before, draft.layers[1].mlp.up_proj.weight)


def test_norms_that_keep_their_weight_less_one_are_copied_by_what_they_do():
    target, draft = build_target("gemma3"), tiny_drafter()
    norm = target.model.layers[2].input_layernorm
    torch.nn.init.normal_(norm.weight, std=0.2)
    copy_target_layers(draft, target, [2, 0])
    hidden = torch.randn(3, 32).double()
    assert torch.allclose(draft.layers[0].input_layernorm(hidden), norm(hidden), atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "message"),
    [([1], "names 1 layers of the target, the drafter has 2"), ([0, 4], r"\[0, 4\] must lie in 0\.\.3")],
)
def test_layers_that_do_not_exist(layers, message):
    with pytest.raises(ValueError, match=message):
        copy_target_layers(tiny_drafter(), tiny_target(), layers)


def test_layers_of_other_shapes():
    with pytest.raises(ValueError, match=r"mlp\.gate_proj of the target's layer 0 is \(48, 32\), the drafter's"):
        copy_target_layers(tiny_drafter(intermediate_size=64), tiny_target(), [0, 1])
