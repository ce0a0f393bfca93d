"""What is compared between our rounds and vLLM's, and the file that keeps the result. Needs neither of them."""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path


@dataclass(frozen=True)
class Rounds:
    """One prompt's decoding: its T tokens, and per round the draft tokens [B-1] and how many of them were accepted."""

    tokens: list[int]
    drafts: list[list[int]]
    accepted: list[int]


@dataclass(frozen=True)
class Check:
    """One question, its answer, and the figures behind it."""

    name: str
    passed: bool
    figures: dict = field(default_factory=dict)


def judge_case(ours: list[Rounds], plain: list[list[int]], served: dict) -> list[Check]:
    """Everything that has to hold for a drafter that both sides loaded from the same folder.

    Args:
        ours: this library's rounds of each prompt.
        plain: the tokens that vLLM gives without a drafter.
        served: what vLLM gives with it: `error`, or `tokens` one prompt at a time, `batched` all at once, `drafts`
            per prompt and step, and `counters` (see `counters_of`).
    """
    if "error" in served:
        return [Check("loads", False, {"error": served["error"]})]
    expected = counters_of(ours)
    rejected = expected["draft_tokens"] - expected["accepted"]
    return [
        Check("loads", True),
        _texts("tokens equal plain serving", plain, served["tokens"]),
        _texts("tokens of a batch equal plain serving", plain, served["batched"]),
        _texts("tokens equal ours", [rounds.tokens for rounds in ours], served["tokens"]),
        _drafts("draft tokens equal ours", ours, served, want_equal=True),
        Check(
            "tau from the counters equals ours",
            served["counters"] == expected,
            {"tau": tau(served["counters"]), "our_tau": tau(expected), **served["counters"]},
        ),
        Check("the comparison could fail", expected["accepted"] > 0 and rejected > 0, {"rejected": rejected}),
    ]


def judge_control(ours: list[Rounds], plain: list[list[int]], served: dict) -> list[Check]:
    """What has to hold for a damaged copy of the drafter that made `ours`: other drafts, and yet the same text."""
    if "error" in served:
        return [Check("loads", False, {"error": served["error"]})]
    return [
        _texts("tokens equal plain serving", plain, served["tokens"]),
        _drafts("draft tokens differ from the undamaged", ours, served, want_equal=False),
    ]


def _texts(name: str, expected: list[list[int]], found: list[list[int]]) -> Check:
    equal = sum(left == right for left, right in zip_longest(expected, found))
    figures = {"texts": len(expected), "equal": equal, "tokens": sum(map(len, expected))}
    return Check(name, expected == found and len(expected) > 0, figures)


def _drafts(name: str, ours: list[Rounds], served: dict, want_equal: bool) -> Check:
    figures = compare_drafts([rounds.drafts for rounds in ours], served["drafts"])
    equal = figures["rounds"] == figures["equal_rounds"] > 0
    return Check(name, equal == want_equal, figures)


def compare_drafts(ours: list[list[list[int]]], served: list[list[list[int]]]) -> dict:
    """Counts equal rounds and equal tokens; both lists are [prompts][rounds][draft tokens].

    vLLM drafts once more after a text's last token, which nothing verifies: one more round per prompt is left out.
    Any other round that only one side has counts as unequal. Rounds are compared by their number, so that those after
    a first difference may begin at another place of the text, and are equal by chance only.
    """
    figures = dict.fromkeys(("rounds", "equal_rounds", "draft_tokens", "equal_draft_tokens"), 0)
    for left, right in zip_longest(ours, served, fillvalue=[]):
        right = right[:-1] if len(right) == len(left) + 1 else right
        for mine, theirs in zip_longest(left, right, fillvalue=[]):
            pairs = list(zip_longest(mine, theirs))
            figures["rounds"] += 1
            figures["equal_rounds"] += mine == theirs
            figures["draft_tokens"] += len(pairs)
            figures["equal_draft_tokens"] += sum(first == second for first, second in pairs)
    return figures


def counters_of(rounds: list[Rounds]) -> dict:
    """What vLLM's counters have to say of these rounds."""
    accepted = [count for prompt in rounds for count in prompt.accepted]
    drafts = [draft for prompt in rounds for draft in prompt.drafts]
    slots = max(map(len, drafts), default=0)
    return {
        "rounds": len(drafts),
        "draft_tokens": sum(map(len, drafts)),
        "accepted": sum(accepted),
        "accepted_per_slot": [sum(count > slot for count in accepted) for slot in range(slots)],
    }


def tau(counters: dict) -> float | None:
    """Mean tokens per round."""
    return 1 + counters["accepted"] / counters["rounds"] if counters["rounds"] else None


def report(name: str, checks: list[Check]) -> dict:
    """A case as it stands in the result file."""
    return {"name": name, "passed": passed(checks), "checks": [asdict(check) for check in checks]}


def passed(checks: list[Check]) -> bool:
    """Whether all hold; none at all is a failure."""
    return bool(checks) and all(check.passed for check in checks)


def write_result(path: Path, result: dict) -> None:
    """Writes the result file in one step: an interruption leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.new")
    try:
        staged.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def machine(cpuinfo: str | None = None, cores: int | None = None) -> str:
    """The processor in words, as /proc/cpuinfo has it: "2-core AMD EPYC (AVX2), Linux"."""
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text(encoding="utf-8") if path.exists() else ""
    facts = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = facts.get("flags", "").split()
    known = [("amx_tile", "AMX"), ("avx512f", "AVX512"), ("avx2", "AVX2")]
    instructions = next((name for flag, name in known if flag in flags), "no AVX2")
    name = facts.get("model name") or platform.machine()
    return f"{cores or os.cpu_count()}-core {name} ({instructions}), {platform.system()}"
