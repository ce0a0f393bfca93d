"""What a drafter is trained on besides tokens: the target's hidden states at the taps, and those its head takes.

Shapes: T tokens of a document, N documents in a batch, K taps, H width of the target.
"""

import contextlib
from typing import NamedTuple

import torch

from dflash.modeling.devices_dflash import execution_device
from dflash.modeling.target_dflash import tap_module, tap_output, unwrap
from dflash.training.documents import Document


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
