"""`dflash data`."""

import argparse

from dflash.commands.shared import add_target, add_template, check_target


def add(commands) -> None:
    data = commands.add_parser(
        "data",
        help="make training data: a target's own answers to prompts",
        description="Let a target answer prompts, in this process or on a server, and write its tokens with a loss "
        "mask. A run that was interrupted goes on where it stopped.",
    )
    data.add_argument(
        "prompts",
        nargs="+",
        metavar="FILE.jsonl",
        help="rows with `prompt`, `turns` or `messages`; or hub:REPOSITORY, a dataset of the Hub",
    )
    data.add_argument("--output", required=True, metavar="FILE.jsonl", help="where to write; of an earlier run: go on")
    data.add_argument("--split", default="train", help="of a dataset of the Hub; default: train")
    data.add_argument("--column", help="column that holds the prompt, if it is none of the above")
    data.add_argument("--limit", type=int, help="use the first prompts only")
    data.add_argument("--drop-truncated", action="store_true", help="leave out texts that ended by --max-new-tokens")
    add_target(data)
    answers = data.add_argument_group("answers: as the target will be served")
    answers.add_argument("--keep-answers", action="store_true", help="keep those in `messages`; they are the target's")
    answers.add_argument("--server", metavar="URL", help="OpenAI-compatible, as http://localhost:8000/v1")
    answers.add_argument("--server-model", help="the target's name there; default: the only one")
    answers.add_argument("--rows", type=int, default=32, help="texts at a time; default: 32")
    answers.add_argument("--max-new-tokens", type=int, default=1024, help="of an answer; default: 1024")
    answers.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    answers.add_argument("--top-k", type=int)
    answers.add_argument("--top-p", type=float)
    answers.add_argument("--min-p", type=float)
    answers.add_argument("--seed", type=int, default=0)
    answers.add_argument("--system", help="system message")
    add_template(answers)


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    check_target(arguments, parser)
    if arguments["server"] and arguments["keep_answers"]:
        parser.error("--server gives new answers and --keep-answers keeps old ones; give one of them")
    from dflash import data

    return data.run(data.DataOptions(**arguments))
