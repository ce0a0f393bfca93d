"""A batch for training: the blocks of several documents over their packed contexts.

Shapes: D documents, T tokens of one, C context positions of all, A blocks of all, B block size, S predicted positions
per block (B - 1, or B for a drafter that samples from the anchor), R rows that are trained, K taps, H width.
"""

from dataclasses import dataclass

import torch

from dflash.training.anchors import label_positions, label_validity
from dflash.training.documents import Document


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Where the blocks of a packed batch stand; what a block may see follows from it (see `masks`).

    Attributes:
        block: B.
        lengths: context positions of each document, [D]; they lie one document after the other.
        anchors: position of each block's anchor in its document, [A], ascending within a document; blocks lie in the
            order of the documents.
        counts: blocks of each document, [D].
    """

    block: int
    lengths: list[int]
    anchors: torch.LongTensor
    counts: list[int]

    @property
    def positions(self) -> torch.LongTensor:
        """Position ids [1, C + A*B]: of the contexts, counted anew in each document, then of the blocks."""
        context = [torch.arange(length) for length in self.lengths]
        blocks = self.anchors[:, None] + torch.arange(self.block)
        return torch.cat([*context, blocks.flatten()])[None]

    @property
    def documents(self) -> torch.LongTensor:
        """The document of each block, [A]."""
        return torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """What one forward of the drafter needs, and what its outputs are compared with.

    Attributes:
        layout: where the blocks stand.
        features: [1, C, K*H] of the contexts.
        block_ids: [A, B] anchors and masks.
        labels: [R] data tokens.
        rows: [R] which of the A*B outputs predict them.
        valid: [A, S] the trained slots; R of them are True, in the order of `rows`.
        last_hidden: [R, H] what the target's head takes where the target predicts the labels, or None.
        covered, supervised: distinct tokens that some block predicts, of those that the target wrote.
    """

    layout: BlockLayout
    features: torch.Tensor
    block_ids: torch.LongTensor
    labels: torch.LongTensor
    rows: torch.LongTensor
    valid: torch.BoolTensor
    last_hidden: torch.Tensor | None
    covered: int
    supervised: int


def pack_blocks(documents: list[Document], anchors: list[torch.Tensor], states, config) -> PackedBatch:
    """Packs documents with their anchors, and the target's states of each, for a drafter of `config`.

    Args:
        documents: D documents.
        anchors: of each, ascending [A_d], at least one.
        states: `TargetStates` of each.
        config (`DFlashConfig`): of the drafter.
    """
    slots, block = config.proposals(), config.block_size
    labels, valid, features, hidden, lengths, covered = [], [], [], [], [], 0
    for document, chosen, state in zip(documents, anchors, states, strict=True):
        _check_states(document, state)
        positions = label_positions(chosen, slots)
        trained = label_validity(chosen, slots, document.loss_mask)
        labels.append(document.input_ids[positions[trained]])
        valid.append(trained)
        covered += len(positions[trained].unique())
        lengths.append(int(chosen[-1]))  # strictly before the last anchor: nothing sees more
        features.append(state.features[: lengths[-1]])
        if state.last_hidden is not None:
            hidden.append(state.last_hidden[(positions[trained] - 1).to(state.last_hidden.device)])
    starts = torch.cat([document.input_ids[chosen] for document, chosen in zip(documents, anchors, strict=True)])
    trained = torch.cat(valid)
    return PackedBatch(
        layout=BlockLayout(block, lengths, torch.cat(anchors), [len(chosen) for chosen in anchors]),
        features=torch.cat(features)[None],
        block_ids=_block_ids(starts, block, config.mask_token_id),
        labels=torch.cat(labels),
        rows=_output_rows(trained, block),
        valid=trained,
        last_hidden=torch.cat(hidden) if len(hidden) == len(documents) else None,
        covered=covered,
        supervised=int(sum(document.loss_mask.sum() for document in documents)),
    )


def _block_ids(anchor_ids: torch.Tensor, block: int, mask_token_id: int) -> torch.Tensor:
    """[A] -> [A, B]: the anchor, then masks."""
    ids = torch.full((len(anchor_ids), block), mask_token_id)
    ids[:, 0] = anchor_ids
    return ids


def _output_rows(valid: torch.Tensor, block: int) -> torch.Tensor:
    """Indices [R] into the A*B block outputs of the trained slots [A, S]: the last S outputs of a block predict."""
    grid = torch.arange(len(valid) * block).view(-1, block)
    return grid[:, block - valid.shape[1] :][valid]


def _check_states(document: Document, state) -> None:
    for name, tensor in (("features", state.features), ("last_hidden", state.last_hidden)):
        if tensor is not None and len(tensor) != len(document.input_ids):
            raise ValueError(
                f"document {document.id} has {len(document.input_ids)} tokens, but its {name} are of {len(tensor)}"
            )
