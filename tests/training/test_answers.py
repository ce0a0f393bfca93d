"""A target's answers, many at a time, against `generate` on each prompt alone."""

import pytest
import torch

from dflash.training.answers import Answer, AnswerSettings, BatchAnswerer, ContinuousAnswerer, transformers_answerer
from families import build_target, exists
from tiny import plain, tiny_prompt, tiny_target

LENGTHS = (5, 9, 3, 12, 7, 9, 1)


def prompts(lengths=LENGTHS):
    return [tiny_prompt(length, seed=i)[0].tolist() for i, length in enumerate(lengths)]


def target_with_stop(family="llama", new=12, **options):
    """A target that ends some of its answers early: stops are tokens it gives in the middle of some."""
    target = tiny_target(family, **options)
    found = [plain(target, torch.tensor([prompt]), new)[0, len(prompt) :].tolist() for prompt in prompts()]
    target.generation_config.eos_token_id = [found[0][4], found[3][0]]
    return target


def expected(target, new=12):
    answers = []
    for prompt in prompts():
        tokens = plain(target, torch.tensor([prompt]), new)[0, len(prompt) :].tolist()
        answers.append(Answer(tokens, tokens[-1] in target.generation_config.eos_token_id))
    return answers


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [ContinuousAnswerer, BatchAnswerer])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_answers_are_those_of_each_prompt_alone(kind, family, rows):
    """Rows that end early, at once, or at the budget, and are given to other prompts."""
    target = target_with_stop(family)
    found = list(kind(target, AnswerSettings(max_new_tokens=12), rows)(prompts()))
    assert sorted(index for index, _ in found) == list(range(len(LENGTHS)))
    answers = expected(target)
    assert [answer for _, answer in sorted(found, key=lambda pair: pair[0])] == answers
    assert {answer.finished for answer in answers} == {True, False} and any(len(a.tokens) == 1 for a in answers)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("granite", ContinuousAnswerer),
        ("deepseek_v3", ContinuousAnswerer),
        ("qwen3_moe", ContinuousAnswerer),
        ("gemma3", BatchAnswerer),
        ("qwen3_5", BatchAnswerer),
    ],
)
def test_each_family_in_the_way_that_its_cache_allows(family, kind):
    if not exists(family):
        pytest.skip(f"{family} is not in this version of transformers")
    target = build_target(family, dtype=torch.float32)  # Transformers' eager mask overflows in float64
    target.generation_config.eos_token_id = [60]
    answerer = transformers_answerer(target, AnswerSettings(max_new_tokens=8), rows=2)
    assert type(answerer) is kind
    assert [answer for _, answer in sorted(answerer(prompts()), key=lambda pair: pair[0])] == expected(target, 8)


def test_a_finished_row_does_not_wait():
    """Continuous: as many steps as tokens over rows, not as many as the longest of each batch."""
    target, steps = target_with_stop(), []
    hook = target.register_forward_hook(lambda module, inputs, output: steps.append(output.logits.shape[0]))
    list(ContinuousAnswerer(target, AnswerSettings(max_new_tokens=12), 3)(prompts()))
    hook.remove()
    total = sum(len(answer.tokens) for answer in expected(target))
    assert sum(steps) == total  # each forward of a row gives a token of its text; none is run for nothing


def test_sampling_follows_the_seed_and_the_distribution():
    target, many = tiny_target(), [tiny_prompt(4)[0].tolist()] * 1500
    target.generation_config.eos_token_id = 60
    with torch.no_grad():
        chances = (target(torch.tensor(many[:1])).logits[0, -1] / 0.8).softmax(-1)
    for kind in (ContinuousAnswerer, BatchAnswerer):

        def first(seed, kind=kind):
            settings = AnswerSettings(max_new_tokens=1, temperature=0.8, seed=seed)
            return [answer.tokens[0] for _, answer in kind(target, settings, 500)(many)]

        tokens = first(1)
        assert first(1) == tokens != first(2)
        shares = torch.bincount(torch.tensor(tokens), minlength=61) / 1500
        assert (shares - chances).abs().max() < 0.05


def test_random_numbers_of_others_are_left_alone():
    target, state = target_with_stop(), torch.get_rng_state()
    list(BatchAnswerer(target, AnswerSettings(max_new_tokens=3, temperature=1.0), 3)(prompts()))
    assert torch.equal(state, torch.get_rng_state())


def test_a_target_that_never_stops_is_refused():
    with pytest.raises(ValueError, match="eos_token_id"):
        transformers_answerer(tiny_target(), AnswerSettings())


def test_no_prompts():
    assert list(ContinuousAnswerer(target_with_stop(), AnswerSettings(), 4)([])) == []


@pytest.mark.parametrize("kind", [ContinuousAnswerer, BatchAnswerer])
def test_what_the_generation_config_asks_for_besides_is_not_done(kind, capsys):
    """As in `spec_generate`: a drafter is not trained on texts of another distribution than it is used for."""
    target = target_with_stop()
    answers = expected(target)
    changes = {"repetition_penalty": 5.0, "do_sample": True, "top_k": 3, "no_repeat_ngram_size": 2, "min_length": 30}
    target.generation_config.update(**changes)
    found = kind(target, AnswerSettings(max_new_tokens=12), 4)(prompts())
    assert [answer for _, answer in sorted(found, key=lambda pair: pair[0])] == answers
    transformers_answerer(target, AnswerSettings())
    assert "repetition_penalty" in capsys.readouterr().err
