"""Training data: tokenised texts with a loss mask, read from JSONL as they were written and never rendered again."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.loading import say

NAMED_LINES = 20


@dataclass(frozen=True, eq=False)
class Document:
    """One text.

    Attributes:
        id: unique among the documents that are used together.
        input_ids: [T] the target's tokens.
        loss_mask: [T] True where the target wrote the token.
    """

    id: str
    input_ids: torch.LongTensor
    loss_mask: torch.BoolTensor

    def __len__(self) -> int:
        return len(self.input_ids)


def read_documents(path, *, vocab_size: int | None = None, limit: int | None = None, report=say) -> list[Document]:
    """The documents of a JSONL file with rows {"id", "input_ids", "loss_mask"}; other keys are ignored.

    Lines that are not such a row (a run that was killed leaves one) are left out and named by number; so is a row whose
    id was used before. Rows with the tokens of an earlier one are left out and counted.

    Args:
        path: the file.
        vocab_size: rows with an id at or above it are not usable; default: not checked.
        limit: read at most this many documents.
        report: called with each line of text about what was left out; default: standard error.

    Raises:
        ValueError: the file holds no document.
    """
    path, documents, corrupt, seen, ids, duplicates = Path(path), [], [], set(), {}, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(documents) == limit:
                break
            if not line.strip():
                continue
            try:
                document = parse_document(line, vocab_size)
            except ValueError as error:
                corrupt.append(f"line {number} ({error})")
                continue
            content = document.input_ids.numpy().tobytes()
            if content in seen:
                duplicates += 1
            elif document.id in ids:
                corrupt.append(f"line {number} (id {document.id!r} has other tokens in line {ids[document.id]})")
            else:
                documents.append(document)
                seen.add(content)
                ids[document.id] = number
    _report(path.name, corrupt, duplicates, report)
    if not documents:
        raise ValueError(f"{path} holds no document: {len(corrupt)} corrupt lines and no other")
    return documents


def _report(name: str, corrupt: list[str], duplicates: int, report) -> None:
    if corrupt:
        more = f" and {len(corrupt) - NAMED_LINES} more" if len(corrupt) > NAMED_LINES else ""
        report(f"{name}: left out {len(corrupt)} corrupt lines: {'; '.join(corrupt[:NAMED_LINES])}{more}")
    if duplicates:
        report(f"{name}: left out {duplicates} duplicates")


def parse_document(line: str | bytes, vocab_size: int | None = None) -> Document:
    """The document of one JSONL row; raises `ValueError` with what is wrong with it."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("id"), (str, int)) or isinstance(row["id"], bool):
        raise ValueError("no id")
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("input_ids is not a list of token ids")
    if not isinstance(mask, list) or not all(flag in (0, 1) for flag in mask):
        raise ValueError("loss_mask is not a list of 0 and 1")
    if len(mask) != len(ids):
        raise ValueError(f"{len(ids)} input_ids but {len(mask)} entries in loss_mask")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise ValueError(f"token {max(ids)} does not exist in a vocabulary of {vocab_size}")
    return Document(str(row["id"]), torch.tensor(ids), torch.tensor(mask, dtype=torch.bool))


def format_document(document: Document, **extra) -> str:
    """The JSONL row of a document, without the line's end; `extra` keys go with it."""
    mask = document.loss_mask.to(torch.int8).tolist()
    row = {"id": document.id, **extra, "input_ids": document.input_ids.tolist(), "loss_mask": mask}
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


def sidecar(path) -> Path:
    """Where the record of what made a JSONL file is kept: tokenizer, template and target, and how answers were made."""
    path = Path(path)
    return path.with_name(path.name + ".meta.json")


def read_sidecar(path) -> dict | None:
    """The record beside the JSONL file `path`; None if there is none."""
    place = sidecar(path)
    return json.loads(place.read_text(encoding="utf-8")) if place.exists() else None
