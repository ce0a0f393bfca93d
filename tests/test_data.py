"""`dflash data`: from prompts to documents, resumed, and with a record of what made them."""

import json
import sys
import types

import pytest
import torch

from dflash import cli, data
from dflash.training.documents import read_documents, read_sidecar
from dflash.training.identity import differences, identify
from tiny import plain, tiny_target, word_tokenizer

PROMPTS = [{"id": f"p{i}", "prompt": f"w{5 + i} w{6 + i}"} for i in range(5)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target that stops now and then."""
    folder, model = tmp_path_factory.mktemp("target"), tiny_target(dtype=torch.float32)
    first = plain(model, torch.tensor([[1, 5, 6, 2]]), 8)[0, 4:].tolist()
    model.generation_config.eos_token_id = first[4]
    word_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def run(capsys, target, *arguments):
    code = cli.main(["data", "--target", str(target[0]), "--device", "cpu", *map(str, arguments)])
    return code, capsys.readouterr().err


def texts(path):
    return {document.id: document.input_ids.tolist() for document in read_documents(path)}


def expected(model, i, new=8):
    return plain(model, torch.tensor([[1, 5 + i, 6 + i, 2]]), new)[0].tolist()


def test_answers_are_the_targets(target, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    code, err = run(capsys, target, prompts, "--output", out, "--max-new-tokens", 8, "--rows", 2)
    assert code == 0 and "5/5" in err and "/s" in err
    assert texts(out) == {f"p{i}": expected(target[1], i) for i in range(5)}
    assert all(d.loss_mask.tolist() == [False] * 4 + [True] * (len(d) - 4) for d in read_documents(out))
    rows = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    stop = target[1].generation_config.eos_token_id
    assert all(row["finish_reason"] == ("stop" if row["input_ids"][-1] == stop else "length") for row in rows.values())
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}


def test_the_record_of_what_made_them(target, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    run(capsys, target, prompts, "--output", out, "--max-new-tokens", 2, "--system", "w9", "--template", '{"a": 1}')
    made = read_sidecar(out)
    assert differences(made, identify(target[1], word_tokenizer())) == []
    assert made["generation"] == {
        "max_new_tokens": 2,
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "seed": 0,
    }
    assert (made["system"], made["template"], made["thinking_mode"]) == ("w9", {"a": 1}, None)
    assert made["target_weights_hash"] and made["target_tokenizer_hash"] and made["target_chat_template_hash"]


def test_an_interrupted_run_goes_on(target, prompts, tmp_path, capsys):
    """Killed in the middle of a line: that line is removed, its prompt answered again, and the others are not."""
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run(capsys, target, prompts, "--output", whole, "--max-new-tokens", 8)
    run(capsys, target, prompts, "--output", out, "--max-new-tokens", 8, "--limit", 3)
    lines = out.read_text().splitlines(keepends=True)
    marked = lines[0].replace('"prompt"', '"mark":1,"prompt"')
    out.write_text(marked + lines[1] + lines[2][:20])
    code, err = run(capsys, target, prompts, "--output", out, "--max-new-tokens", 8)
    assert code == 0 and "incomplete" in err and "2 prompts are done, 3 are left" in err
    assert out.read_text().startswith(marked) and texts(out) == texts(whole)
    before = out.read_bytes()
    assert run(capsys, target, prompts, "--output", out, "--max-new-tokens", 8)[0] == 0 and out.read_bytes() == before


def test_another_file_is_left_alone(target, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    run(capsys, target, prompts, "--output", out, "--max-new-tokens", 2)
    before = out.read_bytes()
    code, err = run(capsys, target, prompts, "--output", out, "--max-new-tokens", 3)
    assert code == 1 and "generation was" in err and out.read_bytes() == before
    code, err = run(capsys, target, prompts, "--output", prompts)
    assert code == 1 and "without the record" in err and len(prompts.read_text().splitlines()) == 5


def test_truncated_answers_can_be_left_out(target, prompts, tmp_path, capsys):
    options = ["--max-new-tokens", 8, "--drop-truncated"]
    _, err = run(capsys, target, prompts, "--output", tmp_path / "out.jsonl", *options)
    stop = target[1].generation_config.eos_token_id
    kept = [f"p{i}" for i in range(5) if expected(target[1], i)[-1] == stop]
    assert sorted(texts(tmp_path / "out.jsonl")) == kept and f"left out {5 - len(kept)} conv" in err


def test_turns(target, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"id": "a", "turns": ["w5 w6", "w9"]}\n')
    run(capsys, target, tmp_path / "p.jsonl", "--output", tmp_path / "out.jsonl", "--max-new-tokens", 8)
    first = expected(target[1], 0)
    second = plain(target[1], torch.tensor([[1, 5, 6, 2, 1, *first[4:], 2, 1, 9, 2]]), 8)[0].tolist()
    assert first[-1] == target[1].generation_config.eos_token_id
    assert texts(tmp_path / "out.jsonl") == {"a/0": first, "a/1": second}  # a prompt lacks what begins an answer here


def test_prompts_are_used_once_and_problems_are_named():
    said = []
    rows = [
        ("f line 1", {"id": "a", "prompt": "x"}),
        ("f line 2", b"{"),
        ("f line 3", {"id": "b", "turns": ["x"]}),
        ("f line 4", {"id": "a", "prompt": "y"}),
        ("f line 5", {"text": "z"}),
        ("f line 6", b"[1]"),
    ]
    found = data.unique(rows, report=said.append)
    assert [id for id, _ in found] == ["a", "f line 4"]
    assert "3 prompts" in said[0] and all(f"line {i}" in said[0] for i in (2, 5, 6)) and "1 duplicate" in said[1]
    with pytest.raises(ValueError, match="no prompt"):
        data.unique([("f line 1", b"{")], report=said.append)
    assert data.unique([("r row 0", {"question": "q"})], 1, "question")[0][1]["prompt"] == "q"


def test_answers_that_are_kept(target, tmp_path, capsys):
    def row(id, text, **more):
        messages = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": text}]
        return json.dumps({"id": id, "messages": messages, **more})

    lines = [
        row("a", "w7 w8"),
        row("a2", "w7 w8"),
        row("b", "w7", finish_reason="length"),
        '{"id": "c", "prompt": "w1"}',
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    code, err = run(capsys, target, tmp_path / "p.jsonl", "--output", tmp_path / "out.jsonl", "--keep-answers")
    assert code == 0 and "c: has no messages" in err and "1 duplicate" in err
    assert read_sidecar(tmp_path / "out.jsonl")["answers"] == "kept"
    found = {d.id: (d.input_ids.tolist(), d.loss_mask.int().tolist()) for d in read_documents(tmp_path / "out.jsonl")}
    assert found == {"a": ([1, 5, 2, 1, 7, 8, 2], [0, 0, 0, 1, 1, 1, 1]), "b": ([1, 5, 2, 7], [0, 0, 0, 1])}


def test_a_dataset_of_the_hub(target, tmp_path, capsys, monkeypatch):
    def load_dataset(name, split, streaming):
        assert (name, split, streaming) == ("owner/set", "test", True)
        return [{"question": "w5 w6"}, {"question": "w6 w7"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    options = ["--split", "test", "--column", "question", "--output", tmp_path / "out.jsonl", "--max-new-tokens", 8]
    assert run(capsys, target, "hub:owner/set", *options)[0] == 0
    assert texts(tmp_path / "out.jsonl") == {f"owner/set row {i}": expected(target[1], i) for i in range(2)}
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, err = run(capsys, target, "hub:owner/set", "--output", tmp_path / "other.jsonl")
    assert code == 1 and "dflash-transformers[data]" in err


def test_wrong_usage(capsys):
    for arguments in (["x", "--output", "y"], ["x", "--output", "y", "--demo", "--server", "u", "--keep-answers"]):
        with pytest.raises(SystemExit):
            cli.main(["data", *arguments])
