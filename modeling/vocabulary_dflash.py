"""A drafter's own embedding and head, where its checkpoint brings them, and a head over a part of the vocabulary.

Shapes: N rows, S slots, V the target's vocabulary, V_d the head's. `d2t` [V_d] holds distances, as in EAGLE-3 and
speculators: draft id j stands for target id `j + d2t[j]`. `t2d` [V] is true where a target id has a draft id.
"""

import torch
from torch import nn

from .sampling_dflash import DraftProposal


def add_own_parts(model: nn.Module, config) -> None:
    """Gives a drafter the modules and buffers of this kind that its config names, under their published names."""
    model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.has_embed_tokens else None
    model.lm_head = None
    if config.has_lm_head:
        model.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
    if config.has_draft_vocabulary:
        model.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        model.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)


def check_vocabulary(d2t: torch.Tensor, t2d: torch.Tensor) -> None:
    """Raises `ValueError` unless each draft id stands for one target id of its own, and `t2d` says the same."""
    ids = target_ids(d2t)
    low, high, size = ids.min().item(), ids.max().item(), t2d.shape[0]
    if low < 0 or high >= size:
        raise ValueError(f"d2t maps draft ids to target ids {low}..{high}, but the target's vocabulary has {size}")
    if len(ids.unique()) != len(ids):
        raise ValueError(f"d2t maps {len(ids)} draft ids to {len(ids.unique())} different target ids")
    mapped = torch.zeros_like(t2d, dtype=torch.bool)
    mapped[ids] = True
    if not torch.equal(mapped, t2d.bool()):
        wrong = (mapped != t2d.bool()).nonzero()[0].item()
        raise ValueError(
            f"d2t and t2d disagree about target id {wrong}: it {'has' if mapped[wrong] else 'lacks'} a draft id by d2t"
        )


def target_ids(d2t: torch.Tensor) -> torch.Tensor:
    """The target id of each draft id, [V_d]."""
    return torch.arange(len(d2t), device=d2t.device) + d2t


def in_target_vocabulary(proposal: DraftProposal, ids: torch.Tensor, size: int) -> DraftProposal:
    """A proposal in draft ids, which stand for target `ids` [V_d] -> the same in target ids.

    Its distributions [N, S, V_d] become [N, S, V], V = `size`.
    """
    ids = ids.to(proposal.tokens.device)
    if proposal.probabilities is None:
        return DraftProposal(ids[proposal.tokens])
    everywhere = proposal.probabilities.new_zeros(*proposal.probabilities.shape[:-1], size)
    everywhere[..., ids] = proposal.probabilities
    return DraftProposal(ids[proposal.tokens], everywhere)
