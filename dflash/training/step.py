"""One forward of a drafter over a packed batch, to its loss and the counts that metrics are made of.

Shapes: A blocks, B block size, S predicted positions per block, R trained rows, H width.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from dflash.training.blocks import PackedBatch
from dflash.training.losses import (
    LossMix,
    accepted_runs,
    chunked_rows,
    decay_gamma,
    decay_weights,
    dpace_weights,
)
from dflash.training.masks import PackedAttention
from dflash.training.target import TargetParts, TrainedHead


@dataclass(frozen=True)
class Objective:
    """What a drafter is trained for; see the fields of the same names in `TrainConfig`."""

    mix: LossMix = field(default_factory=LossMix)
    position_weights: str = "dpace"
    dpace_alpha: float = 0.5
    decay_gamma: float | None = None
    head_chunk: int = 512

    def weigh(self, cross_entropy: torch.Tensor, valid: torch.Tensor, block_size: int) -> torch.Tensor:
        """Weights [A, S] of the slots."""
        if self.position_weights == "dpace":
            return dpace_weights(cross_entropy, valid, self.dpace_alpha)
        if self.position_weights == "decay":
            return decay_weights(valid, decay_gamma(block_size, self.decay_gamma))
        return valid.to(cross_entropy.dtype)


def check_trainable(config) -> None:
    """Raises `ValueError` for a drafter with parts that the packed forward does not train."""
    if config.has_correction:
        raise ValueError("training the candidate selector of a DFlash 2 drafter is not supported")
    for key in ("attention_sink_bias", "window_from_anchor"):
        if getattr(config, key):
            raise ValueError(f"training a drafter with {key} is not supported")
    if config.has_embed_tokens or config.has_lm_head:
        raise ValueError("training a drafter with an embedding or a head of its own is not supported")


class TrainableDrafter(nn.Module):
    """A drafter whose forward takes a `PackedBatch` and gives sums, so that they add up over batches and processes.

    Args:
        draft (`DFlashDraftModel`): the drafter; the only parameters.
        parts (`TargetParts`): of its target.
        objective (`Objective`): what it is trained for.
        flex (`bool`): attend by flex_attention; see `PackedAttention`.
        head (`TrainedHead`, *optional*): in place of the target's.
    """

    def __init__(self, draft, parts: TargetParts, objective: Objective, flex=False, head: TrainedHead | None = None):
        super().__init__()
        check_trainable(draft.config)
        self.draft = draft
        self.objective, self.flex = objective, flex
        self._borrowed = parts, head  # in a tuple, so that they are no parameters of this module
        self._no_split_modules = draft._no_split_modules

    def forward(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """Sums over the batch.

        `loss`: weighted losses, differentiable; `weight`: what to divide it by; `cross_entropy` and `rows`: its plain
        mean's; `correct` and `counts`: of each slot [S]; `emitted` and `blocks`: what drafts of complete blocks would
        have given, an accepted run and one token, and how many these are.
        """
        hidden = self.block_outputs(batch)
        loss, cross_entropy, correct = self._row_losses(hidden, batch)
        valid = batch.valid.to(hidden.device)
        grid = cross_entropy.new_zeros(valid.shape).masked_scatter(valid, cross_entropy)
        weights = self.objective.weigh(grid, valid, self.draft.config.block_size)
        right = torch.zeros_like(valid).masked_scatter(valid, correct)
        complete = valid.all(dim=1)
        return {
            "loss": (loss * weights[valid]).sum(),
            "weight": weights.sum(),
            "cross_entropy": cross_entropy.sum(),
            "rows": valid.sum(),
            "correct": right.sum(dim=0),
            "counts": valid.sum(dim=0),
            "emitted": ((accepted_runs(right, valid) + 1) * complete).sum(),
            "blocks": complete.sum(),
        }

    def accepted(self, batch: PackedBatch) -> torch.Tensor:
        """How many draft tokens of each block [A] are those of the text, from its first on."""
        hidden, head = self.block_outputs(batch), self._borrowed[1]
        trained = hidden.flatten(0, 1).index_select(0, batch.rows.to(hidden.device))
        chunks = trained.split(self.objective.head_chunk)
        best = torch.cat([self.draft.compute_logits(part, self._project).argmax(dim=-1) for part in chunks])
        chosen = best if head is None else head.token_ids.to(best.device)[best]
        valid = batch.valid.to(best.device)
        right = torch.zeros_like(valid).masked_scatter(valid, chosen == batch.labels.to(best.device))
        return accepted_runs(right, valid)

    def block_outputs(self, batch: PackedBatch) -> torch.Tensor:
        """The drafter's outputs [A, B, H] for all blocks."""
        weight, config = self.draft.hidden_norm.weight, self.draft.config
        noise = self._borrowed[0].embed(batch.block_ids, config.input_embedding_scale)
        return self.draft(
            noise_embeds=noise.to(weight.device, weight.dtype),
            context_hidden_states=batch.features.to(weight.device, weight.dtype),
            position_ids=batch.layout.positions.to(weight.device),
            attention=PackedAttention(batch.layout, self.flex, weight.device),
        ).last_hidden_state

    def _row_losses(self, hidden, batch: PackedBatch):
        """Loss, cross-entropy and correctness [R] of block outputs [A, B, H]."""
        parts, head = self._borrowed
        trained = hidden.flatten(0, 1).index_select(0, batch.rows.to(hidden.device))
        labels = (batch.labels if head is None else head.places_of(batch.labels)).to(hidden.device)
        mix = self.objective.mix
        if mix.needs_target and batch.last_hidden is None:
            raise ValueError("kl_weight and tv_weight need the target's last_hidden; these features have none")

        def row_loss(part, rows):
            logits = self.draft.compute_logits(part, self._project)
            target_logits = None
            if mix.needs_target:
                with torch.no_grad():
                    target_logits = parts.logits(batch.last_hidden[rows], head).to(logits.device)
            loss, cross_entropy = mix.rows(logits, labels[rows], target_logits)
            return loss, cross_entropy, logits.detach().argmax(dim=-1) == labels[rows]

        return chunked_rows(trained, row_loss, self.objective.head_chunk)

    def _project(self, rows: torch.Tensor) -> torch.Tensor:
        """The head's logits of outputs [R, H]."""
        parts, head = self._borrowed
        if head is not None:
            return head(rows)
        return parts.head(rows.to(parts.device, parts.head.weight.dtype)).to(rows.device)
