"""Features in batches against one document at a time and against `output_hidden_states`."""

import pytest
import torch

from dflash.training.documents import Document
from dflash.training.features import OnlineFeatures, batches
from families import build_target, exists
from tiny import DEPTH, VOCAB, WIDTH, tiny_target

FAMILIES = ["llama", "qwen3_5_wrapper", "gemma3", "gemma4_shared", "granite", "cohere2", "gpt_oss", "nemotron_h"]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # norms and RoPE compute in float32 whatever the model's dtype


def documents(*lengths, vocab=VOCAB):
    make = torch.Generator().manual_seed(3)
    return [
        Document(f"d{i}", torch.randint(0, vocab, (length,), generator=make), torch.ones(length, dtype=torch.bool))
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_each_document_alone(family):
    """By `output_hidden_states` and the target's own logits, for batched documents of unequal length."""
    if not exists(family):
        pytest.skip(f"{family} is not in this version of transformers")
    target, texts = build_target(family), documents(7, 23, 1, 12)
    states = OnlineFeatures(target, [0, 2, 3], last_hidden=True)(texts)
    for document, state in zip(texts, states, strict=True):
        with torch.no_grad():
            output = target(input_ids=document.input_ids[None], output_hidden_states=True, use_cache=False)
        expected = torch.cat([output.hidden_states[tap + 1][0] for tap in (0, 2, 3)], dim=-1)
        torch.testing.assert_close(state.features, expected, **CLOSE)
        assert state.last_hidden.shape == (len(document), WIDTH)
        with torch.no_grad():
            raw = target.get_output_embeddings()(state.last_hidden)
        assert torch.equal(raw.argmax(-1), output.logits[0].argmax(-1))


def test_the_head_takes_what_is_given():
    """After the final norm: the head module on `last_hidden` gives the target's own logits."""
    target, texts = tiny_target("qwen3"), documents(9, 4)
    for document, state in zip(texts, OnlineFeatures(target, [1], last_hidden=True)(texts), strict=True):
        with torch.no_grad():
            expected = target(input_ids=document.input_ids[None]).logits[0]
            torch.testing.assert_close(target.lm_head(state.last_hidden), expected, **CLOSE)


def test_a_small_batch_budget_changes_nothing():
    target, texts = tiny_target("qwen3_sliding"), documents(30, 3, 17, 17, 2)
    wide, narrow = (OnlineFeatures(target, [0, 3], batch_tokens=size)(texts) for size in (8192, 20))
    for a, b in zip(wide, narrow, strict=True):
        torch.testing.assert_close(a.features, b.features, **CLOSE)
        assert a.last_hidden is None


def test_nothing_is_left_behind():
    """Neither hooks, nor gradients, nor the batch that a document's states were a part of."""
    target, texts = tiny_target(), documents(30, 2)
    state = OnlineFeatures(target, [0], last_hidden=True)(texts)[1]
    assert state.features.untyped_storage().nbytes() == state.features.nbytes
    assert state.last_hidden.untyped_storage().nbytes() == state.last_hidden.nbytes
    assert not state.features.requires_grad and not state.features.is_inference()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())
    assert target(input_ids=texts[0].input_ids[None]).logits.shape == (1, 30, VOCAB)


def test_no_logits_of_every_position():
    target, shapes = tiny_target(), []
    hook = target.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    OnlineFeatures(target, [0], last_hidden=True)(documents(11, 11))
    hook.remove()
    assert shapes == [(2, 1, VOCAB)]


def test_batches_hold_every_document_once_within_the_limit():
    lengths = [5, 9, 1, 30, 7, 7, 2]
    groups = batches(lengths, 16)
    assert sorted(i for group in groups for i in group) == list(range(7))
    assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 16 for group in groups)
    assert len(groups) == 4 and batches([], 16) == []


@pytest.mark.parametrize("taps", [[], [1, 0], [0, 0], [-1, 2], [0, DEPTH]])
def test_wrong_taps(taps):
    with pytest.raises(ValueError, match=f"0..{DEPTH - 1}"):
        OnlineFeatures(tiny_target(), taps)


def test_wrong_uses():
    with pytest.raises(ValueError, match="eval"):
        OnlineFeatures(tiny_target().train(), [0])
    strange = Document("x", torch.tensor([VOCAB]), torch.tensor([True]))
    with pytest.raises(ValueError, match=rf"'x' has token {VOCAB}.* {VOCAB} rows"):
        OnlineFeatures(tiny_target(), [0])([strange])
    assert OnlineFeatures(tiny_target(), [0])([]) == []
