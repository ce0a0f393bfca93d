"""The comparisons that judge this library by vLLM, and the files around them; vLLM itself is not needed."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.vllm_judge import environment, pairs, served, verdict

OURS = [
    verdict.Rounds([1, 2, 3, 4, 5], [[2, 9, 9], [4, 5, 9]], [1, 2]),
    verdict.Rounds([7, 8, 9, 6, 6], [[8, 9, 6], [0, 0, 0]], [3, 0]),
]
PLAIN = [rounds.tokens for rounds in OURS]
COUNTERS = {"rounds": 4, "draft_tokens": 12, "accepted": 6, "accepted_per_slot": [3, 2, 1]}


def answer(**changes):
    """What a vLLM that agrees gives: it drafts once more after each text's end."""
    drafts = [[*rounds.drafts, [1, 1, 1]] for rounds in OURS]
    return {"tokens": PLAIN, "batched": PLAIN, "drafts": drafts, "counters": COUNTERS, **changes}


def failed(checks):
    return [check.name for check in checks if not check.passed]


def test_agreement_passes():
    checks = verdict.judge_case(OURS, PLAIN, answer())
    assert failed(checks) == [] and verdict.passed(checks)
    without_last = answer(drafts=[rounds.drafts for rounds in OURS])
    assert verdict.passed(verdict.judge_case(OURS, PLAIN, without_last))


WRONG_TEXT = [PLAIN[0], [*PLAIN[1][:-1], 5]]
TOKENS, BATCH, OUR_TOKENS = "tokens equal plain serving", "tokens of a batch equal plain serving", "tokens equal ours"
DRAFTS, TAU = "draft tokens equal ours", "tau from the counters equals ours"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": WRONG_TEXT}, [TOKENS, OUR_TOKENS]),
        ({"tokens": PLAIN[:1]}, [TOKENS, OUR_TOKENS]),
        ({"batched": WRONG_TEXT}, [BATCH]),
        ({"drafts": [OURS[0].drafts, [[8, 9, 6], [0, 0, 1]]]}, [DRAFTS]),
        ({"drafts": [OURS[0].drafts, [[8, 9, 6], [0, 0]]]}, [DRAFTS]),
        ({"drafts": [OURS[0].drafts]}, [DRAFTS]),
        ({"drafts": [OURS[0].drafts, OURS[1].drafts[:1]]}, [DRAFTS]),
        ({"drafts": [OURS[0].drafts, [*OURS[1].drafts, [1, 1, 1], [1, 1, 1]]]}, [DRAFTS]),
        ({"counters": {**COUNTERS, "accepted": 5}}, [TAU]),
        ({"counters": {**COUNTERS, "rounds": 5}}, [TAU]),
        ({"counters": {**COUNTERS, "accepted_per_slot": [3, 1, 2]}}, [TAU]),
        ({"error": "ValueError: no"}, ["loads"]),
    ],
)
def test_every_disagreement_fails_its_check(changes, expected):
    served_answer = {"error": changes["error"]} if "error" in changes else answer(**changes)
    assert failed(verdict.judge_case(OURS, PLAIN, served_answer)) == expected


@pytest.mark.parametrize("accepted", [[0, 0], [3, 3]])
def test_all_or_nothing_accepted_is_no_test(accepted):
    ours = [verdict.Rounds(rounds.tokens, rounds.drafts, accepted) for rounds in OURS]
    checks = verdict.judge_case(ours, PLAIN, answer(counters=verdict.counters_of(ours)))
    assert failed(checks) == ["the comparison could fail"]


def test_a_control_has_to_differ_in_drafts_and_not_in_text():
    other = answer(drafts=[[[2, 9, 8], [4, 5, 9]], OURS[1].drafts])
    assert verdict.passed(verdict.judge_control(OURS, PLAIN, other))
    assert failed(verdict.judge_control(OURS, PLAIN, answer())) == ["draft tokens differ from the undamaged"]
    assert failed(verdict.judge_control(OURS, PLAIN, {**other, "tokens": WRONG_TEXT})) == [TOKENS]
    assert failed(verdict.judge_control(OURS, PLAIN, {"error": "no"})) == ["loads"]


def test_nothing_served_is_no_agreement():
    empty = {"tokens": [], "batched": [], "drafts": [], "counters": verdict.counters_of([])}
    assert TOKENS in failed(verdict.judge_case([], [], empty)) and DRAFTS in failed(verdict.judge_case([], [], empty))
    assert not verdict.passed([])


def test_draft_figures():
    figures = verdict.compare_drafts([[[1, 2], [3, 4]]], [[[1, 2], [3, 9], [0, 0]]])
    assert figures == {"rounds": 2, "equal_rounds": 1, "draft_tokens": 4, "equal_draft_tokens": 3}


def test_counters_and_tau():
    assert verdict.counters_of(OURS) == COUNTERS
    assert verdict.tau(COUNTERS) == 2.5 and verdict.tau(verdict.counters_of([])) is None


def test_a_result_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results" / "judge.json"
    verdict.write_result(path, {"cases": [verdict.report("a", verdict.judge_case(OURS, PLAIN, answer()))]})
    before = path.read_text(encoding="utf-8")
    assert json.loads(before)["cases"][0]["passed"] is True
    with pytest.raises(TypeError):
        verdict.write_result(path, {"cases": {1, 2}})
    assert path.read_text(encoding="utf-8") == before and os.listdir(path.parent) == ["judge.json"]


def test_the_machine_in_words():
    cpuinfo = "processor : 0\nmodel name\t: Some CPU\nflags\t\t: sse avx2 avx512f\n\nprocessor : 1\n"
    assert verdict.machine(cpuinfo, cores=2).startswith("2-core Some CPU (AVX512), ")
    assert "(no AVX2)" in verdict.machine("", cores=1) and verdict.machine()


def test_both_sides_mark_answers_alike():
    assert environment.MARK == served.MARK


def fake_server(monkeypatch, tmp_path, body):
    script = tmp_path / "served.py"
    script.write_text(f"import json, sys, time, os\njobs = json.load(open(sys.argv[1]))\n{body}", encoding="utf-8")
    monkeypatch.setattr(environment, "SERVED", script)
    return environment.serve(Path(sys.executable), [{"name": "a"}], tmp_path)


def test_answers_are_told_from_noise(monkeypatch, tmp_path):
    body = 'print("noise"); print(\'@judge {"versions": {}}\'); print("@judge " + json.dumps(jobs[0]))'
    assert list(fake_server(monkeypatch, tmp_path, body)) == [{"versions": {}}, {"name": "a"}]


@pytest.mark.parametrize("end", ["", "; sys.exit(3)", "; print('@judge {}'); sys.exit(3)"])
def test_a_server_that_ends_early_is_an_error(monkeypatch, tmp_path, end):
    answers = fake_server(monkeypatch, tmp_path, f"print('@judge {{}}'); print('the reason'){end}")
    with pytest.raises(RuntimeError, match="the reason"):
        list(answers)


def test_an_interrupted_server_is_ended(monkeypatch, tmp_path):
    answers = fake_server(monkeypatch, tmp_path, "print('@judge %d' % os.getpid(), flush=True); time.sleep(60)")
    process = next(answers)
    os.kill(process, 0)
    begin = time.monotonic()
    answers.close()
    assert time.monotonic() - begin < 30
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_failed_installation_leaves_nothing(monkeypatch, tmp_path):
    folder = tmp_path / "venv"

    def install(command):
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_run", install)
    with pytest.raises(KeyboardInterrupt):
        environment.environment(folder)
    assert not folder.exists()


def test_a_folder_that_is_no_environment_is_refused_and_kept(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine").write_text("mine", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match="not a virtual environment"):
        environment.environment(tmp_path / "venv")
    assert (tmp_path / "venv" / "mine").exists()


PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target, and the folder of a drafter trained on it: an untrained one proposes the same token for ever."""
    target = pairs.tiny_target("llama")
    folder = tmp_path_factory.mktemp("judge") / "drafter"
    return target, pairs.write_drafter(folder, target, [PROMPT])


def decode(folder, target, new):
    return pairs.decode(pairs.RecordingDrafter.from_pretrained(folder), target, PROMPT, new, pairs.BLOCK)


def test_recorded_rounds_tell_the_text(pair):
    """The rounds that are kept are those that begin before the last token, and none of them is cut short."""
    target, folder = pair
    text = pairs.read(target, PROMPT)[0][len(PROMPT) :].tolist()
    for new in range(pairs.NEW - 3, pairs.NEW + 1):
        rounds = decode(folder, target, new)
        assert rounds.tokens == text[:new] and len(rounds.drafts) == len(rounds.accepted)
        place = 1
        for drafted, accepted in zip(rounds.drafts, rounds.accepted, strict=True):
            assert place < new and len(drafted) == pairs.BLOCK - 1
            right = [a == b for a, b in zip(drafted, text[place:], strict=False)]
            assert accepted == (right.index(False) if False in right else len(right))
            place += accepted + 1
        assert place >= new
        assert 0 < sum(rounds.accepted) < len(rounds.accepted) * (pairs.BLOCK - 1)


@pytest.mark.parametrize("damage", pairs.DAMAGES)
def test_damages_load_and_draft_otherwise(pair, tmp_path, damage):
    target, folder = pair
    whole, damaged = (
        decode(place, target, pairs.NEW) for place in (folder, pairs.write_damaged(folder, tmp_path / "copy", damage))
    )
    assert whole.tokens == damaged.tokens and whole.drafts != damaged.drafts
