"""`dflash check`: the report, the probe, and telling rounding from bugs."""

import json

import pytest
import torch

from dflash import check, cli
from dflash.checkpoint import write_checkpoint
from tiny import DEPTH, MASK, tiny_drafter, tiny_prompt, tiny_target


def run(capsys, *arguments):
    code = cli.main(["check", *arguments])
    return code, *capsys.readouterr()


def test_text_report(pair, capsys):
    code, out, _ = run(capsys, *pair)
    assert code == 0 and "hidden_size 32 =" in out and "block_size: 8" in out
    assert f"warning: mask_token_id {MASK}" in out and "tau" not in out


def test_json_report(pair, capsys):
    code, out, _ = run(capsys, *pair, "--json")
    report = json.loads(out)
    assert code == 0 and report["works"] is True and report["probe"] is None
    assert report["pair"]["settings"]["block_size"] == 8 and len(report["pair"]["warnings"]) == 1
    assert {"name": "vocab_size", "drafter": 61, "target": 61}.items() <= report["pair"]["facts"][4].items()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_pair_that_cannot_work(pair, capsys, tmp_path, as_json):
    write_checkpoint(tiny_drafter(num_target_layers=DEPTH + 1), tmp_path / "draft")
    code, out, err = run(capsys, *pair, "--draft", str(tmp_path / "draft"), *["--json"] * as_json)
    assert code == 1
    if as_json:
        report = json.loads(out)
        assert report["works"] is False and "num_target_layers is 5" in report["error"]
    else:
        assert "dflash: error:" in err and "num_target_layers is 5" in err


def test_probe(pair, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w5 w6"}\n\n{"id": 1, "turns": ["w7 w9", "w8"]}\n')
    code, out, _ = run(capsys, *pair, "--probe", "--prompts", str(prompts), "--max-new-tokens", "20", "--json")
    probe = json.loads(out)["probe"]
    assert code == 0 and probe["prompts"] == 2 and probe["new_tokens"] == 40 and probe["disagreements"] == []
    assert probe["tau"] == pytest.approx(38 / probe["rounds"]) and probe["largest_difference"] < 1e-3
    assert len(probe["acceptance"]) == 7 and all(rate is None or 0 <= rate <= 1 for rate in probe["acceptance"])


def test_probe_counts_the_slots_that_propose(pair, capsys, tmp_path):
    write_checkpoint(tiny_drafter(dtype=torch.float32, sample_from_anchor=True), tmp_path / "draft")
    code, out, _ = run(capsys, *pair, "--draft", str(tmp_path / "draft"), "--probe", "--max-new-tokens", "20", "--json")
    report = json.loads(out)
    assert code == 0 and report["pair"]["settings"]["sample_from_anchor"] is True
    assert len(report["probe"]["acceptance"]) == 8 and report["probe"]["disagreements"] == []


def test_probe_with_the_prompts_of_the_library(pair, capsys):
    code, out, _ = run(capsys, *pair, "--probe", "--max-new-tokens", "5", "--block-size", "3")
    assert code == 0 and "tau" in out and f"of {5 * len(check.PROMPTS)} positions" in out and "slot 2" in out
    assert "slot 3" not in out


def test_a_bug_is_an_exit_code(pair, capsys, monkeypatch):
    """Without taking rejected tokens back the target reads them: what a wrong rollback looks like."""
    monkeypatch.setattr("dflash.modeling.rollback_dflash.crop_keys", lambda layer, count: None)
    code, out, err = run(capsys, *pair, "--probe", "--max-new-tokens", "24")
    assert code == 3 and "NOT ROUNDING" in out and "one by one" in out and "report" in err


def test_probe_follows_the_speculative_text():
    """Also after a difference: every position is judged on the same text."""
    target, draft, ids = tiny_target(), tiny_drafter(), tiny_prompt(6)
    text = check.decode_in_blocks(target, draft, ids, 30, None)
    assert len(text.tokens) == 30 and text.logits.argmax(-1).tolist() == text.tokens
    assert text.slots == [(count - 1, min(8, 29 - sum(text.emitted[:i])) - 1) for i, count in enumerate(text.emitted)]
    other = [(token + 1) % 61 for token in text.tokens]
    steps = check.decode_one_by_one(target, ids, other)
    with torch.no_grad():
        expected = target(torch.cat([ids, torch.tensor([other])], dim=1)).logits[0, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(steps, expected.float(), rtol=1e-4, atol=1e-4)


def test_acceptance_by_slot():
    assert check.acceptance_by_slot([(3, 3), (1, 3), (0, 1)], slots=4) == [2 / 3, 0.5, 0.5, None]


def test_a_round_that_reaches_a_stop_token_says_nothing_of_its_slots():
    target, draft, ids = tiny_target(), tiny_drafter(), tiny_prompt(6)
    tokens = check.decode_in_blocks(target, draft, ids, 30, None).tokens
    target.generation_config.eos_token_id = tokens[7]
    cut = check.decode_in_blocks(target, draft, ids, 30, None)
    assert cut.tokens == tokens[: tokens.index(tokens[7]) + 1]
    assert len(cut.slots) == len(cut.emitted) - 1


def test_margins_are_those_of_both_ways():
    block = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.75, 0.0], [0.0, 0.5, 2.0]])
    steps = torch.tensor([[1.0, 2.0, 0.0], [3.0, 3.125, 0.0], [3.0, 0.5, 2.0]])
    small, large = check.disagreements(0, block, steps, limit=0.5)
    assert (small.position, small.block_token, small.step_token) == (1, 0, 1)
    assert (small.block_margin, small.step_margin, small.large) == (0.25, 0.125, False)
    assert (large.position, large.block_token, large.step_token) == (2, 2, 0)
    assert (large.block_margin, large.step_margin, large.large) == (2.0, 1.0, True)


def test_the_limit_lies_between_rounding_and_bugs():
    assert 0.375 < check.large_margin(torch.bfloat16) == check.large_margin(torch.float16) < 0.6
    assert 2e-4 < check.large_margin(torch.float32) == check.large_margin(torch.float64) < 0.1


UNREADABLE = [
    ("{", "line 1"),
    ("[3]", r"\[3\]"),
    ('{"text": "a"}', "prompt.*turns"),
    ('{"turns": []}', "turns"),
    ('{"turns": "a"}', "turns"),
    ('{"prompt": 3}', "3"),
    ("", "no line"),
]


@pytest.mark.parametrize(("line", "message"), UNREADABLE)
def test_prompt_files_that_cannot_be_read(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        check.read_prompts(path)


def test_prompts_without_probe_are_wrong_usage(capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", "--demo", "--prompts", "x"])
    assert "--probe" in capsys.readouterr().err
