"""Every format is read as the drafter that its own project would run."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from dflash import DFlashConfig, cli, load_drafter
from dflash.dialects.findings import Findings
from dflash.dialects.reading import interpret, read_checkpoint
from naive import naive_block
from samples import BLOCK, DEPTH, GOLDEN, SAMPLES, SPECULATORS, VOCAB, WIDTH, behaviour, build, same, zlab
from tiny import plain, tiny_drafter, tiny_prompt, tiny_target, word_tokenizer

ZLAB = sorted(path.parent for path in Path(__file__).parents[1].glob("golden/*/config.json"))


def read(sample, strict=True, **changes):
    settings = {**sample.settings, **changes}
    return interpret(settings, sample.tensors, Findings("here", strict), **sample.given)


def write(sample, folder):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sample.settings))
    save_file({name: tensor.contiguous() for name, tensor in sample.tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", [name for name in SAMPLES if not name.startswith("speculators")])
def test_a_format_is_the_drafter_that_it_stands_for(name):
    sample = SAMPLES[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = read(sample)
    assert checkpoint.dialect == name.split("_")[0]
    assert same(behaviour(build(checkpoint)), behaviour(sample.drafter), tolerance=0)


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_own_blocks(name, tmp_path):
    """What that project computed for blocks at three anchors, from the files that it wrote."""
    expected = load_file(GOLDEN / name / "expected.safetensors")
    draft = load_drafter(GOLDEN / name, settings={"num_target_layers": DEPTH})
    features, anchors = expected["features"], expected["anchors"].tolist()
    assert draft.config.proposals() == BLOCK - ("from_anchor" not in name)
    for i, anchor in enumerate(anchors):
        block = torch.full((BLOCK,), VOCAB - 1)
        block[0] = expected["ids"][anchor]
        noise, slots = expected["embed_tokens.weight"][block], slice(i * BLOCK, (i + 1) * BLOCK)
        with torch.no_grad():
            hidden = draft(noise[None], features[:, :anchor]).last_hidden_state
            logits = draft.compute_logits(hidden, lambda x: x @ expected["lm_head.weight"].T)
            naive = naive_block(draft, features[0, :anchor], noise)
        torch.testing.assert_close(hidden, expected["hidden"][:, slots], rtol=0, atol=1e-5)
        torch.testing.assert_close(logits, expected["logits"][:, slots], rtol=0, atol=1e-4)
        torch.testing.assert_close(naive[None], expected["hidden"][:, slots], rtol=0, atol=1e-4)


def test_a_reduced_vocabulary_is_mapped_to_the_targets():
    name = "speculators_reduced"
    expected, weights = (load_file(GOLDEN / name / f"{part}.safetensors") for part in ("expected", "model"))
    draft = load_drafter(GOLDEN / name, settings={"num_target_layers": DEPTH})
    tokens = draft.propose(
        expected["hidden"][:, :BLOCK], torch.tensor([1]), None, lambda logits: (logits.argmax(-1), None)
    ).tokens
    chosen = weights["t2d"].nonzero()[:, 0]
    assert tokens[0].tolist() == [chosen[i].item() for i in expected["logits"][0, 1:BLOCK].argmax(-1)]


def test_older_speculators_files_use_what_they_hold():
    sample = SAMPLES["speculators_old"]()
    draft = build(read(sample))
    assert torch.equal(draft.embed_tokens.weight, sample.tensors["embed_tokens.weight"])
    assert torch.equal(draft.lm_head.weight, sample.tensors["lm_head.weight"])
    plain_one = build(read(SAMPLES["speculators_full"]()))
    assert not same(behaviour(draft), behaviour(plain_one))


@pytest.mark.parametrize("layers", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_transformers_own_assistant(layers, tmp_path):
    """Files that Transformers writes, and its own outputs; its window is wider than the text here, see the reader."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=32,
        layer_types=layers,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        target_layer_ids=[0, 2, 3],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )
    model = MuseGlimmerAssistantModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(tmp_path)
    target = tiny_target(hidden_size=WIDTH, vocab_size=VOCAB, num_hidden_layers=DEPTH)
    draft = load_drafter(tmp_path, target=target)
    assert draft.config.num_target_layers == DEPTH and draft.config.vocab_size == VOCAB
    features, noise = torch.randn(1, 9, 3 * WIDTH), torch.randn(1, BLOCK, WIDTH)
    with torch.no_grad():
        expected = model(noise_embeds=noise, context_hidden_states=features).last_hidden_state
        found = draft(noise_embeds=noise, context_hidden_states=features).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_transformers_loop_takes_a_drafter_of_another_format(tmp_path):
    sample = zlab(is_causal=True)
    sample.settings.pop("is_causal")
    sample.settings["dflash_config"]["causal"] = True
    target = tiny_target(hidden_size=WIDTH, vocab_size=VOCAB, num_hidden_layers=DEPTH, dtype=torch.float32)
    draft = load_drafter(write(sample, tmp_path / "draft"), target=target)
    assert draft.config.layer_is_causal(0)
    ids, calls = tiny_prompt(9, vocab=VOCAB), []
    draft.register_forward_hook(lambda *_: calls.append(1))
    options = {"assistant_model": draft, "speculation_type": "dflash"}
    assert torch.equal(plain(target, ids, 12, **options), plain(target, ids, 12)) and calls


def test_this_librarys_own_files_load_the_same(tmp_path):
    draft = tiny_drafter("mixed", attention_sink_bias=True, window_from_anchor=True, has_embed_tokens=True)
    draft.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    assert loaded.dtype == torch.float64 and not loaded.training
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in draft.state_dict().items())
    assert loaded.config.name_or_path == str(tmp_path)
    assert load_drafter(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


REFUSED = {
    "dspark": ("deepspec", {"markov_rank": 256, "markov_head_type": "vanilla"}, "DSpark.*markov_rank 256"),
    "confidence": ("deepspec", {"enable_confidence_head": True}, "DSpark.*enable_confidence_head True"),
    "gemma": ("deepspec", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
    "embedding tap": ("deepspec", {"target_layer_ids": [-1, 2, 3]}, "-1"),
    "eagle": ("speculators_full", {"speculators_model_type": "eagle3"}, "eagle3"),
    "embedding tap 0": ("speculators_full", {"aux_hidden_state_layer_ids": [0, 2, 3]}, "embedding"),
    "unknown key": ("zlab", {"gate_type": "sigmoid"}, "gate_type='sigmoid'"),
    "taps": ("torchspec", {"num_target_layers": 4}, "number of taps here, is 4"),
    "missing": ("zlab", {"rms_norm_eps": None}, "rms_norm_eps"),
    "another model": ("zlab", {"model_type": "llama"}, "llama"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_this_model_is_refused_by_name(case):
    name, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read(SAMPLES[name](), **changes)


def test_tensors_of_dspark_heads_are_refused_by_name():
    sample = SAMPLES["deepspec"]()
    sample.tensors["markov_head.markov_w1.weight"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="markov_w1"):
        read(sample)


def test_all_problems_are_named_at_once_and_can_be_warnings():
    sample = zlab()
    sample.tensors["extra.weight"] = sample.tensors.pop("norm.weight")
    sample.tensors["fc.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"norm\.weight.*extra\.weight.*fc\.weight is \[3, 3\].*\[16, 48\]"):
        read(sample)
    with pytest.warns(UserWarning) as caught:
        checkpoint = read(sample, strict=False, gate_type="sigmoid")
    assert len(caught) == 4 and "gate_type" in str(caught[0].message) and "fc.weight" not in checkpoint.tensors


def test_a_file_that_lacks_a_tensor_loads_only_when_not_strict(tmp_path):
    sample = zlab()
    sample.tensors.pop("layers.1.mlp.up_proj.weight")
    folder = write(sample, tmp_path / "draft")
    with pytest.raises(ValueError, match=r"files lack: layers\.1\.mlp\.up_proj\.weight"):
        load_drafter(folder)
    with pytest.warns(UserWarning, match=r"files lack: layers\.1\.mlp\.up_proj\.weight"):
        draft = load_drafter(folder, strict=False)
    assert torch.equal(draft.fc.weight, sample.tensors["fc.weight"])


def test_an_embedding_that_scales_its_rows_is_a_question():
    target, sample = tiny_target(hidden_size=WIDTH, vocab_size=VOCAB, num_hidden_layers=DEPTH), SAMPLES["modelopt"]()
    target.get_input_embeddings().scalar_embed_scale = 4.0
    with pytest.warns(UserWarning, match="input_embedding_scale': 4"):
        interpret(sample.settings, sample.tensors, Findings("here"), target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = {"input_embedding_scale": 4.0}
        config = interpret(sample.settings, sample.tensors, Findings("here"), target, given).config
        assert config.input_embedding_scale == 4.0
        interpret(SAMPLES["zlab"]().settings, SAMPLES["zlab"]().tensors, Findings("here"), target)


def test_what_a_format_does_not_say_is_asked_for():
    sample = SAMPLES["speculators_full"]()
    with pytest.raises(ValueError, match=r"speculators.*num_target_layers.*target="):
        interpret(sample.settings, sample.tensors, Findings("here"))
    target = tiny_target(hidden_size=WIDTH, vocab_size=VOCAB, num_hidden_layers=DEPTH)
    assert interpret(sample.settings, sample.tensors, Findings("here"), target).config.num_target_layers == DEPTH
    with pytest.raises(ValueError, match=r"settings has block_size=9, but the checkpoint says 5"):
        interpret(sample.settings, sample.tensors, Findings("here"), target, {"block_size": 9})


def test_the_target_that_a_file_names_is_looked_up(tmp_path):
    tiny_target(hidden_size=WIDTH, vocab_size=VOCAB, num_hidden_layers=DEPTH).save_pretrained(tmp_path)
    sample = SAMPLES["speculators_full"]()
    sample.settings["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path)
    assert interpret(sample.settings, sample.tensors, Findings("here")).config.num_target_layers == DEPTH


@pytest.mark.parametrize("folder", ZLAB, ids=lambda folder: folder.name)
def test_zlabs_goldens_are_read_as_they_are(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = read_checkpoint(folder)
    weights = load_file(folder / "model.safetensors")
    expected = DFlashConfig.from_pretrained(folder).to_dict()
    found = checkpoint.config.to_dict()
    assert {key for key, value in expected.items() if found.get(key) != value} <= {"_name_or_path", "auto_map"}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in checkpoint.tensors.items())
    assert checkpoint.tensors.keys() == weights.keys()


def test_commands_take_any_format(tmp_path, capsys):
    shape = {"hidden_size": WIDTH, "vocab_size": VOCAB, "num_hidden_layers": DEPTH}
    tiny_target(dtype=torch.float32, **shape).save_pretrained(tmp_path)
    word_tokenizer(VOCAB).save_pretrained(tmp_path)
    pair = ["--target", str(tmp_path), "--draft", str(GOLDEN / "speculators_reduced"), "--device", "cpu"]
    assert cli.main(["check", *pair, "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["pair"]["settings"]
    assert settings["head"] == "own, 24 tokens" and settings["embedding"] == "target"
    assert cli.main(["generate", *pair, "--compare", "--json", "--max-new-tokens", "12", "w5 w6"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] is True and report["rounds"] > 0
