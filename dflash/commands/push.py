"""`dflash push`."""

import argparse


def add(commands) -> None:
    push = commands.add_parser(
        "push",
        help="publish a drafter, with its code and a model card",
        description="Publish a drafter: config, weights, code, model card and provenance are assembled in a temporary "
        "folder, loaded in a fresh process without this library, and then uploaded in one commit. The list of files "
        "and the commit's address go to standard output, progress to standard error.",
        epilog="exit codes: 0 done, 1 failed, and nothing was changed, 2 wrong usage, 130 interrupted",
    )
    push.add_argument("source", metavar="DIR", help="the drafter: a folder or a Hub repository")
    push.add_argument("repo", metavar="REPO", help="the Hub repository to write, OWNER/NAME")
    push.add_argument("--source-revision", help="revision of the drafter, if it is a repository")
    hub = push.add_argument_group("where it goes")
    hub.add_argument("--private", action="store_true", help="make the repository private if it is new")
    hub.add_argument("--revision", help="branch to write to; it is made from main if it is not there")
    hub.add_argument("--create-pr", action="store_true", help="open a pull request instead of writing to main")
    hub.add_argument("--message", help="the commit's message")
    hub.add_argument("--dry-run", action="store_true", help="assemble and prove, but upload nothing")
    hub.add_argument("--output", metavar="FOLDER", help="also keep what was assembled, in a new folder")
    card = push.add_argument_group("model card and provenance")
    card.add_argument("--new-card", action="store_true", help="write a new card though DIR or REPO has one")
    card.add_argument("--target-repo", metavar="OWNER/NAME", help="the target, if the drafter does not say")
    card.add_argument("--target-revision", help="the target's commit that the drafter was trained on")
    card.add_argument("--tokenizer", metavar="SOURCE", help="the target's tokenizer, to record hashes of it")
    card.add_argument("--thinking-mode", choices=["on", "off"], help="what the drafter was trained for")
    card.add_argument("--license", metavar="ID", help="the drafter's licence, as the Hub calls it")
    card.add_argument("--benchmark", metavar="FILE.json", help="measured tau and speed-up, for the card")


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    if arguments["create_pr"] and arguments["revision"]:
        parser.error("--create-pr opens a pull request against main; --revision writes to a branch: give one")
    from dflash import push

    return push.run(push.PushOptions(**arguments))
