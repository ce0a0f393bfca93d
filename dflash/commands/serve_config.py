"""`dflash serve-config`."""

import argparse
import json
import sys
from dataclasses import asdict

ENGINES = ("vllm", "sglang", "trtllm")


def add(commands) -> None:
    parser = commands.add_parser(
        "serve-config",
        help="print a drafter's settings for vLLM, SGLang and TensorRT-LLM",
        description="Print the exact settings with which an engine serves a drafter. With --engine, standard output "
        "has the settings alone: JSON for vLLM's --speculative-config and TensorRT-LLM's DFlashDecodingConfig, flags "
        "for SGLang; what else to know goes to standard error.",
        epilog="exit codes: 0 fine, 1 the engine cannot run this drafter, or it was not found, 2 wrong usage",
    )
    parser.add_argument("draft", help="folder, name in `dflash list`, or Hub repository of the drafter")
    parser.add_argument("--target", help="folder or Hub repository of the target; default: as `dflash list` says")
    parser.add_argument("--engine", choices=ENGINES, help="default: all three")
    parser.add_argument("--draft-revision", help="revision of the drafter's repository")
    parser.add_argument("--json", action="store_true", help="one JSON object, with notes, warnings and problems")


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    from dflash import serving

    drafter = serving.read_drafter(arguments["draft"], arguments["draft_revision"], arguments["target"])
    engines = [arguments["engine"]] if arguments["engine"] else list(ENGINES)
    found = [serving.ENGINES[engine](drafter) for engine in engines]
    if arguments["json"]:
        print(json.dumps({plan.engine: asdict(plan) for plan in found}, indent=2))
    elif arguments["engine"]:
        print_settings(found[0], drafter)
    else:
        print("\n\n".join(text(plan) for plan in found))
        say_origin(drafter)
    return int(bool(arguments["engine"]) and bool(found[0].problems))


def print_settings(plan, drafter) -> None:
    """The settings on standard output, unless the engine cannot run the drafter; the rest on standard error."""
    from dflash.serving import flags

    if not plan.problems:
        print(flags(plan.settings) if plan.engine == "sglang" else json.dumps(plan.settings))
    print("\n".join(remarks(plan)), file=sys.stderr)
    say_origin(drafter)


def text(plan) -> str:
    lines = [f"# {plan.engine}", *(f"# {remark}" for remark in remarks(plan))]
    return "\n".join(lines if plan.problems else [*lines, plan.command])


def remarks(plan) -> list[str]:
    problems = [f"cannot serve this drafter: {problem}" for problem in plan.problems]
    return [*problems, *(f"warning: {warning}" for warning in plan.warnings), *([] if problems else plan.notes)]


def say_origin(drafter) -> None:
    """A drafter that was only named is served from its repository, whose config.json nobody has read here."""
    if drafter.entry is not None:
        known = f"{drafter.entry.name} in `dflash list` ({drafter.entry.source['status']})"
        published = f"{drafter.name}, revision {drafter.revision or 'not known'}"
        print(f"these follow from the config of {known}; engines read that of {published}", file=sys.stderr)
