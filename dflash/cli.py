"""The command `dflash`."""

import argparse
import sys

from dflash.commands import (
    catalogue,
    check,
    convert,
    data,
    eval,
    features,
    generate,
    init_config,
    push,
    serve_config,
    train,
)

COMMANDS = {
    "generate": generate,
    "check": check,
    "eval": eval,
    "data": data,
    "features": features,
    "list": catalogue,
    "init-config": init_config,
    "train": train,
    "push": push,
    "serve-config": serve_config,
    "convert": convert,
}
FAILED, INTERRUPTED = 1, 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash", description="Faster decoding with a DFlash drafter, same output.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        command.add(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = build_parser()
    arguments = vars(parser.parse_args(argv))
    command = COMMANDS[arguments.pop("command")]
    try:
        return command.run(arguments, parser)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"dflash: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
