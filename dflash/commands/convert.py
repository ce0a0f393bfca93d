"""`dflash convert`."""

import argparse
import json


def add(commands) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a drafter in another format",
        description="Read a drafter of any known format and write it in another one to a new folder. What that format "
        "cannot express is an error.",
        epilog="exit codes: 0 written, 1 failed and nothing written, 2 wrong usage, 130 interrupted",
    )
    convert.add_argument("source", help="folder or Hub repository of the drafter")
    convert.add_argument("folder", help="folder to write, which must not exist")
    convert.add_argument("--to", required=True, choices=("zlab", "speculators", "modelopt"), help="format to write")
    convert.add_argument("--target", help="folder or Hub repository of its target; speculators' format names it")
    convert.add_argument("--revision", help="revision of the drafter's repository")
    convert.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="what the checkpoint lacks")
    convert.add_argument("--not-strict", action="store_true", help="unknown keys and tensors are warnings")
    convert.add_argument("--allow-pickle", action="store_true", help="also read pytorch_model*.bin")
    convert.add_argument(
        "--change-window-rule", action="store_true", help="let sliding windows be counted as the other format counts"
    )


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    settings = dict(read_setting(text, parser) for text in arguments["set"])
    if arguments["to"] == "speculators" and arguments["target"] is None:
        parser.error("--to speculators needs --target, which that format names")
    from dflash.dialects.converting import convert

    folder = convert(
        arguments["source"],
        arguments["folder"],
        arguments["to"],
        target=arguments["target"],
        change_window_rule=arguments["change_window_rule"],
        revision=arguments["revision"],
        strict=not arguments["not_strict"],
        allow_pickle=arguments["allow_pickle"],
        settings=settings,
    )
    print(folder)
    return 0


def read_setting(text: str, parser: argparse.ArgumentParser) -> tuple[str, object]:
    """`KEY=VALUE`, the value in JSON."""
    key, equals, value = text.partition("=")
    try:
        return key, json.loads(value if equals else "")
    except json.JSONDecodeError:
        parser.error(f"--set takes KEY=VALUE with a value in JSON, got {text!r}")
