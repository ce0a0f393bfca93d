"""The tau of greedy decoding, from texts that the target has written greedily already.

Such a text is what decoding gives, whatever the drafter. Where a round begins follows from what the rounds before it
accepted, and what it accepts follows from the block at its anchor. So one packed forward with a block at every position
tells all rounds, and nothing needs to be decoded. (Random anchors promise more than is true: a round begins where the
last one failed, so at a position that is hard to predict.)
"""

import torch

from dflash.training.anchors import candidates
from dflash.training.blocks import pack_blocks
from dflash.training.documents import Document
from dflash.training.features import OnlineFeatures
from dflash.training.step import Objective, TrainableDrafter
from dflash.training.target import TargetParts, TrainedHead


@torch.no_grad()
def replayed_tau(draft, target, documents: list[Document], max_new_tokens: int = 128) -> float:
    """Mean tokens per round that greedy decoding of the documents' answers takes; 1.0 if none takes a round.

    Args:
        draft (`DFlashDraftModel`): in evaluation mode, of a kind that can be trained; see `check_trainable`.
        target (`PreTrainedModel`): its target, which wrote the answers greedily.
        documents: each answer of a document, where its loss mask is set, is decoded from the text before it.
        max_new_tokens: of each answer.
    """
    parts, ids = TargetParts(target), draft.config.draft_token_ids
    head = TrainedHead(parts.head, ids) if ids is not None and TrainedHead.suits(parts.head) else None
    model = TrainableDrafter(draft, parts, Objective(), head=head)
    source = OnlineFeatures(target, draft.config.target_layer_ids)
    emitted = rounds = 0
    for document in documents:
        anchors = candidates(document.loss_mask)
        if not len(anchors):
            continue
        batch = pack_blocks([document], [anchors], source([document]), draft.config)
        runs = dict(zip(anchors.tolist(), model.accepted(batch).tolist(), strict=True))
        for begin, end in answers_of(document.loss_mask):
            last = min(end, begin + max_new_tokens) - 1
            taken = rounds_between(begin, last, runs)
            emitted, rounds = emitted + (last - begin if taken else 0), rounds + taken
    return emitted / rounds if rounds else 1.0


def answers_of(loss_mask: torch.Tensor) -> list[tuple[int, int]]:
    """Where each answer begins and ends, past its last token, of those that have a text before them."""
    edges = torch.diff(loss_mask.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    begins, ends = ((edges == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin]


def rounds_between(anchor: int, last: int, runs: dict[int, int]) -> int:
    """Rounds that lead from an anchor to the position `last`: each gives its accepted run and a token of the target."""
    rounds = 0
    while anchor < last:
        anchor += runs[anchor] + 1
        rounds += 1
    return rounds
