"""`dflash data`: training data for a drafter, which is what its target answers to prompts."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig

from dflash import demo
from dflash.loading import TargetOptions, load_target, say, short
from dflash.modeling.pairing_dflash import chat_template_hash, tokenizer_hash
from dflash.prompts import make_prompt
from dflash.training.answers import AnswerSettings, stop_tokens, transformers_answerer
from dflash.training.conversations import Conversation, converse
from dflash.training.documents import NAMED_LINES, format_document, read_sidecar, sidecar
from dflash.training.identity import identify, thinking_mode
from dflash.training.rendering import render_conversation
from dflash.training.server_answers import ServerAnswerer


@dataclass(frozen=True, kw_only=True)
class DataOptions(TargetOptions):
    """What the command line asks for. `prompts` are JSONL files, or one `hub:REPOSITORY`."""

    prompts: list[str]
    output: str
    split: str = "train"
    column: str | None = None
    limit: int | None = None
    keep_answers: bool = False
    server: str | None = None
    server_model: str | None = None
    rows: int = 32
    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    system: str | None = None
    template: dict = field(default_factory=dict)
    drop_truncated: bool = False

    @property
    def answers(self) -> AnswerSettings:
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
        return AnswerSettings(**{name: getattr(self, name) for name in names})


def run(options: DataOptions) -> int:
    """Runs the command; 0."""
    rows = unique(read_rows(options), options.limit, options.column, options.keep_answers)
    target, tokenizer, stops = load(options)
    path = Path(options.output)
    done = resume(path, record(options, target, tokenizer))
    todo = [(id, row) for id, row in rows if id not in done]
    if done:
        say(f"{path.name}: {len(done)} prompts are done, {len(todo)} are left")
    with path.open("a", encoding="utf-8") as file:
        if options.keep_answers:
            write_kept(file, todo, tokenizer, stops, options)
        else:
            write_answers(file, todo, answerer_of(options, target, tokenizer, stops), tokenizer, options)
    return 0


def load(options: DataOptions):
    """The target (None where it is not run here), its tokenizer, and the tokens that end its answers."""
    if not options.server and not options.keep_answers:
        target, tokenizer = load_target(options)
        return target, tokenizer, stop_tokens(target)
    name = str(demo.demo_target(say)) if options.demo else options.target
    tokenizer = AutoTokenizer.from_pretrained(name, revision=options.revision)
    stops = GenerationConfig.from_pretrained(name, revision=options.revision).eos_token_id
    return None, tokenizer, [stops] if isinstance(stops, int) else list(stops or [tokenizer.eos_token_id])


def answerer_of(options: DataOptions, target, tokenizer, stops):
    if options.server:
        return ServerAnswerer(options.server, options.server_model, tokenizer, options.answers, stops, options.rows)
    return transformers_answerer(target, options.answers, options.rows)


def record(options: DataOptions, target, tokenizer) -> dict:
    """What goes into the sidecar file: everything that the answers depend on."""
    if target is not None:
        made = identify(target, tokenizer)
    else:
        made = {"target": short(options.target or "demo"), "target_revision": options.revision}
        made["target_tokenizer_hash"] = tokenizer_hash(tokenizer)
        made["target_chat_template_hash"] = chat_template_hash(tokenizer)
    settings = {} if options.keep_answers else vars(options.answers)
    return {
        **made,
        "answers": "kept" if options.keep_answers else "server" if options.server else "transformers",
        "generation": settings,
        "system": options.system,
        "template": options.template,
        "thinking_mode": thinking_mode(tokenizer, options.template),
    }


def resume(path: Path, made: dict) -> set[str]:
    """The prompts that an output file answers already; starts a new file if there is none.

    A last line that was cut off by the end of an earlier run is removed, and its prompt answered again.

    Raises:
        ValueError: the file was made otherwise.
    """
    made = json.loads(json.dumps(made, default=str))
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        sidecar(path).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        path.touch()
        return set()
    before = read_sidecar(path)
    if before is None:
        raise ValueError(f"{path} exists, without the record of what made it; choose another output")
    other = [key for key in made if made[key] != before.get(key)]
    if other:
        found = "; ".join(f"{key} was {before.get(key)}, now {made[key]}" for key in other if key != "target_config")
        raise ValueError(f"{path} was made otherwise ({found or 'target_config differs'}); choose another output")
    return _prompts_done(path)


def _prompts_done(path: Path) -> set[str]:
    done, good = set(), 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            good += len(line)
            done.add(json.loads(line)["prompt"])
    if good < path.stat().st_size:
        say(f"{path.name}: its last line is incomplete, so it is removed")
        os.truncate(path, good)
    return done


def read_rows(options: DataOptions) -> Iterator[tuple[str, dict]]:
    """Rows with prompts, and where each is from."""
    for place in options.prompts:
        repository = place.removeprefix("hub:")
        if repository != place:
            yield from ((f"{repository} row {i}", row) for i, row in enumerate(_hub_rows(repository, options.split)))
            continue
        for number, line in enumerate(Path(place).read_bytes().split(b"\n"), 1):
            if line.strip():
                yield f"{Path(place).name} line {number}", line


def _hub_rows(repository: str, split: str) -> Iterable[dict]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("a dataset of the Hub needs: pip install 'dflash-transformers[data]'") from error
    return load_dataset(repository, split=split, streaming=True)


def unique(
    rows: Iterable[tuple[str, dict | bytes]],
    limit: int | None = None,
    column: str | None = None,
    answers: bool = False,
    report=say,
):
    """Rows by their prompt's id, each prompt (with its `answers`) once; what is left out is named or counted."""
    kept, seen, problems, duplicates = {}, set(), [], 0
    for where, row in rows:
        if limit is not None and len(kept) == limit:
            break
        try:
            row = row if isinstance(row, dict) else json.loads(row)
            row = (
                row
                if column is None or not isinstance(row, dict)
                else {"id": row.get("id", where), "prompt": row.get(column)}
            )
            prompt = make_prompt(row, where)
        except ValueError as error:
            problems.append(str(error) if where in str(error) else f"{where}: {error}")
            continue
        asked = row.get("messages") if answers else [prompt.messages, prompt.turns]
        content = json.dumps([asked, prompt.tools], sort_keys=True, default=str)
        if content in seen:
            duplicates += 1
            continue
        seen.add(content)
        kept[where if prompt.id in kept else prompt.id] = row
    _report("prompts", problems, duplicates, report)
    if not kept:
        raise ValueError("there is no prompt that can be used")
    return list(kept.items())


def _report(what: str, problems: list[str], duplicates: int, report) -> None:
    if problems:
        more = f"; and {len(problems) - NAMED_LINES} more" if len(problems) > NAMED_LINES else ""
        report(f"left out {len(problems)} {what} that cannot be used: {'; '.join(problems[:NAMED_LINES])}{more}")
    if duplicates:
        report(f"left out {duplicates} duplicate {what}")


def write_answers(file, rows: list[tuple[str, dict]], answerer, tokenizer, options: DataOptions) -> None:
    """Has each conversation, and appends its documents when it is done."""
    tokens, dropped, begin = 0, 0, time.perf_counter()
    with tqdm(total=len(rows), unit="prompt", file=sys.stderr) as bar:
        for chunk in _chunks(rows, 16 * options.rows):
            conversations = [_conversation(id, row, tokenizer, options) for id, row in chunk]
            for conversation in converse(answerer, conversations):
                truncated = not conversation.answers[-1].finished
                dropped += truncated and options.drop_truncated
                tokens += sum(len(answer.tokens) for answer in conversation.answers)
                end = "length" if truncated else "stop"
                documents = [] if truncated and options.drop_truncated else conversation.documents()
                _append(file, documents, conversation.prompt.id, end)
                bar.set_postfix_str(f"{tokens} tokens, {tokens / (time.perf_counter() - begin):.1f}/s")
                bar.update()
    if dropped:
        say(f"left out {dropped} conversations whose last answer was cut short by --max-new-tokens")


def _conversation(id: str, row: dict, tokenizer, options: DataOptions) -> Conversation:
    prompt = make_prompt({**row, "id": id}, id)
    return Conversation(prompt, tokenizer, options.system, options.template)


def write_kept(file, rows: list[tuple[str, dict]], tokenizer, stops, options: DataOptions) -> None:
    """Renders conversations with the answers that they have."""
    problems = []
    for id, row in tqdm(rows, unit="conversation", file=sys.stderr):
        try:
            messages = make_messages(row)
            documents = render_conversation(tokenizer, id, messages, stops, tools=row.get("tools"), **options.template)
        except ValueError as error:
            problems.append(f"{id}: {error}")
            continue
        _append(file, documents, id, "length" if messages[-1].get("truncated") else "stop")
    _report("conversations", problems, 0, say)


def make_messages(row: dict) -> list[dict]:
    """The messages of a row, whose last answer was cut short if `finish_reason` says so."""
    if not isinstance(row.get("messages"), list):
        raise ValueError("has no messages, so it has no answers to keep")
    messages = list(row["messages"])
    if row.get("finish_reason") == "length":
        messages[-1] = {**messages[-1], "truncated": True}
    return messages


def _append(file, documents, prompt: str, finish_reason: str) -> None:
    """The rows of a conversation in one write, so that a run that is killed leaves it out or has it whole."""
    lines = [format_document(document, prompt=prompt, finish_reason=finish_reason) + "\n" for document in documents]
    file.write("".join(lines))
    file.flush()


def _chunks(items: list, size: int) -> Iterator[list]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
