"""Features on disk: equal to those of the target, checked, resumed, and never half-written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.training import feature_writer
from dflash.training.documents import Document
from dflash.training.feature_writer import write_features
from dflash.training.features import CachedFeatures, OnlineFeatures
from tiny import VOCAB, WIDTH, tiny_target, word_tokenizer

LENGTHS = (7, 23, 1, 12, 15)


def documents(*lengths):
    make = torch.Generator().manual_seed(3)
    return [
        Document(f"d{i}", torch.randint(0, VOCAB, (length,), generator=make), torch.ones(length, dtype=torch.bool))
        for i, length in enumerate(lengths or LENGTHS)
    ]


def source(last_hidden=True, **options):
    return OnlineFeatures(tiny_target(dtype=torch.float32, **options), [0, 2, 3], last_hidden)


def write(folder, documents_=None, made_by=None, **options):
    """Writes in files of about 20 tokens; gives what was said."""
    said = []
    options = {"dtype": "float32", "shard_bytes": 20 * (4 * WIDTH * 4 + 8), "report": said.append, **options}
    write_features(made_by or source(), documents_ or documents(), folder, **options)
    return said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_read_is_what_the_target_gives(tmp_path, dtype):
    texts = documents()
    write(tmp_path / "cache", dtype=dtype)
    cache = CachedFeatures(tmp_path / "cache")
    order = [3, 0, 4, 1, 2, 3]
    expected = source()([texts[i] for i in order])
    for found, state in zip(cache([texts[i] for i in order]), expected, strict=True):
        assert found.features.dtype == found.last_hidden.dtype == getattr(torch, dtype)
        close = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}[dtype]
        torch.testing.assert_close(found.features.float(), state.features, rtol=close, atol=close)
        torch.testing.assert_close(found.last_hidden.float(), state.last_hidden, rtol=close, atol=close)
    assert cache.tap_ids == [0, 2, 3] and cache.index.last_hidden_is_normed is True


def test_without_last_states(tmp_path):
    write(tmp_path / "cache", made_by=source(last_hidden=False))
    cache = CachedFeatures(tmp_path / "cache")
    assert cache(documents())[1].last_hidden is None and cache.index.last_hidden_is_normed is None
    with pytest.raises(ValueError, match="last_hidden"):
        cache.check([0, 2, 3], source().target, last_hidden=True)


def test_predicted_sizes_are_those_on_disk(tmp_path):
    said = write(tmp_path / "cache")
    files = sorted((tmp_path / "cache").glob("*.safetensors"))
    index = CachedFeatures(tmp_path / "cache").index
    tensors = [load_file(file) for file in files]
    assert sum(tensor.nbytes for file in tensors for tensor in file.values()) == index.size(index.shards)
    assert len(files) == len(index.shards) == 4  # 7 | 23 | 1 + 12 | 15
    assert "58 tokens" in said[0] and f"{index.bytes_per_token} bytes" in said[0] and "4 files" in said[0]


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 20000, 20000))
    with pytest.raises(ValueError, match=r"need 30.2 kB.* has 20.0 kB free"):
        write(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_interrupted_write_goes_on(tmp_path, monkeypatch):
    """Killed while the third file was written: the first two are kept, and what comes after equals one run."""
    calls = []

    def interrupted(tensors, path):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        save_file(tensors, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(feature_writer, "save_file", interrupted)
        write(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"2 of 4 shards are missing.*again"):
        CachedFeatures(tmp_path / "cache")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.safetensors")}
    assert len(kept) == 2
    said = write(tmp_path / "cache")
    assert len(said) == 3 and "4 of 4" in said[2]
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    write(tmp_path / "whole")
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "cache" / path.name).read_bytes()
    assert len(write(tmp_path / "cache")) == 1  # nothing left to do


OTHER = [
    ({"dtype": "bfloat16"}, "dtype is float32, asked for bfloat16"),
    ({"documents_": documents(5)}, "documents"),
    ({"made_by": source(seed=1)}, "target_weights_hash"),
    ({"made_by": OnlineFeatures(tiny_target(dtype=torch.float32), [0, 3], True)}, r"target_layer_ids is \[0, 2, 3\]"),
    ({"made_by": source(last_hidden=False)}, "last_hidden_is_normed"),
]


@pytest.mark.parametrize(("change", "message"), OTHER, ids=lambda value: value if isinstance(value, str) else "")
def test_another_cache_is_not_mixed_in(tmp_path, change, message):
    write(tmp_path / "cache")
    before = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "cache", **change)
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == before


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="choose another folder"):
        write(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["notes.txt"]


def test_what_a_cache_was_made_from_is_checked(tmp_path):
    write(tmp_path / "cache", tokenizer=word_tokenizer())
    cache, target = CachedFeatures(tmp_path / "cache"), source().target
    cache.check([0, 2, 3], target, word_tokenizer(), last_hidden=True)
    cache.check([0, 2, 3], target.to(torch.bfloat16))
    for arguments, message in [
        (([0, 2], target), r"target_layer_ids are \[0, 2, 3\], here \[0, 2\]"),
        (([0, 2, 3], tiny_target(seed=1)), "target_weights_hash"),
        (([0, 2, 3], target, word_tokenizer(60)), "target_tokenizer_hash"),
        (([0, 2, 3], tiny_target(rms_norm_eps=1e-3)), "rms_norm_eps"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.check(*arguments)


def test_documents_that_are_not_in_the_cache(tmp_path):
    write(tmp_path / "cache")
    cache, texts = CachedFeatures(tmp_path / "cache"), documents()
    with pytest.raises(ValueError, match="'d9' is not"):
        cache([Document("d9", texts[0].input_ids, texts[0].loss_mask)])
    with pytest.raises(ValueError, match="'d1' has other tokens"):
        cache([Document("d1", (texts[1].input_ids + 1) % VOCAB, texts[1].loss_mask)])


def test_an_index_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError):
        CachedFeatures(tmp_path)
    write(tmp_path / "cache")
    place = tmp_path / "cache" / "index.json"
    index = json.loads(place.read_text())
    place.write_text(json.dumps({**index, "last_hidden_is_normed": False}))
    with pytest.raises(ValueError, match="final norm"):
        CachedFeatures(tmp_path / "cache")
    place.write_text(json.dumps({**index, "format": 2}))
    with pytest.raises(ValueError, match="format 2"):
        CachedFeatures(tmp_path / "cache")


def test_values_that_do_not_fit_the_dtype(tmp_path):
    target = tiny_target(dtype=torch.float32)
    with torch.no_grad():
        target.model.embed_tokens.weight[documents()[3].input_ids[2]] *= 1e6
    with pytest.raises(ValueError, match=r"'d\d'.*float16.*another dtype"):
        write(tmp_path / "cache", made_by=OnlineFeatures(target, [0]), dtype="float16")


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="bfloat16, float16, float32, got 'int8'"):
        write(tmp_path / "cache", dtype="int8")
    with pytest.raises(ValueError, match="same id"):
        write(tmp_path / "cache", documents_=documents(3) * 2)
