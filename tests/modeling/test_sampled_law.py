"""Sampling follows the target's law on every kind of cache, over long texts with a rollback in most rounds.

Each token of a text is judged by the target's own law after the text before it, from one forward over all of it: where
the token falls among all tokens sorted from the likeliest, as a number in 0..1, is uniform if, and only if on average,
it was drawn from that law. Uniformity is tested with chi-squared; tokens drawn after a wrongly restored cache are
unlikelier than they should be, and gather at the far end.
"""

import pytest
import torch

from dflash.modeling.rollback_dflash import CacheRollback, step_form
from families import build_target
from tiny import tiny_drafter, tiny_prompt

VOCAB, NEW, TEXTS, BINS = 12, 150, 2, 10
KINDS = {
    "full": "llama",
    "sliding": "qwen2_sliding",
    "sinks": "gpt_oss",
    "latent": "deepseek_v3",
    "linear attention": "qwen3_5",
    "state space": "bamba",
    "convolution": "lfm2",
}


def texts(target, temperature):
    """Sampled texts [1, P + T], and the tokens that each round of each emitted."""
    dflash = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2, 3]}
    draft = tiny_drafter(block_size=4, vocab_size=VOCAB, dflash_config=dflash)
    generator = torch.Generator().manual_seed(0)
    for seed in range(TEXTS):
        output = draft.spec_generate(
            target=target,
            input_ids=tiny_prompt(5, seed, VOCAB),
            max_new_tokens=NEW,
            temperature=temperature,
            draft_temperature=1.0,
            generator=generator,
            return_dict=True,
        )
        yield output.sequences, output.emitted


@torch.no_grad()
def places(target, text, temperature, generator):
    """Where each new token of text [1, P + T] falls among all, sorted from the likeliest: [T] in 0..1."""
    mixers = [module for module in target.modules() if hasattr(module, "time_step_limit")]
    with step_form(mixers):
        logits = target(text).logits[0, -NEW - 1 : -1]
    chances = (logits / temperature).softmax(-1)
    own = chances.gather(1, text[0, -NEW:, None])
    before = (chances * (chances > own)).sum(-1)
    return before + own[:, 0] * torch.rand(NEW, generator=generator, dtype=own.dtype)


def chi_squared(family, temperature=1.0, judged=1.0):
    target = build_target(family, vocab_size=VOCAB)
    generator = torch.Generator().manual_seed(1)
    found, emitted = [], []
    for text, counts in texts(target, temperature):
        found.append(places(target, text, judged, generator))
        emitted += counts[0].tolist()
    assert emitted.count(1) > 30 and sum(count > 1 for count in emitted) > 30  # rollbacks and speculation
    counts = torch.histc(torch.cat(found), BINS, 0.0, 1.0)
    expected = NEW * TEXTS / BINS
    return ((counts - expected) ** 2 / expected).sum().item()


LIMIT = (BINS - 1) + 5 * (2 * (BINS - 1)) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache(kind):
    assert chi_squared(KINDS[kind]) < LIMIT


def test_another_law_is_noticed():
    assert chi_squared("llama", temperature=2.0) > LIMIT


def test_a_state_that_is_not_restored_is_noticed(monkeypatch):
    monkeypatch.setattr(CacheRollback, "restore", lambda self: None)
    monkeypatch.setattr(CacheRollback, "replay", lambda self, start, stop: [])
    assert chi_squared("qwen3_5") > LIMIT
