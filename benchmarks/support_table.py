"""Which families of targets decode exactly, and which are refused: a Markdown table, made by decoding with each.

    python benchmarks/support_table.py [--write README.md]

Every family of the tests is built tiny and random in float64, and decoded with a drafter that follows a script of
right and wrong tokens; the tokens must be those of plain `generate`. `--write` replaces the table between the two
markers of a file. It has a column for the oldest supported transformers and one for the newest: a run fills its own
column and keeps the other.
"""

import argparse
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from dflash.modeling.rollback_dflash import keeps_keys, keeps_state, states_of

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from test_target_families import assert_exact, prompt_ids  # noqa: E402

from families import FAMILIES, REFUSED, WINDOW, build_target, exists  # noqa: E402

BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
ABSENT = "not in this version"
_KINDS = ("full", "sliding", "latent (MLA)", "recurrent", "convolution")  # in the order they are listed
_FIRST = ("family", "its cache keeps")


@dataclass(frozen=True)
class Row:
    """One family under one version of transformers."""

    family: str
    keeps: str
    verdict: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", type=Path, help="replace the table in this file")
    arguments = parser.parse_args()
    if not __debug__:
        parser.error("run it without -O: what is checked here are assertions")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = [judge(family) for family in [*FAMILIES, *REFUSED] if exists(family)]
    version = transformers.__version__
    if arguments.write:
        text = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(write(text, version, rows, oldest_supported()), encoding="utf-8")
    else:
        print(table(columns(version, rows)))


def judge(family: str) -> Row:
    """Builds the family's target and tries it."""
    target = build_target(family)
    ids = prompt_ids(2 * WINDOW, seed=0)
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2, return_dict_in_generate=True
    )
    cache = output["cache"] if "cache" in output else output["past_key_values"]  # the name changed with 5.24
    return Row(family, keeps(cache), verdict_of(target))


def keeps(cache) -> str:
    """What a used cache keeps, seen in its layers; a cache or a layer of an unknown class is named by that."""
    if type(cache) is not DynamicCache:
        return type(cache).__name__
    kinds = {kind for layer in cache.layers for kind in (_keys_of(layer), _state_of(layer)) if kind}
    return " + ".join([kind for kind in _KINDS if kind in kinds] + sorted(kinds - set(_KINDS)))


def _keys_of(layer) -> str | None:
    if not keeps_keys(layer):
        return None
    if type(layer) is DynamicSlidingWindowLayer:
        return "sliding"
    if type(layer) is not DynamicLayer and not keeps_state(layer):
        return type(layer).__name__
    # Multi-head latent attention shares one head, whose values are the keys without their rotated part.
    latent = layer.keys.shape[1] == 1 and layer.keys.shape[-1] != layer.values.shape[-1]
    return "latent (MLA)" if latent else "full"


def _state_of(layer) -> str | None:
    if not keeps_state(layer):
        return None
    kinds = {kind for kind, _ in states_of(layer)}
    return "recurrent" if "recurrent_states" in kinds else "convolution"


def verdict_of(target) -> str:
    """Decodes with the scripted drafter: "exact", "refused" and the first clause of why, or "WRONG TOKENS"."""
    try:
        for length in (WINDOW, 21):
            assert_exact(target, length)
    except ValueError as error:
        clause = re.split(r"[:;,] (?![^(]*\))", str(error))[0]
        return f"refused: {clause.removeprefix(type(target).__name__).lstrip(' .')}"
    except AssertionError:
        return "WRONG TOKENS"
    return "exact"


def oldest_supported() -> str:
    """Major and minor version of the oldest transformers that the project allows."""
    found = re.search(r'"transformers>=(\d+\.\d+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("pyproject.toml names no oldest transformers")
    return found[1]


def columns(version: str, rows: list[Row]) -> dict[str, dict[str, Row]]:
    """A table as rows by version and family."""
    return {version: {row.family: row for row in rows}}


def table(versions: dict[str, dict[str, Row]]) -> str:
    """The Markdown table; what a cache keeps is said by the newest version that knows the family."""
    ordered = sorted(versions, key=_number)
    names = [name for version in reversed(ordered) for name in versions[version]]
    lines = [_line([*_FIRST, *(f"transformers {version}" for version in ordered)])]
    lines.append("|---" * (len(_FIRST) + len(ordered)) + "|")
    for name in dict.fromkeys(names):
        known = [versions[version].get(name) for version in ordered]
        described = [row.keeps for row in known if row][-1]
        lines.append(_line([name, described, *(row.verdict if row else ABSENT for row in known)]))
    return "\n".join(lines)


def write(text: str, version: str, rows: list[Row], floor: str) -> str:
    """`text` with the table between its markers replaced; `floor` is the oldest version, as major.minor.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the file needs the lines {BEGIN!r} and {END!r} once each, in this order, around its table")
    before, rest = text.split(BEGIN)
    section, after = rest.split(END)
    is_floor = _is(version, floor)
    others = {other: kept for other, kept in parse(section).items() if _is(other, floor) != is_floor}
    return f"{before}{BEGIN}\n{table({**others, **columns(version, rows)})}\n{END}{after}"


def parse(section: str) -> dict[str, dict[str, Row]]:
    """The inverse of `table`."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.strip().splitlines()]
    lines = [[cell.strip().replace("\\|", "|") for cell in cells] for cells in lines]
    if not lines:
        return {}
    versions = [cell.removeprefix("transformers ") for cell in lines[0][len(_FIRST) :]]
    parsed = {version: {} for version in versions}
    for family, described, *verdicts in lines[2:]:
        for version, verdict in zip(versions, verdicts, strict=True):
            if verdict != ABSENT:
                parsed[version][family] = Row(family, described, verdict)
    return parsed


def _is(version: str, minor: str) -> bool:
    return version == minor or version.startswith(f"{minor}.")


def _number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _line(cells) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
