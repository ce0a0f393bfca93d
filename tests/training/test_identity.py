"""Telling targets, tokenizers and templates apart."""

import copy

import pytest
import torch

from dflash.modeling.pairing_dflash import weights_hash
from dflash.training.identity import differences, identify
from tiny import tiny_target, word_tokenizer


def test_a_model_has_one_hash_in_every_dtype():
    target = tiny_target(dtype=torch.float64)
    hashes = {weights_hash(copy.deepcopy(target).to(dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    assert len(hashes) == 1


def test_other_weights_have_another_hash():
    target = tiny_target()
    before = weights_hash(target)
    with torch.no_grad():
        target.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    assert weights_hash(target) != before != weights_hash(tiny_target(seed=1))


def test_offloaded_weights_are_refused():
    with pytest.raises(ValueError, match="offload"):
        weights_hash(tiny_target().to("meta"))


def test_differences_are_named():
    stored = identify(tiny_target(), word_tokenizer())
    assert differences(stored, identify(tiny_target(), word_tokenizer())) == []
    assert differences(stored, identify(tiny_target(dtype=torch.float32))) == []
    other = word_tokenizer()
    other.chat_template = "{{ messages }}"
    assert [line.split()[0] for line in differences(stored, identify(tiny_target(), other))] == [
        "target_chat_template_hash"
    ]
    found = differences(stored, identify(tiny_target(seed=1, max_position_embeddings=64), word_tokenizer(60)))
    assert [line.split()[0] for line in found] == [
        "target_weights_hash",
        "target_tokenizer_hash",
        "max_position_embeddings",
    ]
    assert "is 512, here 64" in found[2]
