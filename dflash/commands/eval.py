"""`dflash eval`."""

import argparse

from dflash.commands.shared import CONFIDENCE, add_decoding, add_models, add_template, check_models


def add(commands) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="measure how much a drafter gains on held-out prompts",
        description="Decode every prompt of one or more JSONL files with a target and its drafter. Gives tau (tokens "
        "per round), acceptance by slot and speed for each file and for all, at each temperature.",
        epilog="exit codes: 0 done, 1 failed, 2 wrong usage, 3 --compare found other greedy tokens in float32, "
        "130 interrupted",
    )
    evaluate.add_argument(
        "prompts",
        nargs="+",
        metavar="[NAME=]FILE.jsonl",
        help="rows with `prompt`, `turns` or `messages`; each file is a domain",
    )
    add_models(evaluate)
    decoding = add_decoding(evaluate, max_new_tokens=256)
    decoding.add_argument("--temperatures", type=number_list(float), default=[0.0], help="as in 0,1; default: 0")
    decoding.add_argument("--seeds", type=number_list(int), default=[0], help="as in 0,1,2; each samples every prompt")
    decoding.add_argument("--limit", type=int, help="use the first prompts of each file only")
    decoding.add_argument("--top-k", type=int)
    decoding.add_argument("--top-p", type=float)
    decoding.add_argument("--min-p", type=float)
    decoding.add_argument("--draft-temperature", type=float, default=0.0, help="0: propose the most likely tokens")
    decoding.add_argument("--draft-confidence", type=float, default=0.0, help=CONFIDENCE)
    add_template(decoding)
    output = evaluate.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="also decode without the drafter: speed and identity")
    output.add_argument("--output", metavar="FILE.json", help="write everything there")
    output.add_argument("--json", action="store_true", help="print everything as one JSON object instead of text")


def number_list(kind):
    """A parser of numbers with commas between them."""

    def numbers(text: str) -> list:
        return [kind(item) for item in text.split(",")]

    return numbers


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    check_models(arguments, parser)
    from dflash import benchmark

    return benchmark.run(benchmark.BenchmarkOptions(**arguments))
