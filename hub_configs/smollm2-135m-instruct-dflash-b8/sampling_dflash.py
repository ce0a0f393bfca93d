"""How a token is chosen and how a draft is judged: greedy, and lossless rejection sampling.

Shapes: N rows, w positions of a verified block (the anchor and w - 1 draft tokens), V vocabulary.
"""

from dataclasses import dataclass

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Settings of a generation config that only `generate` applies, and what they are when off (besides None and 0).
_NOT_APPLIED = {
    **dict.fromkeys(("repetition_penalty", "num_beams", "guidance_scale", "diversity_penalty"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens", "bad_words_ids", "sequence_bias"), ()),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "stop_strings"), ()),
}


@dataclass
class DraftProposal:
    """Draft tokens [N, w-1] and the distributions [N, w-1, V] they were drawn from; None: certain (one-hot)."""

    tokens: torch.Tensor
    probabilities: torch.Tensor | None = None

    def first(self, count: int) -> "DraftProposal":
        """The proposal for the first `count` slots only."""
        kept = None if self.probabilities is None else self.probabilities[:, :count]
        return DraftProposal(self.tokens[:, :count], kept)

    def at(self, slot: int) -> "DraftProposal":
        """The proposal for one slot."""
        kept = None if self.probabilities is None else self.probabilities[:, slot : slot + 1]
        return DraftProposal(self.tokens[:, slot : slot + 1], kept)

    def to(self, device: torch.device) -> "DraftProposal":
        kept = None if self.probabilities is None else self.probabilities.to(device)
        return DraftProposal(self.tokens.to(device), kept)


@dataclass
class Verdict:
    """Draft tokens kept per row [N], and the target's own token after them [N]."""

    accepted: torch.Tensor
    next_token: torch.Tensor


class Sampler:
    """The sampling settings of one call.

    Args:
        temperature (`float`): 0 is greedy; otherwise tokens follow softmax(logits / temperature) after the warpers.
        top_k, top_p, min_p (*optional*): as in `generate`, in its order: temperature, top-k, top-p, min-p.
        draft_temperature (`float`): 0 proposes the drafter's most likely tokens; above 0 they are drawn from its own
            distribution under the same top-k, top-p and min-p.
        generator (`torch.Generator`, *optional*): source of all random numbers.

    Raises:
        ValueError: a setting is out of range, or asks for sampling at temperature 0.
    """

    finished = False  # whether something besides stop tokens and budget has ended the text

    def __init__(self, temperature=0.0, top_k=None, top_p=None, min_p=None, draft_temperature=0.0, generator=None):
        for name, value in (("temperature", temperature), ("draft_temperature", draft_temperature)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        if draft_temperature > 0 and temperature == 0:
            raise ValueError(f"draft_temperature={draft_temperature} needs temperature > 0; temperature is 0 (greedy)")
        self.greedy = temperature == 0
        self.warp = _warpers(temperature or 1.0, top_k, top_p, min_p)
        self.draft_warp = _warpers(draft_temperature, top_k, top_p, min_p) if draft_temperature > 0 else None
        self.generator = generator

    def target_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's distribution after all warpers, in float32; logits [..., V]."""
        return _warped(self.warp, logits)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """One token per row of the target's logits [N, V]."""
        if self.greedy:
            return logits.float().argmax(-1)
        return self.draw(self.target_probabilities(logits))

    def pick(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft tokens for draft logits [..., V], and the distribution they were drawn from (None: argmax)."""
        if self.draft_warp is None:
            return logits.argmax(-1), None
        probabilities = _warped(self.draft_warp, logits)
        return self.draw(probabilities), probabilities

    def draw(self, probabilities: torch.Tensor) -> torch.Tensor:
        """One draw per row of [..., V]."""
        flat = probabilities.flatten(0, -2)
        return torch.multinomial(flat, 1, generator=self.generator).view(probabilities.shape[:-1])

    def verify(self, proposal: DraftProposal | None, logits: torch.Tensor) -> Verdict:
        """Judges the draft tokens [N, w-1] by the target's logits [N, w, V] after the anchor and each of them."""
        if self.greedy:
            return _verify_greedy(proposal, logits)
        probabilities = self.target_probabilities(logits)
        if proposal is None:
            return Verdict(_none_accepted(logits), self.draw(probabilities[:, 0]))
        chance = acceptance_probability(probabilities, proposal)
        dice = torch.rand(chance.shape, generator=self.generator, device=chance.device, dtype=chance.dtype)
        accepted = _leading(dice < chance)
        return Verdict(accepted, self.draw(next_token_distribution(probabilities, proposal, accepted)))


def acceptance_probability(target: torch.Tensor, proposal: DraftProposal) -> torch.Tensor:
    """min(1, p/q) of each draft token [N, w-1], for the target's distributions [N, w, V] (arXiv 2211.17192)."""
    tokens = proposal.tokens[..., None]
    p = target[:, :-1].gather(-1, tokens)[..., 0]
    if proposal.probabilities is None:
        return p
    q = proposal.probabilities.gather(-1, tokens)[..., 0]
    return (p / q).clamp(max=1.0)


def next_token_distribution(target: torch.Tensor, proposal: DraftProposal, accepted: torch.Tensor) -> torch.Tensor:
    """Distribution [N, V] of the token after `accepted` [N] draft tokens.

    All w-1 accepted: the target's own; otherwise max(p - q, 0), normalised, at the rejected position.
    """
    rows = torch.arange(len(accepted), device=target.device)
    p = target[rows, accepted]
    slot = accepted.clamp(max=proposal.tokens.shape[1] - 1)
    if proposal.probabilities is None:
        residual = p.scatter(-1, proposal.tokens[rows, slot][:, None], 0.0)
    else:
        residual = (p - proposal.probabilities[rows, slot]).clamp(min=0.0)
    mass = residual.sum(-1, keepdim=True)
    complete = (accepted == proposal.tokens.shape[1])[:, None]
    # A residual without mass means p = q up to rounding: then the rejection itself was rounding, and p is right.
    return torch.where(complete | (mass <= 0), p, residual / mass.clamp(min=torch.finfo(p.dtype).tiny))


def ignored_settings(generation_config) -> list[str]:
    """Settings of a generation config that would change what `generate` gives, but are not applied here."""
    found = {name: getattr(generation_config, name, None) for name in _NOT_APPLIED}
    return [f"{name}={value}" for name, value in found.items() if value not in (None, 0, *_NOT_APPLIED[name])]


def _verify_greedy(proposal: DraftProposal | None, logits: torch.Tensor) -> Verdict:
    choices = logits.float().argmax(-1)
    if proposal is None:
        return Verdict(_none_accepted(logits), choices[:, 0])
    accepted = _leading(proposal.tokens == choices[:, :-1])
    return Verdict(accepted, choices.gather(1, accepted[:, None])[:, 0])


def _leading(kept: torch.Tensor) -> torch.Tensor:
    """Number of leading true values per row: [N, w-1] -> [N]."""
    return kept.long().cumprod(-1).sum(-1)


def _none_accepted(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)


def _warpers(temperature, top_k, top_p, min_p) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p != 1.0:
        warpers.append(TopPLogitsWarper(float(top_p)))
    if min_p:
        warpers.append(MinPLogitsWarper(float(min_p)))
    return warpers


def _warped(warpers: LogitsProcessorList, logits: torch.Tensor) -> torch.Tensor:
    scores = warpers(None, logits.float().reshape(-1, logits.shape[-1]))
    return scores.softmax(-1).view(logits.shape)
