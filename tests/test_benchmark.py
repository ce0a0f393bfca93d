"""`dflash eval`: domains, temperatures, conversations, and what the JSON holds."""

import json

import pytest
import torch

from dflash import benchmark, cli
from dflash.modeling.pairing_dflash import weights_hash
from dflash.prompts import read_prompts
from tiny import VOCAB, plain, tiny_drafter, tiny_target


@pytest.fixture
def files(tmp_path):
    (tmp_path / "math.jsonl").write_text('{"id": "m0", "prompt": "w5 w6"}\n{"id": "m1", "turns": ["w7 w8 w9"]}\n')
    (tmp_path / "chat.jsonl").write_text('{"id": "c0", "turns": ["w3", "w4 w5"]}\n{"prompt": "w11"}\n')
    return [str(tmp_path / "math.jsonl"), f"talk={tmp_path / 'chat.jsonl'}"]


def run(capsys, *arguments):
    code = cli.main(["eval", *arguments])
    return code, *capsys.readouterr()


def test_every_domain_at_every_temperature(pair, files, capsys, tmp_path):
    options = ["--temperatures", "0,1", "--seeds", "0,7", "--max-new-tokens", "12", "--compare"]
    code, out, _ = run(capsys, *files, *pair, *options, "--json", "--output", str(tmp_path / "r.json"))
    report = json.loads(out)
    assert code == 0 and report == json.loads((tmp_path / "r.json").read_text())
    found = {(result["domain"], result["temperature"]): result for result in report["results"]}
    assert list(found) == [(name, t) for t in (0.0, 1.0) for name in ("math", "talk", "all")]
    assert [result["texts"] for result in report["results"]] == [2, 3, 5, 4, 6, 10]  # a turn is a text; two seeds
    for result in report["results"]:
        assert result["new_tokens"] == 12 * result["texts"] and len(result["acceptance"]) == 7
        assert result["tau"] == pytest.approx(11 * result["texts"] / result["rounds"]) and result["speedup"] > 0
    assert found["all", 0.0]["identical"] == 5 and found["all", 1.0]["identical"] == found["all", 0.0]["different"] == 0
    assert len(report["texts"]) == 15 and {"prompt": "c0", "turn": 1, "seed": 7}.items() <= report["texts"][-2].items()


def test_the_report_says_what_was_measured(pair, files, capsys):
    _, out, _ = run(capsys, files[0], *pair, "--json", "--max-new-tokens", "4", "--limit", "1", "--system", "w2")
    report = json.loads(out)
    assert report["target"]["weights_hash"] == weights_hash(tiny_target())
    assert report["drafter"]["weights_hash"] == weights_hash(tiny_drafter())
    assert report["target"]["dtype"] == "float32" and report["drafter"]["target_layer_ids"] == [0, 2, 3]
    assert report["settings"]["limit"] == 1 and report["settings"]["system"] == "w2"
    assert report["versions"]["torch"] == torch.__version__ and report["machine"]["threads"] >= 1
    assert len(report["texts"]) == 1 and sum(report["texts"][0]["emitted"]) == 3


def test_text(pair, files, capsys):
    code, out, err = run(capsys, *files, *pair, "--max-new-tokens", "5")
    assert code == 0 and [line.split(",")[0] for line in out.splitlines()] == ["math", "talk", "all"]
    assert "temperature 0: tau" in out and "loading target" in err and "plain" not in out


def test_a_conversation_goes_on_with_the_answers(pair, files):
    """Each turn is decoded after the answers before it, as `generate` gives them."""
    target, draft, tokenizer = benchmark.load(options_of(pair, files))
    prompt = read_prompts(files[1].partition("=")[2])[0]
    answers = benchmark.converse(
        draft, target, tokenizer, prompt, options_of(pair, files).decoding, 0, options_of(pair, files)
    )
    first = plain(target, torch.tensor([[1, 3, 2]]), 6)[0, 3:].tolist()
    second = plain(target, torch.tensor([[1, 3, 2, 1, *first, 2, 1, 4, 5, 2]]), 6)[0, -6:].tolist()
    assert [answer.tokens for answer in answers] == [first, second] and max(first) < VOCAB


def options_of(pair, files):
    named = dict(zip(("target", "draft", "device"), pair[1::2], strict=True))
    return benchmark.BenchmarkOptions(
        **named, prompts=files, temperatures=[0.0], seeds=[0], template={}, max_new_tokens=6
    )


def test_other_tokens_are_an_exit_code(pair, files, capsys, monkeypatch):
    monkeypatch.setattr("dflash.evaluation.decode_plain", lambda *_: (torch.zeros(1, 9, dtype=torch.long), 1.0))
    options = ["--max-new-tokens", "3", "--compare"]
    code, out, err = run(capsys, *files, *pair, *options)
    assert code == 3 and "0 of 5 texts identical" in out and "m0" in err and "report" in err
    code, _, err = run(capsys, *files, *pair, *options, "--dtype", "bfloat16")
    assert code == 0 and "tie" in err


def test_raw_prompts(pair, files, capsys):
    code, out, _ = run(capsys, files[0], *pair, "--raw", "--json", "--max-new-tokens", "3")
    assert code == 0 and json.loads(out)["results"][0]["texts"] == 2
    code, _, err = run(capsys, *files, *pair, "--raw", "--max-new-tokens", "3")
    assert code == 1 and "several turns" in err


def test_wrong_usage(pair, files, capsys, tmp_path):
    for arguments in (["--temperatures", "x"], ["--template", "3"], ["--template", "{"]):
        with pytest.raises(SystemExit):
            cli.main(["eval", *files, *pair, *arguments])
    code, _, err = run(capsys, files[0], files[0], *pair)
    assert code == 1 and "'math' is there twice" in err
    code, _, err = run(capsys, str(tmp_path / "none.jsonl"), *pair)
    assert code == 1 and "none.jsonl" in err
