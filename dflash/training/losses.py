"""What a block's outputs are trained for, and how much each slot counts.

Shapes: A blocks, S predicted positions per block, R trained rows, H width, V vocabulary (or the part of it in use).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

DECAY = {16: 7.0, 10: 5.0, 8: 4.0}  # block size: gamma (DFlash, arXiv 2602.06036, appendix A.1)


@dataclass(frozen=True)
class LossMix:
    """Weights of the three losses of a row; cross-entropy is to the data token, the others to the target's own
    distribution p, with q the drafter's: KL(p || q), and total variation, which is 1 - the acceptance rate at T = 1."""

    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0

    @property
    def needs_target(self) -> bool:
        return bool(self.kl or self.tv)

    def rows(self, logits, labels, target_logits=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss [R] and detached cross-entropy [R] of logits [R, V], labels [R] and the target's logits [R, V]."""
        logits = logits.float() if logits.dtype != torch.float64 else logits
        cross_entropy = functional.cross_entropy(logits, labels, reduction="none")
        loss = self.ce * cross_entropy
        if self.needs_target:
            log_q = logits.log_softmax(dim=-1)
            log_p = target_logits.to(logits.dtype).log_softmax(dim=-1)
            p = log_p.exp()
            if self.kl:
                loss = loss + self.kl * (p * (log_p - log_q)).sum(dim=-1)
            if self.tv:
                loss = loss + self.tv * 0.5 * (p - log_q.exp()).abs().sum(dim=-1)
        return loss, cross_entropy.detach()


class _ChunkedRows(torch.autograd.Function):
    """Per-row losses of hidden states [R, H] whose [R, V] logits never exist at once.

    A row's loss depends on that row alone, so d(sum of w_i * loss_i) / dh_i = w_i * d loss_i / dh_i: the derivative is
    taken while a chunk's logits are there, and backward only scales it. Nothing is computed twice.
    """

    @staticmethod
    def forward(ctx, hidden, row_loss: Callable, chunk: int):
        losses, gradients, extras = [], [], []
        wanted = ctx.needs_input_grad[0]
        for begin in range(0, len(hidden), chunk):
            rows = slice(begin, begin + chunk)
            with torch.set_grad_enabled(wanted):
                part = hidden[rows].detach().requires_grad_(wanted)
                loss, *extra = row_loss(part, rows)
                if wanted:
                    gradients += torch.autograd.grad(loss.sum(), part)
            losses.append(loss.detach())
            extras.append(extra)
        ctx.save_for_backward(torch.cat(gradients) if wanted else None)
        extras = [torch.cat(column) for column in zip(*extras, strict=True)]
        ctx.mark_non_differentiable(*extras)
        return torch.cat(losses), *extras

    @staticmethod
    def backward(ctx, grad_loss, *_):
        (gradient,) = ctx.saved_tensors
        return grad_loss[:, None].to(gradient.dtype) * gradient, None, None


def chunked_rows(hidden: torch.Tensor, row_loss: Callable, chunk: int) -> tuple[torch.Tensor, ...]:
    """Losses [R] of hidden states [R, H], differentiable in these alone, and whatever else `row_loss` gives per row.

    Args:
        row_loss: maps a chunk of hidden states [r, H] and its slice to a loss [r] and further tensors [r].
        chunk: rows at a time.
    """
    return _ChunkedRows.apply(hidden, row_loss, chunk)


def dpace_weights(cross_entropy: torch.Tensor, valid: torch.Tensor, alpha: float) -> torch.Tensor:
    """Weights [A, S] of D-PACE (arXiv 2605.18810): how much of the expected accepted length depends on a slot.

    With q = exp(-CE) of each slot, smoothed to (1 - alpha) q + alpha, slot j weighs the sum over m >= j of the product
    of the first m: the expected number of accepted slots from j on. Slots that are not valid end the block.
    """
    smoothed = ((1 - alpha) * torch.exp(-cross_entropy.detach()) + alpha) * valid
    reached = smoothed.cumprod(dim=1)
    return reached.flip(1).cumsum(dim=1).flip(1) * valid


def decay_weights(valid: torch.Tensor, gamma: float) -> torch.Tensor:
    """Weights [A, S] exp(-s / gamma) of the predicted positions s = 0, 1, ...; 0 where not valid."""
    slots = torch.arange(valid.shape[1], device=valid.device)
    return torch.exp(-slots / gamma) * valid


def decay_gamma(block_size: int, gamma: float | None) -> float:
    """The given gamma, or the published one for a block size; raises `ValueError` for one that has none."""
    if gamma is not None:
        return gamma
    if block_size not in DECAY:
        raise ValueError(
            f"position_weights decay has a published decay_gamma for block sizes {sorted(DECAY)} only, the drafter's "
            f"is {block_size}; set decay_gamma"
        )
    return DECAY[block_size]


def accepted_runs(correct: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Leading correct slots [A] of each block, of correct [A, S]; what is not valid ends a run."""
    return (correct & valid).cumprod(dim=1).sum(dim=1)
