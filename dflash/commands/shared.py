"""What the parsers of several commands have in common."""

import argparse
import json

CONFIDENCE = "verify only draft tokens of at least this joint probability; default: 0, all"


def add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument("--target", help="folder or Hub repository of the target")
    models.add_argument("--draft", help="folder or Hub repository of its drafter")
    models.add_argument("--demo", action="store_true", help="use SmolLM2-135M-Instruct and the drafter in this project")
    models.add_argument("--revision", help="revision of the target's repository")
    models.add_argument("--draft-revision", help="revision of the drafter's repository")
    models.add_argument("--device", help="default: cuda, else mps, else cpu")
    models.add_argument("--dtype", help="default: the checkpoint's; float32 on a CPU")


def check_models(arguments: dict, parser: argparse.ArgumentParser, draft_alone: bool = False) -> None:
    """Wrong usage unless both models are named, or `--demo`; or the drafter alone, where that is enough."""
    if draft_alone and arguments["draft"] and not arguments["target"] and not arguments["demo"]:
        return
    if arguments["demo"] == bool(arguments["target"] or arguments["draft"]):
        parser.error("give --target and --draft, or --demo")
    if not arguments["demo"] and not (arguments["target"] and arguments["draft"]):
        parser.error("--target and --draft belong together")


def add_target(parser: argparse.ArgumentParser) -> None:
    """The options that say which target, and where it runs."""
    models = parser.add_argument_group("target")
    models.add_argument("--target", help="folder or Hub repository of the target")
    models.add_argument("--demo", action="store_true", help="use SmolLM2-135M-Instruct")
    models.add_argument("--revision", help="revision of the target's repository")
    models.add_argument("--device", help="default: cuda, else mps, else cpu")
    models.add_argument("--dtype", help="default: the checkpoint's; float32 on a CPU")


def check_target(arguments: dict, parser: argparse.ArgumentParser) -> None:
    if arguments["demo"] == bool(arguments["target"]):
        parser.error("give --target or --demo")


def add_decoding(parser: argparse.ArgumentParser, max_new_tokens: int):
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help=f"default: {max_new_tokens}")
    decoding.add_argument("--block-size", type=int, help="positions per round; default: as trained")
    decoding.add_argument("--system", help="system message")
    decoding.add_argument("--raw", action="store_true", help="no chat template")
    return decoding


def add_template(group) -> None:
    group.add_argument(
        "--template",
        type=json_object,
        default={},
        metavar="JSON",
        help="""arguments for the chat template, as in '{"enable_thinking": false}'""",
    )


def json_object(text: str) -> dict:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"not an object: {text}")
    return value
