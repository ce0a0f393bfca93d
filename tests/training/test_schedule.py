"""Steps: their documents and learning rates depend on the step alone."""

import pytest

from dflash.training.schedule import DocumentStream, accumulation, learning_rate_factor
from toy import toy_config


def test_every_epoch_sees_every_document_once():
    stream = DocumentStream(list("abcdefg"), 3, seed=0)
    seen = [item for step in range(7) for item in stream.batch(step)]
    assert [epoch for epoch, _ in seen] == [0] * 7 + [1] * 7 + [2] * 7
    for epoch in range(3):
        assert sorted(document for number, document in seen if number == epoch) == list("abcdefg")
    assert stream.batch(4) == seen[12:15]


def test_steps_of_epochs():
    assert DocumentStream(list("abcdefg"), 3, 0).steps(3.0) == 7
    assert DocumentStream(list("ab"), 64, 0).steps(1.0) == 1


def test_accumulation():
    assert accumulation(64, 8, 2) == 4
    with pytest.raises(ValueError, match=r"batch_size 64 is not a multiple of micro_batch_size 8 times 3 .* 24"):
        accumulation(64, 8, 3)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_learning_rates(tmp_path, schedule):
    config = toy_config(tmp_path, schedule=schedule, warmup_share=0.1, decay_share=0.2, min_lr_share=0.1)
    factors = [learning_rate_factor(step, 100, config) for step in range(100)]
    assert factors[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert factors[10] == pytest.approx(1.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    if schedule == "wsd":
        assert factors[79] == 1.0 and factors[80] == pytest.approx(0.1 + 0.9 * 19 / 20)
    assert learning_rate_factor(0, 1, config) > 0
