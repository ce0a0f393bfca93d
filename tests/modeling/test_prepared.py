"""`target.generate(custom_generate=draft.custom_generate)` gives what `target.generate` gives, whatever it prepares."""

import inspect
from functools import partial

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)

from dflash.modeling.prepared_dflash import PreparedSampler
from dflash.modeling.sampling_dflash import DraftProposal
from families import build_target
from tiny import ScriptedDrafter, WatchedDrafter, letter_tokenizer, plain, tiny_drafter, tiny_prompt, tiny_target

NEW = 24


class NeverTwice(LogitsProcessor):
    """Forbids what it was shown before, and counts its calls: wrong if called for a token that is not kept."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        scores[:, input_ids[0, -3:]] = -torch.inf
        return scores - 0.1 * len(self.lengths) * torch.arange(scores.shape[1])


class Sixth(StoppingCriteria):
    """Ends after its sixth call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((input_ids.shape[0],), self.calls >= 6)


CASES = {
    "nothing": dict,
    "repetition_penalty": lambda: {"repetition_penalty": 1.7},
    "no_repeat_ngram": lambda: {"no_repeat_ngram_size": 2},
    "bad_words": lambda: {"bad_words_ids": [[5], [7, 9], [11]]},
    "min_new_tokens": lambda: {"min_new_tokens": 15, "eos_token_id": list(range(0, 60, 2))},
    "min_length": lambda: {"min_length": 30, "eos_token_id": list(range(1, 60, 2))},
    "eos": lambda: {"eos_token_id": list(range(0, 60, 4))},
    "forced_eos": lambda: {"forced_eos_token_id": 3, "eos_token_id": 3},
    "suppress": lambda: {"suppress_tokens": [1, 2, 3, 4], "begin_suppress_tokens": [5, 6]},
    "sequence_bias": lambda: {"sequence_bias": {(4,): 3.0, (8, 9): 5.0}},
    "decay": lambda: {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 9},
    "guidance": lambda: {"guidance_scale": 1.5},
    "allowed": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + i) % 61 for i in (1, 7, 30)]},
    "processor": lambda: {"logits_processor": LogitsProcessorList([NeverTwice()])},
    "max_time": lambda: {"max_time": 1e-9},
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([Sixth()])},
    "both": lambda: {"logits_processor": [NeverTwice()], "stopping_criteria": [Sixth()], "repetition_penalty": 1.3},
    "everything": lambda: {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 9,
        "eos_token_id": 9,
    },
}


def scripted(text, wrong):
    """A drafter that knows the text, and goes on after its end."""
    more = torch.arange(8)[None] + 20
    return tiny_drafter(cls=ScriptedDrafter).script(torch.cat([text, more], dim=1), wrong)


@pytest.mark.parametrize("wrong", [lambda i: None, lambda i: i % 7, lambda i: 0], ids=["right", "mixed", "wrong"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_greedy_identity(case, wrong):
    target, ids = tiny_target("qwen3"), tiny_prompt(9)
    expected = plain(target, ids, NEW, **CASES[case]())
    draft = scripted(expected, wrong)
    mask = torch.ones_like(ids)
    settings = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, **CASES[case]()}
    output = target.generate(ids, attention_mask=mask, custom_generate=draft.custom_generate, **settings)
    assert torch.equal(output.sequences, expected), case
    assert output.emitted.sum() == expected.shape[1] - ids.shape[1] - 1
    if wrong(0) is None and expected.shape[1] > ids.shape[1] + 3:
        assert output.tau > 2, "a drafter that knows the text must save forwards"


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
def test_every_processor_sees_each_prefix_once(family):
    target, ids = tiny_target(family), tiny_prompt(6)
    theirs, ours = NeverTwice(), NeverTwice()
    expected = plain(target, ids, NEW, logits_processor=[theirs])
    draft = scripted(expected, lambda i: [None, 2, 0][i % 3])
    text = plain(target, ids, NEW, logits_processor=[ours], custom_generate=draft.custom_generate)
    assert torch.equal(text, expected)
    assert ours.lengths == theirs.lengths == list(range(6, 6 + NEW))


@pytest.mark.parametrize("position", range(10, 20))
def test_stop_strings_end_anywhere_in_a_block(position):
    target, ids, tokenizer = tiny_target(), tiny_prompt(9), letter_tokenizer()
    text = plain(target, ids, NEW)
    stops = [StopStringCriteria(tokenizer, [tokenizer.decode(text[0, position - 1 : position + 1])])]
    expected = plain(target, ids, NEW, stopping_criteria=stops)
    assert expected.shape[1] <= position + 1
    draft = scripted(text, lambda i: None)
    assert torch.equal(
        plain(target, ids, NEW, stopping_criteria=stops, custom_generate=draft.custom_generate), expected
    )


@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss", "lfm2"])
def test_targets_whose_states_are_rolled_back(family):
    """Transformers' own assisted generation refuses the first of them."""
    target, ids = build_target(family), tiny_prompt(7)
    draft = tiny_drafter(
        hidden_size=target.config.hidden_size,
        num_target_layers=target.config.num_hidden_layers,
        vocab_size=target.config.vocab_size,
        dflash_config={"mask_token_id": 5, "target_layer_ids": [0, 1]},
        cls=ScriptedDrafter,
    )
    settings = dict(repetition_penalty=1.3, min_new_tokens=12, eos_token_id=list(range(0, 50, 3)))
    expected = plain(target, ids, 16, **settings)
    draft.script(torch.cat([expected, torch.arange(8)[None]], dim=1), lambda i: i % 3)
    assert torch.equal(plain(target, ids, 16, **settings, custom_generate=draft.custom_generate), expected)
    assert 0 < draft.calls < 12


def test_scores_and_logits():
    target, ids = tiny_target(), tiny_prompt(5)
    settings = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.5)
    expected = plain(target, ids, 12, **settings)
    draft = scripted(expected.sequences, lambda i: i % 4)
    output = plain(target, ids, 12, **settings, custom_generate=draft.custom_generate)
    for name in ("scores", "logits"):
        ours, theirs = getattr(output, name), getattr(expected, name)
        assert len(ours) == len(theirs) == 12 and ours[0].shape == (1, 61)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    assert not output.scores[0].is_inference(), "the caller may change what it is given"
    assert plain(target, ids, 3, return_dict_in_generate=True, custom_generate=draft.custom_generate).scores is None


def test_a_cache_of_the_output_continues():
    target, ids, draft = tiny_target(), tiny_prompt(5), tiny_drafter()
    first = plain(target, ids, 9, return_dict_in_generate=True, custom_generate=draft.custom_generate, eos_token_id=[9])
    longer = torch.cat([first.sequences, tiny_prompt(4, seed=3)], dim=1)
    second = draft.spec_generate(target=target, input_ids=longer, max_new_tokens=9, cache=first.cache)
    assert torch.equal(second, plain(target, longer, 9))


def test_padding_is_left_as_it_is():
    target, ids = tiny_target(), tiny_prompt(8)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    settings = dict(attention_mask=mask, do_sample=False, max_new_tokens=NEW, repetition_penalty=1.4)
    expected = target.generate(ids, **settings)
    draft = tiny_drafter()
    assert torch.equal(target.generate(ids, **settings, custom_generate=draft.custom_generate), expected)


class Words(TextStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.got, self.ended = [], False

    def put(self, value):
        self.got += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


def test_options_and_a_streamer():
    target, ids = tiny_target(), tiny_prompt(6)
    expected = plain(target, ids, NEW)
    longer = torch.cat([expected, expected], dim=1)
    draft, words = tiny_drafter(cls=WatchedDrafter).script(longer, lambda i: None), Words()
    method = partial(draft.custom_generate, streamer=words)
    text = plain(target, ids, NEW, custom_generate=method, block_size=3, draft_context_window=20, prefill_chunk_size=4)
    assert torch.equal(text, expected)
    assert words.got == expected[0].tolist() and words.ended
    assert {outputs.shape[1] for _, outputs in draft.seen} == {3}


SAMPLING = [
    {"top_k": 0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 9, "min_p": 0.1, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("settings", SAMPLING, ids=str)
@pytest.mark.parametrize("draft_temperature", [0.0, 0.9])
def test_sampling_runs_and_keeps_to_its_processors(settings, draft_temperature):
    target, ids = tiny_target(initializer_range=0.1), tiny_prompt(6)
    draft = tiny_drafter()
    options = dict(do_sample=True, custom_generate=draft.custom_generate, draft_temperature=draft_temperature)
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(plain(target, ids, NEW, **settings, **options))
    assert texts[0].shape == (1, 6 + NEW)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    if "no_repeat_ngram_size" in settings:
        pairs = list(zip(texts[2][0, :-1].tolist(), texts[2][0, 1:].tolist(), strict=True))
        assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("known", [True, False])
def test_each_position_has_exactly_the_targets_law(seed, known, monkeypatch):
    """The chance to keep the draft's token, and the law after a rejection, add up to the processed scores."""
    size, dice = 7, torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(1, size, generator=dice)
    q = None if known else torch.randn(1, 1, size, generator=dice).softmax(-1)
    prefix = torch.tensor([[2, 4, 4]])
    penalty = RepetitionPenaltyLogitsProcessor(3.0)
    wanted = penalty(prefix, logits.clone()).softmax(-1)
    law, laws = torch.zeros(1, size), []
    sampler = PreparedSampler(prefix, LogitsProcessorList([penalty]), StoppingCriteriaList(), temperature=1.0)
    monkeypatch.setattr(sampler, "draw", lambda law: laws.append(law) or law.argmax(-1))
    for token in range(size):
        draft = DraftProposal(torch.tensor([[token]]), q)
        chance = (wanted[0, token] / (1.0 if known else q[0, 0, token])).clamp(max=1)
        share = 1 / size if known else q[0, 0, token]
        for edge, kept in ((chance - 1e-4, True), (chance + 1e-4, False)):
            monkeypatch.setattr(torch, "rand", lambda *a, edge=edge, **k: torch.tensor([[float(edge)]]))
            sampler.sequence, sampler.finished = prefix, False
            got, was_kept = sampler._next(logits, draft)
            assert was_kept == kept and (not kept or got.item() == token)
        law[0, token] += share * chance
        law += share * (1 - chance) * laws[-1]
        if known:  # a certain draft has the target's law by itself, whatever it is
            alone = (1 - chance) * laws[-1]
            alone[0, token] += chance
            assert torch.allclose(alone, wanted, atol=1e-5)
    assert torch.allclose(law, wanted, atol=1e-5)


def test_what_cannot_be_done_is_named():
    target, ids, draft = tiny_target(), tiny_prompt(5), tiny_drafter()
    method = {"custom_generate": draft.custom_generate}
    with pytest.raises(ValueError, match="beam_search"):
        plain(target, ids, 5, num_beams=2, **method)
    with pytest.raises(ValueError, match="2 rows"):
        plain(target, ids.repeat(2, 1), 5, **method)
    with pytest.raises(ValueError, match="output_hidden_states"):
        plain(target, ids, 5, return_dict_in_generate=True, output_hidden_states=True, **method)
    with pytest.raises(ValueError, match="assisted_generation"):
        plain(target, ids, 5, prompt_lookup_num_tokens=3, **method)
    with pytest.raises(ValueError, match="draft_temperature"):
        plain(target, ids, 5, draft_temperature=0.5, **method)
    with pytest.raises(ValueError, match="position_ids"):
        plain(target, ids, 5, position_ids=torch.arange(5)[None] + 3, **method)
    with pytest.raises(ValueError, match="pad_token_id"):
        target.generate(torch.tensor([[3, 0, 4]]), max_new_tokens=4, **method)
    embeds = target.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="inputs_embeds"):
        target.generate(inputs_embeds=embeds, max_new_tokens=4, do_sample=False, **method)


def test_a_static_cache_is_filled():
    target, ids = tiny_target(), tiny_prompt(5)
    expected = plain(target, ids, 20)
    draft = scripted(expected, lambda i: [None, 2, 0][i % 3])
    kept = {"cache_implementation": "static", "return_dict_in_generate": True}
    output = plain(target, ids, 20, custom_generate=draft.custom_generate, **kept)
    assert torch.equal(output.sequences, expected) and len(output.emitted) < 19
    assert type(output.cache.target_cache).__name__ == "StaticCache"


def test_a_cache_of_the_caller_is_refused():
    target, ids, draft = tiny_target(), tiny_prompt(6), tiny_drafter()
    name = "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
    kept = plain(target, ids[:, :4], 1, return_dict_in_generate=True)[name]
    longer = torch.cat([ids[:, :4], ids], dim=1)
    with pytest.raises(ValueError, match="of 4 tokens"):
        plain(target, longer, 5, **{name: kept}, custom_generate=draft.custom_generate)
