"""Prompts in JSONL files: what is asked, turn by turn, and its tokens."""

import json
from dataclasses import dataclass, field
from pathlib import Path

_ANSWER = "assistant"


@dataclass(frozen=True)
class Prompt:
    """A conversation to be had with a target.

    Attributes:
        id: that of the row, or the file's name and line.
        messages: up to the first answer of the target, as its chat template takes them.
        turns: what the user says after each answer.
        tools: schemas for the chat template, or None.
    """

    id: str
    messages: list[dict]
    turns: list[str] = field(default_factory=list)
    tools: list | None = None


def read_prompts(path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, one a row: `prompt`, a text; `turns`, the user's texts; or `messages`.

    Answers in `messages` are left out, for the target to give its own, and a last answer is. Where tools answer too,
    their conversation is kept up to the last answer: other answers would not fit the tools' results.

    Raises:
        ValueError: a row cannot be used, or there is none.
    """
    path, prompts = Path(path), []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(parse_prompt(line, f"{path.name} line {number}"))
    if not prompts:
        raise ValueError(f"{path.name} has no line with a prompt")
    return prompts


def parse_prompt(line: str, where: str) -> Prompt:
    """The prompt of a row; errors, and the id of a row without one, say `where`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    return make_prompt(row, where)


def make_prompt(row, where: str) -> Prompt:
    """The prompt in a dictionary; raises `ValueError` if it holds none."""
    row = row if isinstance(row, dict) else {"row": row}
    messages, turns, text = row.get("messages"), row.get("turns"), row.get("prompt")
    if messages is None:
        turns = turns if text is None else [text]
        if (
            not isinstance(turns, list)
            or not turns
            or not all(isinstance(turn, str) and turn.strip() for turn in turns)
        ):
            raise ValueError(
                f"{where} needs `prompt`, a text, or `turns` or `messages`, a list; it is {json.dumps(row)}"
            )
        messages = [{"role": "user", "content": turn} for turn in turns]
    elif not _are_messages(messages):
        raise ValueError(f"{where}: messages must be a list of objects with a role, it is {json.dumps(messages)}")
    start, turns = split_turns(messages)
    if not any(message["role"] == "user" for message in start):
        raise ValueError(f"{where}: nothing is asked in {json.dumps(messages)}")
    return Prompt(str(row.get("id", where)), start, turns, row.get("tools"))


def _are_messages(messages) -> bool:
    return isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)


def split_turns(messages: list[dict]) -> tuple[list[dict], list[str]]:
    """Messages before the first answer, and what the user says after each."""
    if all(message["role"] == "user" for message in messages):
        return messages[:1], [message["content"] for message in messages[1:]]
    answers = [i for i, message in enumerate(messages) if message["role"] == _ANSWER]
    if not answers:
        return messages, []
    later = [message for message in messages[answers[0] :] if message["role"] != _ANSWER]
    if all(message["role"] == "user" and isinstance(message["content"], str) for message in later):
        return messages[: answers[0]], [message["content"] for message in later]
    while messages and messages[-1]["role"] == _ANSWER:
        messages = messages[:-1]
    return messages, []


def encode_messages(tokenizer, messages: list[dict], tools=None, **template):
    """Token ids [1, P] of a conversation that the target is to go on with.

    Args:
        template: further arguments of the chat template, such as enable_thinking.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template; pass --raw to use prompts as they are")
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True, **template
    )
    return encoded["input_ids"]
