"""`dflash init-config`."""

import argparse

from dflash.commands.features import tap_list


def add(commands) -> None:
    init = commands.add_parser(
        "init-config",
        help="derive a new drafter's config from its target",
        description="Print the config.json of a drafter for a target, to be edited and given to `dflash train`.",
    )
    init.add_argument("target", nargs="?", help="folder or Hub repository of the target")
    init.add_argument("--demo", action="store_true", help="for SmolLM2-135M-Instruct")
    init.add_argument("--revision", help="revision of the target's repository")
    init.add_argument("--output", metavar="FILE.json", help="a new file; default: standard output")
    init.add_argument("--layers", type=int, default=5, help="of the drafter; default: 5")
    init.add_argument(
        "--block-size", type=int, default=16, help="positions per round, the anchor included; default: 16"
    )
    taps = init.add_mutually_exclusive_group()
    taps.add_argument("--num-taps", type=int, default=5, help="layers of the target to read; default: 5")
    taps.add_argument("--taps", type=tap_list, help="which layers, as in 1,8,15")
    init.add_argument("--mask-token-id", type=int, help="default: the tokenizer's mask token, or an unused row")
    init.add_argument("--sliding-window", type=int, help="of all layers but the last; default: full attention")


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    if arguments["demo"] == bool(arguments["target"]):
        parser.error("give a target or --demo")
    from dflash import init_config

    count = arguments.pop("num_taps")
    arguments["taps"] = arguments["taps"] or count
    return init_config.run(init_config.InitConfigOptions(**arguments))
