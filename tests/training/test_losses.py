"""Weights of slots and losses of rows, against loops that anybody can read."""

import math

import pytest
import torch

from dflash.training.losses import (
    LossMix,
    accepted_runs,
    chunked_rows,
    decay_gamma,
    decay_weights,
    dpace_weights,
)

VALID = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_by_its_formula(alpha):
    torch.manual_seed(0)
    cross_entropy = torch.rand(3, 4, dtype=torch.float64) * 3
    found = dpace_weights(cross_entropy, VALID, alpha)
    for row in range(3):
        count = int(VALID[row].sum())
        smoothed = [(1 - alpha) * math.exp(-cross_entropy[row, i]) + alpha for i in range(count)]
        for slot in range(4):
            expected = sum(math.prod(smoothed[: last + 1]) for last in range(slot, count))
            assert found[row, slot].item() == pytest.approx(expected)


def test_dpace_weights_are_not_trained():
    cross_entropy = torch.rand(3, 4, requires_grad=True)
    assert not dpace_weights(cross_entropy, VALID, 0.5).requires_grad


def test_decay_by_its_formula():
    found = decay_weights(VALID, 4.0)
    for row in range(3):
        for slot in range(4):
            expected = math.exp(-slot / 4) if VALID[row, slot] else 0.0
            assert found[row, slot].item() == pytest.approx(expected)


def test_gamma_is_published_or_given():
    assert [decay_gamma(block, None) for block in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert decay_gamma(12, 3.0) == 3.0
    with pytest.raises(ValueError, match=r"block sizes \[8, 10, 16\] only, the drafter's is 12"):
        decay_gamma(12, None)


def test_runs_end_at_the_first_wrong_slot():
    right = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]], dtype=torch.bool)
    assert accepted_runs(right, VALID).tolist() == [2, 2, 0]


def test_losses_by_their_formulas():
    torch.manual_seed(0)
    logits, target = torch.randn(2, 5, 7, dtype=torch.float64)
    labels = torch.tensor([0, 6, 3, 3, 1])
    loss, cross_entropy = LossMix(0.2, 0.3, 0.5).rows(logits, labels, target)
    for row in range(5):
        q, p = logits[row].softmax(-1).tolist(), target[row].softmax(-1).tolist()
        ce = -math.log(q[labels[row]])
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        assert 1 - tv == pytest.approx(sum(min(a, b) for a, b in zip(p, q, strict=True)))  # the acceptance rate
        assert loss[row].item() == pytest.approx(0.2 * ce + 0.3 * kl + 0.5 * tv)
        assert cross_entropy[row].item() == pytest.approx(ce)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_rows_have_the_gradient_of_rows_together(chunk):
    torch.manual_seed(0)
    head, labels = torch.randn(7, 4, dtype=torch.float64), torch.tensor([0, 6, 3, 3, 1])
    hidden, weights = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    sizes = []

    def row_loss(part, rows):
        sizes.append(len(part))
        return (*LossMix().rows(part @ head.T, labels[rows]), torch.ones(len(part), dtype=torch.bool))

    chunked = hidden.clone().requires_grad_()
    loss, _, extra = chunked_rows(chunked, row_loss, chunk)
    (loss * weights).sum().backward()
    plain = hidden.clone().requires_grad_()
    (torch.nn.functional.cross_entropy(plain @ head.T, labels, reduction="none") * weights).sum().backward()
    assert torch.allclose(chunked.grad, plain.grad, atol=1e-12)
    assert extra.all() and max(sizes) <= chunk and sum(sizes) == 5


def test_chunked_rows_without_gradients():
    with torch.no_grad():
        loss, cross_entropy = chunked_rows(torch.randn(5, 4), lambda part, rows: (part.sum(-1), part.sum(-1)), 2)
    assert torch.equal(loss, cross_entropy) and not loss.requires_grad
