"""The command `dflash`."""

import argparse
import sys
from dataclasses import fields

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash", description="Faster decoding with a DFlash drafter, same output.")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate",
        help="decode one prompt",
        description="Decode one prompt with a target and its drafter. Text goes to standard output as it is accepted, "
        "then one summary line; progress goes to standard error.",
        epilog="exit codes: 0 done, 1 failed, 2 wrong usage, 3 --compare found other tokens, 130 interrupted",
    )
    generate.add_argument("prompt", nargs="?", help="the prompt; '-' or none: read standard input")
    models = generate.add_argument_group("models")
    models.add_argument("--target", help="folder or Hub repository of the target")
    models.add_argument("--draft", help="folder or Hub repository of its drafter")
    models.add_argument("--demo", action="store_true", help="use SmolLM2-135M-Instruct and the drafter in this project")
    models.add_argument("--revision", help="revision of the target's repository")
    models.add_argument("--draft-revision", help="revision of the drafter's repository")
    models.add_argument("--device", help="default: cuda, else mps, else cpu")
    models.add_argument("--dtype", help="default: the checkpoint's; float32 on a CPU")
    decoding = generate.add_argument_group("decoding")
    decoding.add_argument("--max-new-tokens", type=int, default=256)
    decoding.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    decoding.add_argument("--top-k", type=int)
    decoding.add_argument("--top-p", type=float)
    decoding.add_argument("--min-p", type=float)
    decoding.add_argument("--draft-temperature", type=float, default=0.0, help="0: propose the most likely tokens")
    decoding.add_argument("--block-size", type=int, help="positions per round; default: as trained")
    decoding.add_argument("--seed", type=int, help="seed of the sampling")
    decoding.add_argument("--system", help="system message")
    decoding.add_argument("--raw", action="store_true", help="no chat template")
    output = generate.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="also decode without the drafter: speed and identity")
    output.add_argument("--json", action="store_true", help="one JSON object instead of text and summary")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = build_parser()
    arguments = vars(parser.parse_args(argv))
    arguments.pop("command")
    if arguments["demo"] == bool(arguments["target"] or arguments["draft"]):
        parser.error("give --target and --draft, or --demo")
    if not arguments["demo"] and not (arguments["target"] and arguments["draft"]):
        parser.error("--target and --draft belong together")
    arguments["prompt"] = read_prompt(arguments["prompt"], parser)
    try:
        from dflash.generate import GenerateOptions, run  # slow to import, so after the usage is checked

        return run(GenerateOptions(**{field.name: arguments[field.name] for field in fields(GenerateOptions)}))
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"dflash: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


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
