"""Where the blocks of a document begin: random anchors, drawn anew in each epoch.

Shapes: T tokens, A anchors, S predicted positions per block.
"""

import hashlib

import torch

from dflash.training.documents import Document


def candidates(loss_mask: torch.Tensor) -> torch.Tensor:
    """Positions [n] of loss_mask [T] at which decoding could place an anchor: it and the next token are the target's.

    Position 0 is none of them: decoding always has a prompt, so no block is ever drafted without context.
    """
    written = loss_mask.bool()
    usable = written[:-1] & written[1:]
    usable[:1] = False
    return usable.nonzero()[:, 0]


def anchor_budget(count: int, max_anchors: int, share: float) -> int:
    """Anchors to draw from `count` candidates: a share of them, at least one, at most `max_anchors`."""
    return min(max_anchors, count, max(1, round(share * count)))


def draw_anchors(document: Document, epoch: int, seed: int, max_anchors: int, share: float = 1.0) -> torch.Tensor:
    """Anchor positions [A] of a document in an epoch, in order; the same for the same (seed, epoch, document id)."""
    found = candidates(document.loss_mask)
    budget = anchor_budget(len(found), max_anchors, share)
    return found[torch.randperm(len(found), generator=_generator(seed, epoch, document.id))[:budget]].sort().values


def document_order(count: int, epoch: int, seed: int) -> list[int]:
    """The order in which an epoch goes through `count` documents."""
    return torch.randperm(count, generator=_generator(seed, epoch, "")).tolist()


def trainable_documents(documents: list[Document]) -> list[Document]:
    """The documents that have a candidate for an anchor.

    Raises:
        ValueError: none has.
    """
    kept = [document for document in documents if len(candidates(document.loss_mask))]
    if not kept:
        raise ValueError(
            f"none of {len(documents)} documents has two supervised tokens in a row after its first token, so there is "
            "nowhere to place a block; is loss_mask set on the answers?"
        )
    return kept


def label_positions(anchors: torch.Tensor, slots: int) -> torch.Tensor:
    """Positions [A, S] that blocks at anchors [A] predict: in either layout those right after the anchor."""
    return anchors[:, None] + 1 + torch.arange(slots)


def label_validity(anchors: torch.Tensor, slots: int, loss_mask: torch.Tensor) -> torch.Tensor:
    """Which predicted positions [A, S] are trained: up to the first that the target did not write, or the end.

    What follows a gap is never drafted from before it, as decoding stops there.
    """
    positions = label_positions(anchors, slots)
    inside = positions < len(loss_mask)
    written = loss_mask.bool()[positions.clamp(max=len(loss_mask) - 1)] & inside
    return written.cumprod(dim=1).bool()


def _generator(seed: int, epoch: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))
