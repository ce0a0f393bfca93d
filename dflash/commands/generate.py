"""`dflash generate`."""

import argparse
import sys

from dflash.commands.shared import CONFIDENCE, add_decoding, add_models, check_models


def add(commands) -> None:
    generate = commands.add_parser(
        "generate",
        help="decode one prompt",
        description="Decode one prompt with a target and its drafter. Text goes to standard output as it is accepted, "
        "then one summary line; progress goes to standard error.",
        epilog="exit codes: 0 done, 1 failed, 2 wrong usage, 3 --compare found other tokens, 130 interrupted",
    )
    generate.add_argument("prompt", nargs="?", help="the prompt; '-' or none: read standard input")
    add_models(generate)
    decoding = add_decoding(generate, max_new_tokens=256)
    decoding.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    decoding.add_argument("--top-k", type=int)
    decoding.add_argument("--top-p", type=float)
    decoding.add_argument("--min-p", type=float)
    decoding.add_argument("--draft-temperature", type=float, default=0.0, help="0: propose the most likely tokens")
    decoding.add_argument("--draft-confidence", type=float, default=0.0, help=CONFIDENCE)
    decoding.add_argument("--seed", type=int, help="seed of the sampling")
    output = generate.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="also decode without the drafter: speed and identity")
    output.add_argument("--json", action="store_true", help="one JSON object instead of text and summary")


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    check_models(arguments, parser)
    arguments["prompt"] = read_prompt(arguments["prompt"], parser)
    from dflash import generate

    return generate.run(generate.GenerateOptions(**arguments))


def read_prompt(prompt: str | None, parser: argparse.ArgumentParser) -> str:
    if prompt in (None, "-"):
        if prompt is None and sys.stdin.isatty():
            parser.error("no prompt; give one, or '-' to read standard input")
        prompt = sys.stdin.read()
    if not prompt.strip():
        parser.error("the prompt is empty")
    return prompt
