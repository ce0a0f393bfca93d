"""Publishing a drafter: a complete folder is assembled, proven, and only then moved or uploaded, in one commit."""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard

import dflash
from dflash.card import CardFacts, read_benchmark, write_card
from dflash.checkpoint import ship
from dflash.dialects import load_drafter
from dflash.loading import say
from dflash.modeling.pairing_dflash import chat_template_hash, tokenizer_hash
from dflash.proof import prove

LIBRARY = "dflash-transformers"
_CARD = "README.md"
# Files of a user's folder that go along, besides what is written anew.
_ALONG = re.compile(r"(LICEN[CS]E|NOTICE)(\..+)?", re.IGNORECASE)
# What an earlier version of a drafter may have left in a repository, and would be loaded, or mistaken, for this one's.
_REPLACED = re.compile(r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?|[a-z0-9]+_dflash\.py")


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """What the command line asks for.

    `repo` is the repository to write to. `source` is the folder or repository that the drafter comes from, whose card
    and licence are looked at; None if it comes from nowhere.
    """

    repo: str
    source: str | None = None
    source_revision: str | None = None
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    message: str | None = None
    dry_run: bool = False
    output: str | None = None
    new_card: bool = False
    benchmark: str | None = None
    license: str | None = None
    target_repo: str | None = None
    target_revision: str | None = None
    tokenizer: str | None = None
    thinking_mode: str | None = None


def run(options: PushOptions) -> int:
    """Runs the command."""
    say(f"loading drafter {options.source}")
    publish(load_source(options.source, options.source_revision), options)
    return 0


def push_to_hub(draft, repo: str, **options) -> None:
    """Publishes a drafter that is in memory (`DFlashDraftModel`); options are those of `PushOptions`."""
    publish(draft, PushOptions(repo=repo, **options))


def publish(draft, options: PushOptions) -> None:
    """Assembles a drafter's folder, proves it, prints its files, and then uploads it, or keeps it, or both.

    Raises:
        FileExistsError: `output` exists.
        ValueError, RuntimeError: the folder does not work by itself, or something is not known that has to be.
    """
    output = None if options.output is None else Path(options.output)
    if output is not None:
        if output.exists():
            raise FileExistsError(f"{output} exists already; choose a new folder")
        output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output and output.parent, prefix=".dflash-push-") as scratch:
        folder = Path(scratch) / options.repo.split("/")[-1]
        assemble(draft, folder, options)
        say("loading it in a fresh process without this library")
        prove(folder, draft)
        for path in _files(folder):
            print(f"{path.stat().st_size:>14,}  {path.relative_to(folder)}")
        if not options.dry_run:
            print(upload(folder, options))
        if output is not None:
            os.rename(folder, output)


def load_source(source: str, revision: str | None):
    """A drafter of any format that is read, in its own dtype, from a folder or a repository."""
    return load_drafter(source, revision=revision, dtype="auto").eval()


def assemble(draft, folder: Path, options: PushOptions) -> None:
    """Writes config, weights, shipped code and card to a new folder.

    A card that is in the source folder is kept as it is, unless `new_card` asks otherwise; so are licence files.

    Raises:
        ValueError: the checkpoint and the options disagree, or the card's target is not known.
    """
    theirs = _own_files(options.source)
    provenance = provenance_of(draft.config, options)
    kept = None if options.new_card else theirs.pop(_CARD, None)
    text = None if kept else _card(draft, provenance, options)
    draft.config.provenance = provenance
    draft.save_pretrained(folder)
    ship(folder)
    for name, path in theirs.items():
        if _ALONG.fullmatch(name):
            shutil.copyfile(path, folder / name)
        elif name != _CARD and not (folder / name).exists() and not _REPLACED.fullmatch(name):
            say(f"{name} is no part of a drafter, so it is left out")
    if kept:
        shutil.copyfile(kept, folder / _CARD)
        say(f"the {_CARD} of the folder is kept; --new-card writes another")
    else:
        (folder / _CARD).write_text(text, encoding="utf-8")


def provenance_of(config, options: PushOptions) -> dict:
    """What the config says of its origin, with what the options add, and the version of this library.

    Raises:
        ValueError: an option contradicts the config.
    """
    known = getattr(config, "provenance", None) or {}
    if not isinstance(known, dict):
        raise ValueError(f"provenance in config.json is {known!r} where a dictionary is expected")
    given = {
        "target": options.target_repo,
        "target_revision": options.target_revision,
        "thinking_mode": options.thinking_mode,
        **_tokenizer_hashes(options.tokenizer, options.target_revision),
    }
    for name, value in given.items():
        if None not in (value, known.get(name)) and value != known[name]:
            raise ValueError(f"{name} is {value!r} here, but the drafter's config.json says {known[name]!r}")
    given = {name: value for name, value in given.items() if value is not None}
    return {**known, **given, "library": LIBRARY, "library_version": dflash.__version__}


def upload(folder: Path, options: PushOptions) -> str:
    """Uploads `folder` to a repository in one commit, which it makes if need be; gives the commit's address.

    Weights and modules of an earlier version that this one does not replace are deleted in the same commit. A card that
    is there already is kept, unless the folder's comes from the user's or `new_card` is set.

    Raises:
        ValueError: `private` is asked for, and the repository is public.
    """
    api = HfApi()
    repo = api.create_repo(options.repo, private=options.private or None, exist_ok=True).repo_id
    if options.private and not api.model_info(repo).private:
        raise ValueError(f"{repo} exists and is public; make it private in its settings, or push without --private")
    if options.revision and not options.revision.startswith("refs/"):
        api.create_branch(repo, branch=options.revision, exist_ok=True)
    there = api.model_info(repo, revision=options.revision)
    present = {file.rfilename for file in there.siblings}
    ours = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    if _CARD in present and not options.new_card and _CARD not in _own_files(options.source):
        say(f"the {_CARD} of {repo} is kept; --new-card writes another")
        ours.pop(_CARD)
    say(f"uploading to {repo}")
    stale = sorted(name for name in present - set(ours) if _REPLACED.fullmatch(name))
    commit = api.create_commit(
        repo,
        [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in ours.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ],
        commit_message=options.message or f"Upload DFlash drafter with {LIBRARY} {dflash.__version__}",
        revision=options.revision,
        create_pr=options.create_pr,
        parent_commit=there.sha,  # so that what came in between is not undone
    )
    return commit.pr_url or str(commit.commit_url)


def _card(draft, provenance: dict, options: PushOptions) -> str:
    target = provenance.get("target")
    if target is None:
        raise ValueError("the model card names the target, which the drafter does not: pass --target-repo OWNER/NAME")
    measurements, hardware = ([], None) if options.benchmark is None else read_benchmark(Path(options.benchmark))
    facts = CardFacts(
        repo=options.repo,
        target=target,
        license=options.license or _license_of(options.source),
        parameters=sum(parameter.numel() for parameter in draft.parameters()),
        provenance=provenance,
        measurements=measurements,
        measured_on=hardware,
    )
    if facts.license is None:
        say("no licence is known, so the card names none; --license ID adds one")
    return write_card(draft.config, facts)


def _license_of(source: str | None) -> str | None:
    """The licence in the card of the drafter's source, if there is one."""
    if source is None:
        return None
    if Path(source).is_dir():
        path = Path(source) / _CARD
        return ModelCard.load(path).data.license if path.exists() else None
    api = HfApi()
    return ModelCard.load(source).data.license if api.file_exists(source, _CARD) else None


def _tokenizer_hashes(source: str | None, revision: str | None) -> dict[str, str | None]:
    if source is None:
        return {}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    hashes = {"target_tokenizer_hash": tokenizer_hash(tokenizer)}
    return {**hashes, "target_chat_template_hash": chat_template_hash(tokenizer)}


def _own_files(source: str | None) -> dict[str, Path]:
    """The files at the top of a user's folder; none if the source is a repository."""
    if source is None or not Path(source).is_dir():
        return {}
    return {path.name: path for path in sorted(Path(source).iterdir()) if path.is_file()}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
