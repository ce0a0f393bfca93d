"""`dflash check`."""

import argparse

from dflash.commands.shared import add_decoding, add_models, check_models


def add(commands) -> None:
    check = commands.add_parser(
        "check",
        help="say whether a drafter and a target belong together",
        description="Check a target and its drafter, and print what was checked and resolved, and what Transformers "
        "makes of the drafter without this library. With --probe, also decode greedily and compare every token with "
        "one-by-one decoding. With --draft alone only the drafter is checked.",
        epilog="exit codes: 0 fine, 1 the pair cannot work or failed to load, 2 wrong usage, 3 --probe found a "
        "difference that rounding does not explain, 130 interrupted",
    )
    add_models(check)
    probe = add_decoding(check, max_new_tokens=64)
    probe.add_argument("--probe", action="store_true", help="decode a few prompts: acceptance and margins")
    probe.add_argument("--prompts", metavar="FILE.jsonl", help="its prompts: key `prompt`, or the first of `turns`")
    check.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    check_models(arguments, parser, draft_alone=True)
    if arguments["probe"] and not (arguments["target"] or arguments["demo"]):
        parser.error("--probe decodes with the target; give --target too")
    if arguments["prompts"] and not arguments["probe"]:
        parser.error("--prompts are decoded by --probe; give both")
    from dflash import check

    return check.run(check.CheckOptions(**arguments))
