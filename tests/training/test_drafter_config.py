"""Drafter configs for targets of every family: valid, plain, explicit, and fit to decode with."""

import pytest
import torch

from dflash import DFlashDraftModel
from dflash.modeling.target_dflash import unwrap
from dflash.training.drafter_config import drafter_config, mask_token, spread_taps
from families import FAMILIES, build_target, exists
from tiny import VOCAB, plain, tiny_prompt, tiny_target, word_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_for_every_family(family):
    """It is one that decodes: the pair is accepted, and the output is the target's."""
    if not exists(family):
        pytest.skip(f"{family} is not in this version of transformers")
    target = build_target(family)
    config = drafter_config(target.config, layers=2, block_size=4, taps=3, mask_token_id=3)
    draft = DFlashDraftModel(config).double().eval()
    ids = tiny_prompt(5, vocab=config.vocab_size)
    output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=9, return_dict=True)
    assert torch.equal(output.sequences, plain(target, ids, 9)) and output.emitted.shape[1] > 0
    assert config.rope_parameters["rope_type"] == "default" and "mrope_section" not in config.rope_parameters
    assert config.num_target_layers == len(unwrap(target).get_decoder().layers)


def test_everything_is_explicit():
    settings = drafter_config(tiny_target().config, mask_token_id=3, taps=3).to_dict()
    assert settings["dflash_config"] == {"block_size": 16, "mask_token_id": 3, "target_layer_ids": [0, 2, 3]}
    assert settings["block_size"] == 16 and settings["num_target_layers"] == 4 and settings["num_hidden_layers"] == 5
    assert (settings["head_dim"], settings["num_attention_heads"], settings["num_key_value_heads"]) == (8, 4, 2)
    assert settings["intermediate_size"] == 48 and settings["layer_types"] == ["full_attention"] * 5
    assert settings["model_type"] == "qwen3" and settings["architectures"] == ["DFlashDraftModel"]
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"] == 10000.0


def test_sliding_layers_but_the_last():
    config = drafter_config(tiny_target().config, mask_token_id=3, taps=2, layers=3, sliding_window=32)
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config.sliding_window == 32 and config.use_sliding_window is True


PUBLISHED = [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (52, 5, [1, 13, 25, 37, 49])]
SHALLOW = [(4, 3, [0, 2, 3]), (4, 1, [1]), (4, 4, [0, 1, 2, 3]), (8, 5, [1, 2, 3, 4, 5]), (1, 1, [0])]


@pytest.mark.parametrize(("depth", "count", "taps"), PUBLISHED + SHALLOW)
def test_taps(depth, count, taps):
    assert spread_taps(depth, count) == taps


def test_taps_are_always_different_layers():
    for depth in range(1, 70):
        for count in range(1, min(depth, 9) + 1):
            taps = spread_taps(depth, count)
            assert len(taps) == count and taps == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < depth


@pytest.mark.parametrize("count", [0, 5])
def test_more_taps_than_layers(count):
    with pytest.raises(ValueError, match=f"4 layers has 1 to 4 taps, {count}"):
        spread_taps(4, count)


def heads(**changes):
    config = tiny_target().config
    for name, value in changes.items():
        setattr(config, name, value)
    found = drafter_config(config, mask_token_id=3, taps=2)
    return found.num_attention_heads, found.num_key_value_heads, found.head_dim


def test_heads():
    assert heads(hidden_size=4096, head_dim=256, num_attention_heads=16, num_key_value_heads=4) == (32, 8, 128)
    assert heads(hidden_size=2880, head_dim=64, num_attention_heads=64, num_key_value_heads=8) == (64, 8, 64)
    assert heads(hidden_size=5376, head_dim=512, num_attention_heads=32, num_key_value_heads=4) == (42, 7, 128)
    assert heads(hidden_size=7168, kv_lora_rank=512, num_attention_heads=64, num_key_value_heads=64) == (56, 8, 128)


def test_what_the_target_does_to_its_logits():
    config = tiny_target().config
    config.final_logit_softcapping = 30.0
    assert drafter_config(config, mask_token_id=3, taps=2).final_logit_softcapping == 30.0


def test_mask_tokens():
    """Explicit, then the tokenizer's, then a row that no token uses, then an error that names candidates."""
    tokenizer = word_tokenizer(VOCAB - 1)
    assert mask_token(VOCAB, tokenizer, 7) == 7
    assert mask_token(VOCAB, tokenizer) == VOCAB - 1
    tokenizer.mask_token = "w9"
    assert mask_token(VOCAB, tokenizer) == 9
    full = word_tokenizer()
    full.add_special_tokens({"additional_special_tokens": ["w11", "w2"]})
    with pytest.raises(ValueError, match=r"--mask-token-id, such as 11 \(w11\)$"):
        mask_token(VOCAB, full)
    with pytest.raises(ValueError, match="no token can stand for a mask"):
        mask_token(VOCAB)
    with pytest.raises(ValueError, match=f"{VOCAB} has no row.* {VOCAB}$"):
        mask_token(VOCAB, tokenizer, VOCAB)
