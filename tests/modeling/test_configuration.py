"""The config reads every published schema, and refuses what it would have to guess."""

import json
from pathlib import Path

import pytest
import torch

from dflash import DFlashConfig
from tiny import DEPTH, MASK, VOCAB, drafter_settings, tiny_drafter, tiny_prompt, tiny_target

GOLDENS = sorted(path.parent for path in Path(__file__).parents[1].glob("golden/*/config.json"))


def test_both_schemas_read_the_same():
    nested = drafter_settings()
    legacy = {**nested, "dflash_config": dict(nested["dflash_config"])}
    top = {key: value for key, value in nested.items() if key not in ("block_size", "dflash_config", "rope_theta")}
    modern = {
        **top,
        "dflash_config": {**nested["dflash_config"], "block_size": 8},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    flat = {**top, **nested["dflash_config"], "block_size": 8, "rope_theta": 10000.0}
    configs = [DFlashConfig(**settings).to_dict() for settings in (legacy, modern, flat)]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0]["rope_theta"] == configs[0]["rope_parameters"]["rope_theta"] == 10000.0
    assert configs[0]["block_size"] == configs[0]["dflash_config"]["block_size"] == 8
    assert configs[0]["model_type"] == "qwen3"


@pytest.mark.parametrize("folder", GOLDENS, ids=lambda folder: folder.name)
def test_round_trip_through_a_file(folder, tmp_path):
    config = DFlashConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path)
    assert DFlashConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("layers", "changes", "expected"),
    [
        ("mixed", {}, [True, False]),
        ("mixed", {"is_causal": False}, [False, False]),
        ("mixed", {"is_causal": True}, [True, True]),
        ("full", {}, [False, False]),
    ],
)
def test_in_block_causality(layers, changes, expected):
    config = DFlashConfig(**drafter_settings(layers, **changes))
    assert [config.layer_is_causal(i) for i in range(2)] == expected
    nested = drafter_settings(layers)
    if "is_causal" in changes:
        nested["dflash_config"] = {**nested["dflash_config"], "causal": changes["is_causal"]}
        config = DFlashConfig(**nested)
        assert [config.layer_is_causal(i) for i in range(2)] == expected


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("keys", [("sample_from_anchor",), ("shift_label",), ("sample_from_anchor", "shift_label")])
@pytest.mark.parametrize("value", [True, False])
def test_both_names_of_the_slots_meaning(nested, keys, value):
    settings = drafter_settings()
    place = dict(settings["dflash_config"]) if nested else settings
    place.update(dict.fromkeys(keys, value))
    if nested:
        settings["dflash_config"] = place
    config = DFlashConfig(**settings)
    assert config.sample_from_anchor is value and config.proposals() == 8 - (not value)
    written = config.to_dict()
    assert written["dflash_config"].get("sample_from_anchor", False) is value
    assert "sample_from_anchor" not in written and "shift_label" not in {**written, **written["dflash_config"]}
    assert ("sample_from_anchor" in written["dflash_config"]) is value
    assert DFlashConfig(**written).to_dict() == written


def test_variants_are_written_only_where_they_differ():
    written = DFlashConfig(**drafter_settings()).to_dict()
    keys = {"window_from_anchor", "attention_sink_bias", "has_embed_tokens", "has_lm_head", "draft_vocab_size"}
    assert not keys & {*written, *written["dflash_config"]}
    variant = dict.fromkeys(keys - {"draft_vocab_size"}, True)
    written = DFlashConfig(**drafter_settings("sliding", draft_vocab_size=40, **variant)).to_dict()
    assert variant.items() <= written["dflash_config"].items() and written["draft_vocab_size"] == 40
    assert DFlashConfig(**written).to_dict() == written


def test_a_window_from_the_anchor_reaches_one_key_further():
    """Slot 0 of the usual rule sees distances below the window; from the anchor, distance `window` is seen too."""
    config = DFlashConfig(**drafter_settings("mixed", window_from_anchor=True))
    assert [config.layer_window(i) for i in (0, 1)] == [6, None]
    assert [config.cache_window(i) for i in (0, 1)] == [7, None]
    assert DFlashConfig(**drafter_settings("mixed")).cache_window(0) == 6


def test_a_block_of_an_anchor_alone_predicts_if_it_samples_from_it():
    assert DFlashConfig(**drafter_settings(block_size=1, sample_from_anchor=True)).proposals() == 1


def test_is_causal_decides_over_the_nested_key():
    settings = drafter_settings(is_causal=False)
    settings["dflash_config"] = {**settings["dflash_config"], "causal": True}
    with pytest.warns(UserWarning, match="is_causal=False decides"):
        assert DFlashConfig(**settings).is_causal is False


REQUIRED = [
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "vocab_size", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
    *("layer_types", "num_target_layers", "rope_theta", "block_size"),
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    settings = drafter_settings()
    del settings[key]
    with pytest.raises(ValueError, match=key):
        DFlashConfig(**settings)


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_a_missing_dflash_key_is_named(key):
    settings = drafter_settings()
    settings["dflash_config"] = {k: v for k, v in settings["dflash_config"].items() if k != key}
    with pytest.raises(ValueError, match=key):
        DFlashConfig(**settings)


WRONG = [
    ({"target_layer_ids": [2, 0]}, "increasing"),
    ({"target_layer_ids": [0, 0, 2]}, "increasing"),
    ({"target_layer_ids": [-1, 2]}, "-1"),
    ({"target_layer_ids": [0, DEPTH]}, f"num_target_layers|0..{DEPTH - 1}"),
    ({"target_layer_ids": []}, "target_layer_ids"),
    ({"target_layer_ids": [0.5, 1]}, "integers"),
    ({"target_layer_ids": 3}, "target_layer_ids"),
    ({"mask_token_id": VOCAB}, str(VOCAB)),
    ({"mask_token_id": -1}, "-1"),
    ({"mask_token_id": "60"}, "mask_token_id"),
    ({"block_size": 16}, "16.*8"),
    ({"input_embedding_scale": 0}, "input_embedding_scale"),
    ({"output_multiplier": -1.0}, "output_multiplier"),
    ({"final_logit_softcapping": -5}, "final_logit_softcapping"),
    ({"sample_from_anchor": 1}, "sample_from_anchor"),
    ({"shift_label": "yes"}, "sample_from_anchor.*yes"),
    ({"sample_from_anchor": True, "shift_label": False}, "sample_from_anchor is True.*shift_label is False"),
    ({"sample_from_anchor": False, "shift_label": True}, "sample_from_anchor is False.*shift_label is True"),
    ({"use_swa": True}, "use_swa"),
    ({"projector_type": "dspark"}, "projector_type"),
    ({"attention_sink_bias": "yes"}, "attention_sink_bias"),
    ({"window_from_anchor": 1}, "window_from_anchor"),
    ({"has_embed_tokens": 0}, "has_embed_tokens"),
    ({"draft_vocab_size": 32}, "draft_vocab_size"),
    ({"selector_rank": 4}, "conv_kernel_size"),
    ({"a_new_key": 1}, "a_new_key"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=str)
def test_a_wrong_dflash_value_is_named(changes, message):
    settings = drafter_settings()
    settings["dflash_config"] = {**settings["dflash_config"], **changes}
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**settings)


WRONG_TOP = [
    ({"architectures": ["Qwen3DSparkModel"]}, "Qwen3DSparkModel"),
    ({"architectures": ["DFlash2DraftModel"]}, "selector_rank"),
    ({"block_size": 1}, "anchor"),
    ({"block_size": 0}, "block_size"),
    ({"block_size": "8"}, "block_size"),
    ({"num_key_value_heads": 3}, "num_attention_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"num_hidden_layers": 3}, "layer_types"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
    ({"use_sliding_window": True, "sliding_window": 8}, "sliding_attention"),
    ({"rope_theta": None}, "rope_theta"),
    ({"rope_theta": -1}, "rope_theta"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "several"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
    ({"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64}}, "factor"),
    ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, "factor"),
    ({"dtype": "float33"}, "float33"),
    ({"sliding_window": "wide"}, "sliding_window"),
    ({"hidden_act": []}, "hidden_act"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"is_causal": "no"}, "is_causal"),
    ({"dflash_config": [1]}, "dictionary"),
    ({"draft_vocab_size": 32}, "draft_vocab_size 32.*has_lm_head"),
    ({"draft_vocab_size": VOCAB + 1, "has_lm_head": True}, "exceeds"),
    ({"draft_vocab_size": 0, "has_lm_head": True}, "draft_vocab_size"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, "eagle_aux"),
    ({"speculators_model_type": "dflash"}, "speculators_model_type"),
    ({"markov_rank": 256}, "markov_rank"),
    ({"hidden_act": "sillu"}, "sillu"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"vocab_size": -3}, "vocab_size"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_TOP, ids=str)
def test_a_wrong_value_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**{**drafter_settings(), **changes})


@pytest.mark.parametrize("key", ["sliding_window", "use_sliding_window"])
def test_a_window_that_would_be_dropped_is_an_error(key):
    settings = drafter_settings("sliding")
    del settings[key]
    with pytest.raises(ValueError, match=key):
        DFlashConfig(**settings)


ALTERED = {
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB + 3,
    "attention_bias": True,
    "num_target_layers": DEPTH + 1,
    "target_layer_ids": [0, 2],
    "layer_types": ["full_attention"],
}


@pytest.mark.parametrize("key", ALTERED)
def test_an_altered_key_never_decodes(key, tmp_path):
    """Config, weights or target contradict it: an error at one of these doors, before any token."""
    draft = tiny_drafter()
    draft.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    (settings["dflash_config"] if key == "target_layer_ids" else settings)[key] = ALTERED[key]
    if key == "num_hidden_layers":
        settings["layer_types"] = ["full_attention"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError) as error:
        loaded = type(draft).from_pretrained(tmp_path, dtype=torch.float64)
        loaded.spec_generate(target=tiny_target(), input_ids=tiny_prompt(4), max_new_tokens=4)
    assert str(error.value)


def test_settings_changed_after_loading_are_checked():
    config = DFlashConfig(**drafter_settings())
    config.mask_token_id = VOCAB + MASK
    with pytest.raises(ValueError, match="mask_token_id"):
        tiny_drafter().__class__(config)
