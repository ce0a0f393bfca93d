"""Anchors: where decoding could start a block, the same ones for the same seed, epoch and document."""

import pytest
import torch

from dflash.training.anchors import anchor_budget, candidates, document_order, draw_anchors, trainable_documents
from dflash.training.documents import Document


def text(mask, name="a"):
    return Document(name, torch.arange(len(mask)), torch.tensor(mask, dtype=torch.bool))


def test_candidates_by_their_rule():
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 3, 40):
        mask = torch.rand(length, generator=generator) < 0.6
        expected = [p for p in range(1, length - 1) if mask[p] and mask[p + 1]]
        assert candidates(mask).tolist() == expected


def test_the_end_of_a_document_has_anchors_too():
    assert candidates(text([0, 0, 1, 1, 1]).loss_mask).tolist() == [2, 3]


def test_draws_are_repeatable_and_differ_otherwise():
    document = text([0] + [1] * 200)
    drawn = draw_anchors(document, 0, 0, 512, 0.2)
    assert len(drawn) == 40 and drawn.tolist() == sorted(set(drawn.tolist()))
    assert torch.equal(drawn, draw_anchors(text([0] + [1] * 200), 0, 0, 512, 0.2))
    for other in (
        draw_anchors(document, 1, 0, 512, 0.2),
        draw_anchors(document, 0, 1, 512, 0.2),
        draw_anchors(text([0] + [1] * 200, "b"), 0, 0, 512, 0.2),
    ):
        assert not torch.equal(drawn, other)


def test_epochs_reach_all_candidates():
    document = text([0] + [1] * 20)
    seen = {p for epoch in range(60) for p in draw_anchors(document, epoch, 0, 512, 0.2).tolist()}
    assert seen == set(range(1, 20))


def test_budget():
    assert [anchor_budget(10, 512, 1.0), anchor_budget(10, 4, 1.0), anchor_budget(10, 512, 0.3)] == [10, 4, 3]
    assert anchor_budget(3, 512, 0.01) == 1


def test_order_is_a_permutation_of_each_epoch():
    assert sorted(document_order(9, 0, 0)) == list(range(9))
    assert document_order(9, 0, 0) != document_order(9, 1, 0)
    assert document_order(9, 0, 0) == document_order(9, 0, 0)


def test_documents_without_a_candidate_are_left_out():
    good, bad = text([0, 1, 1]), text([0, 1, 0, 1])
    assert trainable_documents([bad, good]) == [good]
    with pytest.raises(ValueError, match="none of 1 documents has two supervised tokens in a row"):
        trainable_documents([bad])
