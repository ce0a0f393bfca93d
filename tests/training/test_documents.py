"""Reading documents: nothing is lost in silence, and nothing corrupt is trained on."""

import json

import pytest
import torch

from dflash.training.documents import Document, format_document, parse_document, read_documents, read_sidecar, sidecar


def row(id="a", input_ids=(1, 2, 3), loss_mask=(0, 1, 1), **extra):
    return json.dumps({"id": id, "input_ids": list(input_ids), "loss_mask": list(loss_mask), **extra})


def read(tmp_path, *lines, **options):
    path, said = tmp_path / "documents.jsonl", []
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_documents(path, report=said.append, **options), said


def test_rows_are_read_as_they_are(tmp_path):
    documents, said = read(tmp_path, row(), "", row("b", [4, 5], [False, True], category="math"), row(7, [9], [1]))
    assert [document.id for document in documents] == ["a", "b", "7"] and said == []
    assert documents[1].input_ids.tolist() == [4, 5] and documents[1].loss_mask.tolist() == [False, True]
    assert documents[0].input_ids.dtype == torch.long and documents[0].loss_mask.dtype == torch.bool
    assert len(documents[0]) == 3


CORRUPT = [
    ('{"id": "a", "input_ids": [1, 2', "not JSON"),
    ("[1, 2]", "no id"),
    (json.dumps({"input_ids": [1], "loss_mask": [1]}), "no id"),
    (row(input_ids=[], loss_mask=[]), "input_ids"),
    (row(input_ids=[1, -2, 3]), "input_ids"),
    (row(input_ids=[1, 2.0, 3]), "input_ids"),
    (row(input_ids=[1, True, 3]), "input_ids"),
    (row(loss_mask=[0, 2, 1]), "0 and 1"),
    (row(loss_mask=[0, None, 1]), "0 and 1"),
    (row(loss_mask=[0, 1]), "3 input_ids but 2"),
    (row(input_ids=[1, 2, 61]), "token 61 .* 61"),
]


@pytest.mark.parametrize(("line", "message"), CORRUPT)
def test_corrupt_rows(line, message):
    with pytest.raises(ValueError, match=message):
        parse_document(line, vocab_size=61)


def test_corrupt_lines_are_named_by_number(tmp_path):
    documents, said = read(tmp_path, row("a"), "{", "", row("b", [3]), row("c", [5, 6, 7]), '{"id": "d", "inp')
    assert [document.id for document in documents] == ["a", "c"]
    assert len(said) == 1 and "3 corrupt" in said[0]
    assert all(f"line {number} " in said[0] for number in (2, 4, 6))


def test_bytes_that_are_not_text_are_a_corrupt_line(tmp_path):
    path, said = tmp_path / "documents.jsonl", []
    path.write_bytes(row("a").encode() + b"\n\xff\xfe{\n" + row("b", [8, 9, 10]).encode())
    assert len(read_documents(path, report=said.append)) == 2 and "line 2" in said[0]


def test_many_corrupt_lines_are_counted(tmp_path):
    _, said = read(tmp_path, *["x"] * 50, row())
    assert "50 corrupt" in said[0] and "line 20 " in said[0] and "30 more" in said[0]


def test_duplicates_are_dropped_and_counted(tmp_path):
    documents, said = read(tmp_path, row("a"), row("b"), row("a"), row("a", [5, 6, 7]))
    assert [document.id for document in documents] == ["a"]
    assert "2 duplicates" in said[1] and "line 4 (id 'a' has other tokens in line 1)" in said[0]


def test_a_file_without_documents(tmp_path):
    with pytest.raises(ValueError, match="no document: 1 corrupt"):
        read(tmp_path, "{", "")
    with pytest.raises(FileNotFoundError):
        read_documents(tmp_path / "none.jsonl")


def test_limit(tmp_path):
    documents, said = read(tmp_path, row("a"), row("b", [4, 5, 6]), "{", limit=2)
    assert len(documents) == 2 and said == []


def test_round_trip(tmp_path):
    document = Document("x/1", torch.tensor([5, 6, 7]), torch.tensor([False, True, True]))
    line = format_document(document, finish_reason="stop")
    assert "\n" not in line and json.loads(line)["finish_reason"] == "stop"
    again = parse_document(line)
    assert again.id == "x/1" and again.input_ids.tolist() == [5, 6, 7]
    assert again.loss_mask.tolist() == [False, True, True]


def test_sidecar(tmp_path):
    assert read_sidecar(tmp_path / "d.jsonl") is None
    sidecar(tmp_path / "d.jsonl").write_text('{"thinking_mode": "off"}')
    assert read_sidecar(tmp_path / "d.jsonl") == {"thinking_mode": "off"}
    assert sidecar(tmp_path / "d.jsonl").name == "d.jsonl.meta.json"
