"""What training borrows of the target: embedding rows, head, and the logits that the target itself would give."""

import torch
from torch import nn
from torch.nn import functional

from dflash.modeling.devices_dflash import execution_device, weights_in_place
from dflash.modeling.draft_tokens_dflash import RestrictedHead
from dflash.modeling.target_dflash import unwrap

# What targets do to their head's output, by the key of their config that says so. `check_logits` proves it complete.
_AFTER_HEAD = {
    "output_multiplier": lambda logits, value: logits * value,
    "logits_scaling": lambda logits, value: logits / value,
    "logit_scale": lambda logits, value: logits * value,
    "lm_head_multiplier": lambda logits, value: logits * value,
    "final_logit_softcapping": lambda logits, value: torch.tanh(logits / value) * value,
}


class TargetParts:
    """The frozen parts of a target that a drafter is trained through.

    Args:
        target (`PreTrainedModel`): the target; its parameters no longer ask for gradients.
    """

    def __init__(self, target):
        self.target, self.model = target, unwrap(target)
        target.requires_grad_(False)
        self.embedding, self.head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self.device = execution_device(self.embedding)
        text = self.model.config.get_text_config(decoder=True)
        found = {key: getattr(text, key, None) for key in _AFTER_HEAD}
        self._after_head = {key: value for key, value in found.items() if value is not None}

    def embed(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Raw embedding rows [..., H] of ids times `scale`: what the drafter gets when it decodes."""
        with weights_in_place(self.embedding):
            rows = functional.embedding(ids.to(self.device), self.embedding.weight)
        return rows if scale == 1.0 else rows * scale

    def logits(self, last_hidden: torch.Tensor, head: RestrictedHead | None = None) -> torch.Tensor:
        """The target's logits [..., V] of what its head takes, [..., H]; with a `RestrictedHead`, of its tokens."""
        logits = (head or self.head)(last_hidden.to(self.device, self.head.weight.dtype))
        for key, value in self._after_head.items():
            logits = _AFTER_HEAD[key](logits, value)
        return logits

    @torch.no_grad()
    def check_logits(self, input_ids: torch.Tensor) -> None:
        """Raises `ValueError` unless `logits` gives what the target gives for input_ids [T]."""
        taken = []
        hook = self.head.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0]))
        try:
            own = self.target(input_ids=input_ids[None].to(self.device), use_cache=False).logits
        finally:
            hook.remove()
        difference = (self.logits(taken[-1]).float() - own.float()).abs().max().item()
        if difference > 1e-2 * own.float().abs().max().item():
            raise ValueError(
                f"{type(self.model).__name__} does something to its head's output that is not known here (its logits "
                f"differ by {difference:.3g}), so its distribution cannot be trained for; use ce_weight alone"
            )


class TrainedHead(RestrictedHead):
    """The target's head for the tokens that are trained; raises `ValueError` if rows cannot be taken of it."""

    def __init__(self, head: nn.Module, token_ids):
        if not self.suits(head):
            raise ValueError(f"head_tokens: data needs a plain linear head, the target's is {type(head).__name__}")
        super().__init__(head, token_ids)

    def places_of(self, labels: torch.Tensor) -> torch.Tensor:
        """Where the logits of tokens [R] are; raises `ValueError` for a token that was left out."""
        ids = self.token_ids.to(labels.device)
        places = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
        if (ids[places] != labels).any():
            outside = labels[ids[places] != labels].unique().tolist()
            raise ValueError(f"tokens {outside[:10]} are trained but not in the restricted head; use head_tokens: all")
        return places
