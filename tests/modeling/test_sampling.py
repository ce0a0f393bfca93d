"""Rejection sampling leaves the target's distribution as it is: by exact enumeration, and by counting."""

from itertools import product

import pytest
import torch

from dflash.modeling.sampling_dflash import DraftProposal, Sampler, acceptance_probability, next_token_distribution
from tiny import MASK, plain, tiny_drafter, tiny_prompt, tiny_target

V = 5  # vocabulary
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
]
DRAFT_TEMPERATURES = [0.0, 0.5, 1.5]


def language(seed):
    """Random logits of the next token after each prefix of at most two tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {prefix: 2 * torch.randn(V, generator=generator) for n in range(3) for prefix in product(range(V), repeat=n)}


def exact(logits, sampler):
    """The target's own distribution of three tokens, [V, V, V]."""
    law = torch.zeros(V, V, V, dtype=torch.float64)
    for x in product(range(V), repeat=3):
        law[x] = torch.stack([sampler.target_probabilities(logits[x[:n]])[x[n]] for n in range(3)]).double().prod()
    return law


def proposals(draft_logits, sampler):
    """Every pair of draft tokens with its probability; draft_logits [1, 2, V]."""
    tokens, probabilities = sampler.pick(draft_logits)
    if probabilities is None:
        yield 1.0, DraftProposal(tokens)
        return
    for pair in product(range(V), repeat=2):
        chance = probabilities[0, 0, pair[0]].double() * probabilities[0, 1, pair[1]].double()
        if chance > 0:
            yield chance, DraftProposal(torch.tensor([pair]), probabilities)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("draft_temperature", DRAFT_TEMPERATURES)
@pytest.mark.parametrize("seed", range(2))
def test_one_round_has_exactly_the_targets_law(settings, draft_temperature, seed):
    logits = language(seed)
    draft_logits = 2 * torch.randn(1, 2, V, generator=torch.Generator().manual_seed(seed + 100))
    sampler = Sampler(**settings, draft_temperature=draft_temperature)
    law = torch.zeros(V, V, V, dtype=torch.float64)
    for chance, proposal in proposals(draft_logits, sampler):
        drafted = proposal.tokens[0].tolist()
        rows = torch.stack([logits[tuple(drafted[:n])] for n in range(3)])[None]
        target = sampler.target_probabilities(rows)
        accept = acceptance_probability(target, proposal)[0].double().tolist()
        for accepted in range(3):
            reach = torch.tensor(accept[:accepted], dtype=torch.float64).prod()
            stop = 1.0 if accepted == 2 else 1.0 - accept[accepted]
            following = next_token_distribution(target, proposal, torch.tensor([accepted]))[0].double()
            law += chance * reach * stop * completed(drafted[:accepted], following, logits, sampler)
    assert torch.allclose(law, exact(logits, sampler), atol=2e-6)


def completed(prefix, following, logits, sampler):
    """Law of three tokens that start with `prefix` and a token of law `following`; the target draws the rest."""
    law = torch.zeros(V, V, V, dtype=torch.float64)
    for rest in product(range(V), repeat=3 - len(prefix)):
        x = (*prefix, *rest)
        chance = following[rest[0]]
        for n in range(len(prefix) + 1, 3):
            chance = chance * sampler.target_probabilities(logits[x[:n]])[x[n]].double()
        law[x] += chance
    return law


def chi_squared(counts, expected):
    """Statistic and degrees of freedom, over cells that expect at least 5."""
    kept = expected >= 5
    assert counts[expected == 0].sum() == 0, "a token outside the target's support was emitted"
    return ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum().item(), int(kept.sum()) - 1


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("draft_temperature", DRAFT_TEMPERATURES)
def test_verify_draws_the_first_token_from_the_target(settings, draft_temperature):
    """The same through `verify` with real random numbers, 40,000 rows at once."""
    rows = 40_000
    logits = language(7)
    generator = torch.Generator().manual_seed(11)
    sampler = Sampler(**settings, draft_temperature=draft_temperature, generator=generator)
    draft_logits = 2 * torch.randn(1, 1, V, generator=torch.Generator().manual_seed(5))
    proposal = DraftProposal(*sampler.pick(draft_logits.expand(rows, -1, -1).contiguous()))
    after = torch.stack([logits[(token,)] for token in range(V)])[proposal.tokens[:, 0]]
    verdict = sampler.verify(proposal, torch.stack([logits[()].expand(rows, -1), after], dim=1))
    first = torch.where(verdict.accepted > 0, proposal.tokens[:, 0], verdict.next_token)
    expected = sampler.target_probabilities(logits[()]).double() * rows
    statistic, freedom = chi_squared(torch.bincount(first, minlength=V).double(), expected)
    assert statistic < 30, f"chi-squared {statistic:.1f} with {freedom} degrees of freedom"
    p = expected / rows
    if proposal.probabilities is None:
        rate = p[proposal.tokens[0, 0]]
    else:
        rate = torch.minimum(p, proposal.probabilities[0, 0].double()).sum()
    assert verdict.accepted.double().mean() == pytest.approx(rate.item(), abs=0.015)


@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
@pytest.mark.parametrize(("shifted", "confidence"), [(False, 0.0), (True, 0.0), (True, 0.35)])
def test_decoding_end_to_end_has_the_targets_law(draft_temperature, shifted, confidence):
    """Two tokens after the first, by the whole loop: the drafter's cache, the target's rollback and the sampler."""
    vocab, runs = 6, 500
    target = tiny_target(vocab_size=vocab, dtype=torch.float32)
    dflash = {"mask_token_id": vocab - 1, "target_layer_ids": [0, 2], "sample_from_anchor": shifted}
    draft = tiny_drafter(block_size=3 - shifted, dtype=torch.float32, vocab_size=vocab, dflash_config=dflash)
    ids = tiny_prompt(4, vocab=vocab)
    options = {"temperature": 1.4, "draft_temperature": draft_temperature, "draft_confidence": confidence}
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(vocab, vocab, vocab, dtype=torch.float64)
    accepted = 0
    for _ in range(runs):
        output = draft.spec_generate(
            target=target, input_ids=ids, max_new_tokens=3, generator=generator, return_dict=True, **options
        )
        counts[tuple(output.sequences[0, 4:].tolist())] += 1
        accepted += int(output.emitted.max()) > 1
    expected = torch.zeros_like(counts)
    with torch.no_grad():
        for x in product(range(vocab), repeat=3):
            logits = target(torch.cat([ids, torch.tensor([x])], dim=1)).logits[0, 3:6]
            chances = (logits / 1.4).softmax(-1)
            expected[x] = runs * chances[range(3), x].double().prod()
    statistic, freedom = chi_squared(counts, expected)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, f"chi-squared {statistic:.1f}, {freedom} degrees of freedom"
    assert 0 < accepted < runs


def test_temperature_near_zero_is_greedy():
    target, draft, ids = tiny_target(), tiny_drafter(), tiny_prompt(9)
    for draft_temperature in (0.0, 0.3):
        output = draft.spec_generate(
            target=target, input_ids=ids, max_new_tokens=20, temperature=1e-6, draft_temperature=draft_temperature
        )
        assert torch.equal(output, plain(target, ids, 20))


def test_draft_outside_the_targets_support_is_never_accepted():
    logits = torch.tensor([[[0.0, 3.0, 2.0, -1.0, -2.0]] * 2])
    sampler = Sampler(temperature=1.0, top_k=2, generator=torch.Generator().manual_seed(0))
    for token in (0, 3, 4):
        verdict = sampler.verify(DraftProposal(torch.tensor([[token]])), logits)
        assert verdict.accepted.item() == 0 and verdict.next_token.item() in (1, 2)


def test_residual_without_mass_falls_back_to_the_target():
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]])
    proposal = DraftProposal(torch.tensor([[0]]), p[:, :1].clone())
    assert torch.equal(next_token_distribution(p, proposal, torch.tensor([0])), p[:, 0])


def test_mask_token_is_no_special_token_when_sampling():
    target = tiny_target()
    output = tiny_drafter().spec_generate(
        target=target,
        input_ids=torch.tensor([[MASK, 1, MASK]]),
        max_new_tokens=12,
        temperature=1.0,
        generator=torch.Generator().manual_seed(1),
    )
    assert output.shape == (1, 15)
