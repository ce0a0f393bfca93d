"""The pair report: what was checked and resolved, what is refused, and what is only suspicious."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from dflash import DFlashDraftModel, check, generate
from dflash.checkpoint import write_checkpoint
from dflash.modeling.decoding_dflash import speculative_generate
from dflash.modeling.pairing_dflash import (
    _weights_warning,
    chat_template_hash,
    report_pair,
    tokenizer_hash,
    weights_hash,
)
from families import build_target, exists
from tiny import DEPTH, MASK, VOCAB, WIDTH, tiny_drafter, tiny_prompt, tiny_target, word_tokenizer

SWITCH = "{% if enable_thinking is not defined or enable_thinking %}w3{% endif %}{{ messages[0]['content'] }}"


def drafter_with(**provenance):
    return tiny_drafter(provenance=provenance)


def test_every_fact_names_both_values():
    facts = {fact.name: fact for fact in tiny_drafter().check_target(tiny_target()).facts}
    assert {name: (fact.drafter, fact.target) for name, fact in facts.items()} == {
        "hidden_size": (WIDTH, WIDTH),
        "num_target_layers": (DEPTH, DEPTH),
        "vocab_size": (VOCAB, VOCAB),
        "last target_layer_ids": (3, DEPTH),
        "mask_token_id": (MASK, VOCAB),
        "fc.in_features": (3 * WIDTH, 3 * WIDTH),
    }
    assert all(fact.holds for fact in facts.values())


def test_settings_are_those_in_use():
    draft = tiny_drafter("mixed", dtype=torch.float32)
    settings = draft.check_target(tiny_target("qwen3_sliding")).settings
    assert settings["block_size"] == 8 and settings["target_layer_ids"] == [0, 2, 3]
    assert settings["sample_from_anchor"] is False and settings["proposals"] == 7
    assert settings["mask_token_id"] == MASK and settings["input_embedding_scale"] == 1.0
    assert settings["layers"] == [{"causal": True, "window": 6}, {"causal": False, "window": None}]
    assert settings["rope"] == {"type": "default", "theta": 10000.0, "attention_factor": 1.0}
    assert settings["attention"] == {"drafter": "sdpa", "target": "sdpa"}
    assert settings["dtype"] == {"drafter": "float32", "target": "float64"}
    assert settings["device"] == {"drafter": ["cpu"], "target": ["cpu"]}
    assert settings["rollback"] == ["crop"] * 2 + ["record and crop"] * 2


def test_what_a_slot_predicts_is_reported():
    settings = tiny_drafter(sample_from_anchor=True).check_target(tiny_target()).settings
    assert settings["sample_from_anchor"] is True and settings["block_size"] == settings["proposals"] == 8


def test_yarn_scales_attention():
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    report = tiny_drafter(rope_theta=5000.0, rope_parameters=rope).check_target(tiny_target())
    assert report.settings["rope"]["type"] == "yarn" and report.settings["rope"]["attention_factor"] > 1.1


def test_a_hybrid_says_what_is_replayed():
    if not exists("qwen3_5"):
        pytest.skip("the installed transformers has no qwen3_5")
    report = tiny_drafter().check_target(build_target("qwen3_5"))
    assert report.settings["rollback"] == ["copy and replay", "copy and replay", "crop", "copy and replay"]


BROKEN = {
    "width": (lambda draft: tiny_target(hidden_size=64), f"hidden_size.* {WIDTH}.* 64"),
    "depth": (lambda draft: tiny_target(num_hidden_layers=6), f"num_target_layers.* {DEPTH}.* 6"),
    "vocabulary": (lambda draft: tiny_target(vocab_size=VOCAB + 1), f"vocab_size.* {VOCAB}.* {VOCAB + 1}"),
    "mask": (lambda draft: setattr(draft.config, "mask_token_id", 61), "mask_token_id.* 61"),
    "taps": (lambda draft: setattr(draft.config, "target_layer_ids", [0, 2, 4]), "target_layer_ids.* 4"),
    "fc": (lambda draft: setattr(draft, "fc", torch.nn.Linear(64, WIDTH)), f"fc.in_features.* 64.* {3 * WIDTH}"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_pair_that_cannot_work_is_refused(case):
    draft = tiny_drafter()
    target = BROKEN[case][0](draft) or tiny_target()
    with pytest.raises(ValueError, match=BROKEN[case][1]):
        draft.check_target(target)


def test_a_mask_that_is_an_ordinary_token_is_a_warning():
    (warning,) = tiny_drafter().check_target(tiny_target(), word_tokenizer()).warnings
    assert "mask_token_id 60" in warning and "'w60'" in warning


def test_a_mask_outside_the_ordinary_vocabulary_is_none():
    target = tiny_target()
    reserved = word_tokenizer(VOCAB - 1)
    assert tiny_drafter().check_target(target, reserved).warnings == []
    reserved.add_tokens(["<mask>"], special_tokens=True)
    assert reserved.convert_tokens_to_ids("<mask>") == MASK
    assert tiny_drafter().check_target(target, reserved).warnings == []


def test_without_provenance_nothing_is_compared():
    target = tiny_target()
    target.config._commit_hash = "b" * 40
    assert tiny_drafter().check_target(target).warnings == []


def test_another_tokenizer_is_a_warning():
    tokenizer = word_tokenizer(VOCAB - 1)
    same, other = tokenizer_hash(tokenizer), tokenizer_hash(word_tokenizer(VOCAB - 2))
    assert drafter_with(target_tokenizer_hash=same).check_target(tiny_target(), tokenizer).warnings == []
    (warning,) = drafter_with(target_tokenizer_hash=other).check_target(tiny_target(), tokenizer).warnings
    assert same in warning and other in warning
    assert drafter_with(target_tokenizer_hash=other).check_target(tiny_target()).warnings == []


def test_another_chat_template_is_a_warning():
    tokenizer = word_tokenizer(VOCAB - 1)
    trained = chat_template_hash(tokenizer)
    draft = drafter_with(target_chat_template_hash=trained)
    assert draft.check_target(tiny_target(), tokenizer).warnings == []
    tokenizer.chat_template = "{{ messages[0]['content'] }} w9"
    (warning,) = draft.check_target(tiny_target(), tokenizer).warnings
    assert trained in warning and chat_template_hash(tokenizer) in warning


def test_other_weights_of_the_target_are_a_warning():
    trained = weights_hash(tiny_target())
    draft = drafter_with(target_weights_hash=trained)
    assert draft.check_target(tiny_target(dtype=torch.bfloat16)).warnings == []
    other = tiny_target(seed=1)
    (warning,) = draft.check_target(other).warnings
    assert trained in warning and weights_hash(other) in warning


def test_weights_that_are_not_loaded_are_not_compared():
    target = tiny_target()
    target.model.layers[0].to("meta")
    assert _weights_warning("0" * 64, target) is None
    assert _weights_warning("0" * 64, tiny_target())


@pytest.mark.parametrize(("loaded", "count"), [("a" * 40, 0), ("b" * 40, 1), (None, 1)])
def test_another_revision_is_a_warning(loaded, count):
    target = tiny_target()
    target.config._commit_hash = loaded
    warnings = drafter_with(target_revision="a" * 40).check_target(target).warnings
    assert len(warnings) == count and all("a" * 40 in warning and str(loaded) in warning for warning in warnings)


@pytest.mark.parametrize(("trained", "count"), [("on", 0), (True, 0), ("off", 1), (False, 1), ("sometimes", 1)])
def test_another_thinking_mode_is_a_warning(trained, count):
    tokenizer = word_tokenizer(VOCAB - 1)
    tokenizer.chat_template = SWITCH
    warnings = drafter_with(thinking_mode=trained).check_target(tiny_target(), tokenizer).warnings
    assert len(warnings) == count and all("thinking_mode" in warning for warning in warnings)


def test_a_template_without_a_switch_has_no_thinking_mode_to_compare():
    tokenizer = word_tokenizer(VOCAB - 1)
    assert drafter_with(thinking_mode="off").check_target(tiny_target(), tokenizer).warnings == []


def test_provenance_of_another_form_is_a_warning():
    (warning,) = tiny_drafter(provenance="mine").check_target(tiny_target()).warnings
    assert "'mine'" in warning


def test_provenance_is_kept_by_saving(tmp_path):
    draft = drafter_with(thinking_mode="off")
    draft.save_pretrained(tmp_path)
    assert type(draft).from_pretrained(tmp_path).config.provenance == {"thinking_mode": "off"}


def test_the_text_holds_facts_settings_and_warnings():
    text = str(tiny_drafter().check_target(tiny_target(), word_tokenizer()))
    assert f"ok: hidden_size {WIDTH} = the target's hidden size, {WIDTH}" in text
    assert (
        "block_size: 8\nsample_from_anchor: false\nproposals: 7\ntarget_layer_ids: 0, 2, 3\n" in text
        and 'rollback: 4 x "crop"' in text
    )
    assert "warning: mask_token_id 60" in text


@pytest.fixture(scope="module")
def misloaded(tmp_path_factory):
    """A drafter's checkpoint as a user gets it who forgets `trust_remote_code=True`: by AutoModel, and with a head."""
    folder = tmp_path_factory.mktemp("misloaded") / "draft"
    write_checkpoint(tiny_drafter(dtype=torch.float32), folder)
    return folder, [cls.from_pretrained(folder) for cls in (AutoModel, AutoModelForCausalLM)]


def test_without_remote_code_a_checkpoint_is_another_model(misloaded):
    """What the errors below are for; if this changes, so must they."""
    folder, models = misloaded
    assert [type(model).__name__ for model in models] == ["Qwen3Model", "Qwen3ForCausalLM"]
    assert not any(hasattr(model, "fc") for model in models)
    again = AutoModel.from_pretrained(folder)
    assert not torch.equal(again.embed_tokens.weight, models[0].embed_tokens.weight), "random embeddings"


@pytest.mark.parametrize("which", [0, 1], ids=["AutoModel", "AutoModelForCausalLM"])
@pytest.mark.parametrize("use", ["report", "decode", "method", "probe", "command"])
def test_a_drafter_loaded_without_remote_code_is_refused(misloaded, which, use):
    """The error says what was loaded, why, and how to load it, whoever is given the wrong model."""
    folder, models = misloaded
    draft, target, ids = models[which], tiny_target(), tiny_prompt(4)
    uses = {
        "report": lambda: report_pair(draft, target),
        "decode": lambda: speculative_generate(draft, target, ids),
        "method": lambda: DFlashDraftModel.spec_generate(draft, target=target, input_ids=ids, max_new_tokens=2),
        "probe": lambda: check.probe(target, draft, word_tokenizer(), ["w5"], check.CheckOptions()),
        "command": lambda: generate.decode(target, draft, None, {}, generate.GenerateOptions(prompt="w5"), None),
    }
    with pytest.raises(ValueError, match="trust_remote_code=True") as error:
        uses[use]()
    text = str(error.value)
    assert type(draft).__name__ in text and str(folder) in text and "random embeddings" in text
    assert f"AutoModel.from_pretrained('{folder}', trust_remote_code=True)" in text
    assert "DFlashDraftModel.from_pretrained" in text


def test_a_drafter_as_target_is_refused(misloaded):
    for model in misloaded[1]:
        with pytest.raises(ValueError, match=r"the target is a drafter.*trust_remote_code=True"):
            tiny_drafter().check_target(model)


def test_what_never_was_a_drafter_is_refused():
    with pytest.raises(ValueError, match="LlamaForCausalLM, but has to be a DFlashDraftModel"):
        report_pair(tiny_target(), tiny_target())
    with pytest.raises(ValueError, match="NoneType"):
        speculative_generate(None, tiny_target(), tiny_prompt(3))
