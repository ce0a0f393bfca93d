"""The command line, on a tiny pair with a tokenizer of its own."""

import io
import json

import pytest
import torch

from dflash import cli
from tiny import plain, tiny_target


def run(capsys, *arguments):
    code = cli.main(["generate", *arguments])
    return code, *capsys.readouterr()


def expected(prompt, new):
    target = tiny_target(dtype=torch.float32)
    ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
    return " ".join(f"w{i}" for i in plain(target, ids, new)[0, ids.shape[1] :].tolist())


def test_text_then_one_summary_line(pair, capsys):
    code, out, err = run(capsys, *pair, "w5 w6", "--max-new-tokens", "16", "--compare")
    text, summary = out.strip().rsplit("\n", 1)
    assert code == 0 and text.strip() == expected("w1 w5 w6 w2", 16)
    assert "16 tokens in" in summary and "tau" in summary and "identical" in summary
    assert "loading target" in err


def test_json(pair, capsys):
    code, out, _ = run(capsys, *pair, "w5 w6", "--max-new-tokens", "9", "--json", "--compare")
    report = json.loads(out)
    assert code == 0 and report["text"] == expected("w1 w5 w6 w2", 9)
    assert report["new_tokens"] == 9 and report["identical"] is True and report["tau"] >= 1
    assert report["prompt_tokens"] == 4 and report["plain_tokens_per_second"] > 0


def test_prompt_from_standard_input_and_raw(pair, capsys, monkeypatch):
    for arguments in (["-"], []):
        monkeypatch.setattr("sys.stdin", io.StringIO("w7 w8"))
        code, out, _ = run(capsys, *pair, *arguments, "--raw", "--max-new-tokens", "5")
        assert code == 0 and out.strip().splitlines()[0].strip() == expected("w7 w8", 5)


def test_sampling_is_seeded(pair, capsys):
    options = ["w3", "--temperature", "1.0", "--top-p", "0.9", "--seed", "4", "--json", "--max-new-tokens", "12"]
    texts = [json.loads(run(capsys, *pair, *options)[1])["text"] for _ in range(2)]
    assert texts[0] == texts[1]


def test_a_difference_is_an_exit_code(pair, capsys, monkeypatch):
    monkeypatch.setattr("dflash.generate.decode_plain", lambda *_: (torch.zeros(1, 9), 1.0))
    code, out, err = run(capsys, *pair, "w3", "--max-new-tokens", "3", "--compare")
    assert code == 3 and "DIFFER" in out and "float32" in err


WRONG = [
    ([], "--target and --draft"),
    (["--demo", "--target", "x", "w"], "--demo"),
    (["--target", "x", "w"], "belong together"),
    (["--demo", "  "], "empty"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=str)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["generate", *arguments])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_failures_are_one_line(pair, capsys, tmp_path):
    code, _, err = run(capsys, "--target", str(tmp_path / "none"), "--draft", "x", "w1")
    assert code == 1 and "dflash: error:" in err and "Traceback" not in err
    code, _, err = run(capsys, *pair[:2], "--draft", pair[1], "w1", "--device", "cpu")
    assert code == 1 and "dflash: error:" in err and "LlamaForCausalLM" in err
    code, _, err = run(capsys, *pair, "w1", "--max-new-tokens", "0")
    assert code == 1 and "max_new_tokens=0" in err
