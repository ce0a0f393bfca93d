"""`dflash train`."""

import argparse
import typing

INTERRUPTED = 143


def add(commands) -> None:
    train = commands.add_parser(
        "train",
        help="train a drafter for a target",
        description="Train a drafter. Settings come from a YAML file, and from flags of the same names, which win. "
        "Runs in one process, or in several by `accelerate launch -m dflash.cli train ...`.",
        epilog="exit codes: 0 done, 1 failed, 2 wrong usage, 143 ended by a signal, with a state to --resume from",
    )
    train.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="settings, as `name: value`")
    train.add_argument("--resume", action="store_true", help="go on with the run in `output`, if there is one")
    from dflash.training.config import FIELDS

    for name, field in FIELDS.items():
        _add_flag(train, name, field)


def _add_flag(parser: argparse.ArgumentParser, name: str, field) -> None:
    from dflash.training.config import value_type

    kind, _ = value_type(name)
    flag = "--" + name.replace("_", "-")
    options = {"dest": name, "default": argparse.SUPPRESS, "help": _help(field)}
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(kind) is tuple:
        parser.add_argument(flag, nargs="*", type=typing.get_args(kind)[0], metavar="VALUE", **options)
    else:
        parser.add_argument(flag, type=kind, metavar="VALUE", **options)


def _help(field) -> str:
    default = field.default
    shown = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    return field.metadata["help"].replace("%", "%%") + (f" (default: {default})" if shown else "")


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    from dflash.training.config import build_config, read_settings

    path, resume = arguments.pop("config"), arguments.pop("resume")
    config = build_config({**(read_settings(path) if path else {}), **arguments})
    from dflash.loading import say
    from dflash.training.run import train

    result = train(config, resume)
    if result.interrupted:
        say(f"stopped after step {result.steps}; run it again with --resume to go on")
        return INTERRUPTED
    say(f"wrote {result.final}" + ("" if result.best_tau is None else f"; best held-out tau {result.best_tau:.3f}"))
    return 0
