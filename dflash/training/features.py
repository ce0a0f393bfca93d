"""What a drafter is trained on besides tokens: the target's hidden states at the taps, and those its head takes.

Shapes: T tokens of a document, N documents in a batch, K taps, H width of the target.
"""

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from dflash.modeling.devices_dflash import execution_device
from dflash.modeling.target_dflash import tap_module, tap_output, unwrap
from dflash.training.documents import Document
from dflash.training.feature_index import missing_shards, read_index
from dflash.training.identity import differences, identify


class TargetStates(NamedTuple):
    """Of one document: features [T, K*H], and what the target's head takes [T, H] (after the final norm), or None."""

    features: torch.Tensor
    last_hidden: torch.Tensor | None


class OnlineFeatures:
    """Runs the target over documents, in batches, and keeps its states at the taps and before its head, no others.

    Documents of similar length share a batch, padded on the right: a causal model does not see what comes later, so the
    states are those of each document alone, to rounding.

    Args:
        target (`PreTrainedModel`): in evaluation mode; on any devices.
        tap_ids (`list[int]`): strictly increasing; tap i is `hidden_states[i + 1]`.
        last_hidden (`bool`): also give what the target's head module takes, for losses on the target's distribution.
        batch_tokens (`int`): tokens in a batch, with padding, unless one document alone is longer.

    Raises:
        ValueError: a tap that the target lacks, or a target in training mode.
    """

    def __init__(self, target, tap_ids, last_hidden: bool = False, batch_tokens: int = 8192):
        self.target, self.model = target, unwrap(target)
        self.tap_ids, self.last_hidden, self.batch_tokens = list(tap_ids), last_hidden, batch_tokens
        check_taps(self.tap_ids, len(self.model.get_decoder().layers))
        if self.model.training:
            raise ValueError("the target is in training mode, so dropout may change its states; call target.eval()")

    def __call__(self, documents: list[Document]) -> list[TargetStates]:
        """The states of each document, in their order, on the device of the target's embedding.

        Raises:
            ValueError: a token that the target's embedding lacks.
        """
        embedding = self.model.get_input_embeddings()
        for document in documents:
            check_tokens(document, embedding.weight.shape[0])
        states: list[TargetStates | None] = [None] * len(documents)
        for batch in batches([len(document) for document in documents], self.batch_tokens):
            found = self._run([documents[i].input_ids for i in batch], execution_device(embedding))
            for i, state in zip(batch, found, strict=True):
                states[i] = state
        return states

    @torch.no_grad()
    def _run(self, texts: list[torch.Tensor], device: torch.device) -> list[TargetStates]:
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
        positions = torch.arange(ids.shape[1], device=device)[None]
        with self._recording() as record:
            self.target(input_ids=ids, position_ids=positions, use_cache=False)
        taps = [record[tap].to(device) for tap in self.tap_ids]
        head = record["head"].to(device) if self.last_hidden else None
        return [
            TargetStates(
                torch.cat([tap[row, : len(text)] for tap in taps], dim=-1),
                None if head is None else head[row, : len(text)].clone(),
            )
            for row, text in enumerate(texts)
        ]

    @contextlib.contextmanager
    def _recording(self):
        """Within this context a forward puts the taps [N, T, H], by id, and the head's input into the given dict."""
        record = {}

        def keep(tap):
            return lambda module, inputs, output: record.__setitem__(tap, tap_output(output))

        def before_head(module, inputs):
            if self.last_hidden:
                record["head"] = inputs[0]
            return (inputs[0][:, -1:], *inputs[1:])  # logits of every position would be the largest tensor of all

        hooks = [tap_module(self.model, tap).register_forward_hook(keep(tap)) for tap in self.tap_ids]
        hooks.append(self.model.get_output_embeddings().register_forward_pre_hook(before_head))
        try:
            yield record
        finally:
            for hook in hooks:
                hook.remove()


class CachedFeatures:
    """Reads what `write_features` wrote; called like `OnlineFeatures`. Files are memory-mapped.

    Raises:
        FileNotFoundError: the folder has no index.
        ValueError: the cache is incomplete, of another format, or its last states are not those the head takes.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        if self.index.last_hidden_is_normed is False:
            raise ValueError(
                f"{self.folder} holds last states before the target's final norm (last_hidden_is_normed is false), "
                "which the target's head does not take; write the cache again"
            )
        missing = missing_shards(self.folder, self.index)
        if missing:
            raise ValueError(
                f"{self.folder} is incomplete: {len(missing)} of {len(self.index.shards)} shards are missing "
                f"({missing[0].file}, ...); run the command that wrote it again, it goes on where it stopped"
            )
        self.tap_ids = self.index.target_layer_ids
        self.last_hidden = self.index.last_hidden_is_normed is not None
        self._places = {}
        for shard in self.index.shards:
            begin = 0
            for id, length in zip(shard.ids, shard.lengths, strict=True):
                self._places[id] = (shard.file, begin, begin + length)
                begin += length
        self._open = lru_cache(maxsize=64)(lambda file: safe_open(self.folder / file, framework="pt"))

    def check(self, tap_ids, target, tokenizer=None, last_hidden: bool = False) -> None:
        """Raises `ValueError` unless the cache was made from this target, tokenizer and these taps."""
        problems = differences(self.index.made_from, identify(target, tokenizer))
        if list(tap_ids) != self.tap_ids:
            problems.insert(0, f"target_layer_ids are {self.tap_ids}, here {list(tap_ids)}")
        if last_hidden and not self.last_hidden:
            problems.append("it has no last_hidden, which this loss needs")
        if problems:
            raise ValueError(f"the features in {self.folder} do not fit: {'; '.join(problems)}; write them again")

    def __call__(self, documents: list[Document]) -> list[TargetStates]:
        """The states of each document, on the CPU and in the dtype of the cache.

        Raises:
            ValueError: a document is not in the cache, or has other tokens there.
        """
        return [self._read(document) for document in documents]

    def _read(self, document: Document) -> TargetStates:
        if document.id not in self._places:
            raise ValueError(f"document {document.id!r} is not in the feature cache {self.folder}")
        file, begin, end = self._places[document.id]
        shard = self._open(file)
        if not torch.equal(shard.get_slice("input_ids")[begin:end], document.input_ids):
            raise ValueError(f"document {document.id!r} has other tokens than in the feature cache {self.folder}")
        last = shard.get_slice("last_hidden")[begin:end] if self.last_hidden else None
        return TargetStates(shard.get_slice("features")[begin:end], last)


def batches(lengths: list[int], limit: int) -> list[list[int]]:
    """Indices of `lengths`, longest first, in groups whose padded size stays within `limit`."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= limit:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def check_taps(taps: list[int], depth: int) -> None:
    """Raises `ValueError` unless taps are strictly increasing layers of a target with `depth` layers."""
    if not taps or taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= depth:
        raise ValueError(
            f"taps must be strictly increasing ids within 0..{depth - 1} (the target's layers), got {taps}"
        )


def check_tokens(document: Document, rows: int) -> None:
    """Raises `ValueError` if a document has a token that an embedding of `rows` rows lacks."""
    highest = document.input_ids.max().item()
    if highest >= rows:
        raise ValueError(
            f"document {document.id!r} has token {highest}, but the target's embedding has {rows} rows; was it "
            "tokenised for another target?"
        )
