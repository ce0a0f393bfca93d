"""The index of features on disk: what they were made from, and which file holds which document."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

FORMAT = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Shard:
    """One file: the documents in it, one after the other, and their lengths."""

    file: str
    ids: list[str]
    lengths: list[int]


@dataclass(frozen=True)
class FeatureIndex:
    """What `index.json` holds.

    Attributes:
        made_from: the `identify` record of target and tokenizer.
        last_hidden_is_normed: whether `last_hidden` is what the head takes; what this library writes always is. None:
            there is no `last_hidden`.
    """

    target_layer_ids: list[int]
    hidden_size: int
    dtype: str
    last_hidden_is_normed: bool | None
    made_from: dict
    shards: list[Shard]
    format: int = FORMAT

    @property
    def bytes_per_token(self) -> int:
        """Features, `last_hidden`, and the token itself."""
        states = len(self.target_layer_ids) + (self.last_hidden_is_normed is not None)
        return states * self.hidden_size * DTYPES[self.dtype].itemsize + 8

    def size(self, shards: list[Shard]) -> int:
        return self.bytes_per_token * sum(sum(shard.lengths) for shard in shards)


def read_index(folder) -> FeatureIndex:
    """The index of a feature cache; raises `ValueError` if it is not one that this version reads."""
    path = Path(folder) / "index.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise ValueError(f"{path} has format {record.get('format')!r}, this version reads {FORMAT}")
    shards = [Shard(**shard) for shard in record.pop("shards")]
    return FeatureIndex(**record, shards=shards)


def missing_shards(folder: Path, index: FeatureIndex) -> list[Shard]:
    """The shards that an interrupted run has yet to write; a file under its name is complete."""
    return [shard for shard in index.shards if not (folder / shard.file).exists()]
