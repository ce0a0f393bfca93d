"""`dflash features`."""

import argparse

from dflash.commands.shared import add_target, check_target


def add(commands) -> None:
    features = commands.add_parser(
        "features",
        help="write a target's features of training data to disk",
        description="Run a target over tokenised documents and keep its hidden states at the taps, so that training "
        "need not run it again. The size is predicted first; an interrupted run goes on where it stopped.",
    )
    add_target(features)
    features.add_argument("documents", metavar="FILE.jsonl", help="rows with id, input_ids and loss_mask")
    features.add_argument("--output", required=True, metavar="FOLDER", help="where to write; of an earlier run: go on")
    taps = features.add_mutually_exclusive_group(required=True)
    taps.add_argument("--taps", type=tap_list, help="target layers, as in 1,8,15")
    taps.add_argument("--draft-config", metavar="PLACE", help="read them from this drafter's folder or config.json")
    features.add_argument("--stored-dtype", default="bfloat16", help="bfloat16 (default), float16 or float32")
    features.add_argument("--last-hidden", action="store_true", help="also what the head takes, for KL and TV losses")
    features.add_argument("--batch-tokens", type=int, default=8192, help="tokens in a forward; default: 8192")
    features.add_argument("--limit", type=int, help="use at most this many documents")


def tap_list(text: str) -> list[int]:
    return [int(tap) for tap in text.split(",")]


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    check_target(arguments, parser)
    from dflash import features

    return features.run(features.FeatureOptions(**arguments))
