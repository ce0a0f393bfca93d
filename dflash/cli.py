"""The command `dflash`."""

import argparse
import sys

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash", description="Faster decoding with a DFlash drafter, same output.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands)
    _add_check(commands)
    return parser


def _add_generate(commands) -> None:
    generate = commands.add_parser(
        "generate",
        help="decode one prompt",
        description="Decode one prompt with a target and its drafter. Text goes to standard output as it is accepted, "
        "then one summary line; progress goes to standard error.",
        epilog="exit codes: 0 done, 1 failed, 2 wrong usage, 3 --compare found other tokens, 130 interrupted",
    )
    generate.add_argument("prompt", nargs="?", help="the prompt; '-' or none: read standard input")
    _add_models(generate)
    decoding = _add_decoding(generate, max_new_tokens=256)
    decoding.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    decoding.add_argument("--top-k", type=int)
    decoding.add_argument("--top-p", type=float)
    decoding.add_argument("--min-p", type=float)
    decoding.add_argument("--draft-temperature", type=float, default=0.0, help="0: propose the most likely tokens")
    decoding.add_argument("--seed", type=int, help="seed of the sampling")
    output = generate.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="also decode without the drafter: speed and identity")
    output.add_argument("--json", action="store_true", help="one JSON object instead of text and summary")


def _add_check(commands) -> None:
    check = commands.add_parser(
        "check",
        help="say whether a drafter and a target belong together",
        description="Check a target and its drafter, and print what was checked and resolved. With --probe, also "
        "decode greedily and compare every token with one-by-one decoding.",
        epilog="exit codes: 0 fine, 1 the pair cannot work or failed to load, 2 wrong usage, 3 --probe found a "
        "difference that rounding does not explain, 130 interrupted",
    )
    _add_models(check)
    probe = _add_decoding(check, max_new_tokens=64)
    probe.add_argument("--probe", action="store_true", help="decode a few prompts: acceptance and margins")
    probe.add_argument("--prompts", metavar="FILE.jsonl", help="its prompts: key `prompt`, or the first of `turns`")
    check.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument("--target", help="folder or Hub repository of the target")
    models.add_argument("--draft", help="folder or Hub repository of its drafter")
    models.add_argument("--demo", action="store_true", help="use SmolLM2-135M-Instruct and the drafter in this project")
    models.add_argument("--revision", help="revision of the target's repository")
    models.add_argument("--draft-revision", help="revision of the drafter's repository")
    models.add_argument("--device", help="default: cuda, else mps, else cpu")
    models.add_argument("--dtype", help="default: the checkpoint's; float32 on a CPU")


def _add_decoding(parser: argparse.ArgumentParser, max_new_tokens: int):
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help=f"default: {max_new_tokens}")
    decoding.add_argument("--block-size", type=int, help="positions per round; default: as trained")
    decoding.add_argument("--system", help="system message")
    decoding.add_argument("--raw", action="store_true", help="no chat template")
    return decoding


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = build_parser()
    arguments = vars(parser.parse_args(argv))
    command = arguments.pop("command")
    _check_usage(command, arguments, parser)
    try:
        return _run(command, arguments)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"dflash: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _check_usage(command: str, arguments: dict, parser: argparse.ArgumentParser) -> None:
    if arguments["demo"] == bool(arguments["target"] or arguments["draft"]):
        parser.error("give --target and --draft, or --demo")
    if not arguments["demo"] and not (arguments["target"] and arguments["draft"]):
        parser.error("--target and --draft belong together")
    if command == "generate":
        arguments["prompt"] = read_prompt(arguments["prompt"], parser)
    elif arguments["prompts"] and not arguments["probe"]:
        parser.error("--prompts are decoded by --probe; give both")


def _run(command: str, arguments: dict) -> int:
    """Runs one command; each is slow to import, so that happens after the usage is checked."""
    if command == "generate":
        from dflash import generate

        return generate.run(generate.GenerateOptions(**arguments))
    from dflash import check

    return check.run(check.CheckOptions(**arguments))


def read_prompt(prompt: str | None, parser: argparse.ArgumentParser) -> str:
    if prompt in (None, "-"):
        if prompt is None and sys.stdin.isatty():
            parser.error("no prompt; give one, or '-' to read standard input")
        prompt = sys.stdin.read()
    if not prompt.strip():
        parser.error("the prompt is empty")
    return prompt


if __name__ == "__main__":
    sys.exit(main())
