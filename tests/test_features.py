"""`dflash features`: from a data file to a cache that training reads."""

import json

import pytest
import torch

from dflash import cli
from dflash.training.documents import read_documents
from dflash.training.features import CachedFeatures, OnlineFeatures
from dflash.training.identity import identify
from tiny import tiny_target, word_tokenizer


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"id": f"d{i}", "input_ids": [3, 4 + i, 9] * (i + 1), "loss_mask": [0, 1, 1] * (i + 1)} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n{\n")
    return path


def run(capsys, *arguments):
    return cli.main(["features", *map(str, arguments)]), capsys.readouterr().err


def test_a_cache_of_the_targets_features(pair, data, tmp_path, capsys):
    code, err = run(capsys, *pair[:2], data, "--output", tmp_path / "cache", "--draft-config", pair[3], "--last-hidden")
    assert code == 0 and "line 5" in err and "no record" in err and "bytes each in bfloat16" in err
    target, documents = tiny_target(dtype=torch.float32), read_documents(data)
    cache = CachedFeatures(tmp_path / "cache")
    cache.check([0, 2, 3], target, word_tokenizer(), last_hidden=True)
    for found, state in zip(cache(documents), OnlineFeatures(target, [0, 2, 3], True)(documents), strict=True):
        torch.testing.assert_close(found.features.float(), state.features, rtol=1e-2, atol=1e-2)


def test_taps_by_number_and_fewer_documents(pair, data, tmp_path, capsys):
    options = ["--taps", "1,3", "--stored-dtype", "float32", "--limit", "2", "--output", tmp_path / "cache"]
    assert run(capsys, *pair[:2], data, *options)[0] == 0
    cache = CachedFeatures(tmp_path / "cache")
    assert cache.tap_ids == [1, 3] and cache.index.dtype == "float32" and cache.index.shards[0].ids == ["d0", "d1"]


def test_data_of_another_target_is_said(pair, data, tmp_path, capsys):
    record = identify(tiny_target(seed=1), word_tokenizer())
    data.with_name("data.jsonl.meta.json").write_text(json.dumps(record))
    code, err = run(capsys, *pair[:2], data, "--output", tmp_path / "cache", "--taps", "1")
    assert code == 0 and "made with something else: target_weights_hash" in err and "no record" not in err


@pytest.mark.parametrize("arguments", [["x"], ["x", "--output", "y"], ["x", "--output", "y", "--taps", "one"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["features", "--demo", *arguments])
    assert error.value.code == 2
    with pytest.raises(SystemExit):
        cli.main(["features", "x", "--output", "y", "--taps", "1"])
    assert "--target or --demo" in capsys.readouterr().err
