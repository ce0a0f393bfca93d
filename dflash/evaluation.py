"""How many tokens a drafter saves: speculative decoding of held-out prompts, by the code that users run.

Nothing is simulated: every figure is computed from what `spec_generate` emitted.
"""

import time
from dataclasses import dataclass

import torch

from dflash.check import acceptance_by_slot
from dflash.generate import decode_plain


@dataclass(frozen=True)
class Decoded:
    """One call of `spec_generate`.

    Attributes:
        tokens: the new tokens.
        emitted: tokens that each round added.
        slots: draft tokens (accepted, tried) of each round, but not of one that a stop token cut.
        seconds: of the whole call.
        plain_seconds, plain_tokens: of decoding the same prompt without a drafter, if that was asked for.
        identical: whether that gave the same tokens; None: not compared, or sampled.
    """

    tokens: list[int]
    emitted: list[int]
    slots: list[tuple[int, int]]
    seconds: float
    plain_seconds: float | None = None
    plain_tokens: int | None = None
    identical: bool | None = None


@dataclass(frozen=True)
class Score:
    """What several `Decoded` make together.

    Attributes:
        tau: mean tokens per round over all rounds; None without a round.
        acceptance: for each draft slot, the share of the rounds that tried it and accepted it, and so all before it.
        tokens_per_second: prompts included; `plain_tokens_per_second`: without a drafter.
        speedup: the former by the latter.
        identical, different: greedy texts that equal, or do not equal, those without a drafter.
    """

    texts: int
    new_tokens: int
    rounds: int
    tau: float | None
    acceptance: list[float | None]
    tokens_per_second: float
    plain_tokens_per_second: float | None = None
    speedup: float | None = None
    identical: int = 0
    different: int = 0

    def __str__(self) -> str:
        tau = "none" if self.tau is None else f"{self.tau:.2f}"
        slots = " ".join("-" if rate is None else f"{rate:.0%}" for rate in self.acceptance)
        line = f"tau {tau}, {self.new_tokens} tokens in {self.rounds} rounds, {self.tokens_per_second:.1f} tok/s"
        if self.speedup is not None:
            line += f", plain {self.plain_tokens_per_second:.1f} tok/s, so {self.speedup:.2f}x"
        if self.identical or self.different:
            line += f", {self.identical} of {self.identical + self.different} texts identical"
        return f"{line}; accepted by slot: {slots}"


@dataclass(frozen=True)
class Decoding:
    """How the prompts are decoded; see `spec_generate`."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    draft_temperature: float = 0.0
    draft_confidence: float = 0.0
    block_size: int | None = None
    compare: bool = False

    @property
    def sampling(self) -> dict:
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def decode(draft, target, input_ids: torch.Tensor, settings: Decoding, seed: int = 0) -> Decoded:
    """Decodes input_ids [1, P] with a drafter, and without one if the settings say so."""
    input_ids = input_ids.to(target.device)
    begin = time.perf_counter()
    output = draft.spec_generate(
        target=target,
        input_ids=input_ids,
        max_new_tokens=settings.max_new_tokens,
        block_size=settings.block_size,
        draft_temperature=settings.draft_temperature,
        draft_confidence=settings.draft_confidence,
        generator=torch.Generator(device=target.device).manual_seed(seed),
        return_dict=True,
        **settings.sampling,
    )
    tokens = output.sequences[0, input_ids.shape[1] :].tolist()
    seconds = time.perf_counter() - begin
    emitted = output.emitted[0].tolist()
    slots = slots_of(emitted, output.drafted[0].tolist(), settings.max_new_tokens)
    if not settings.compare:
        return Decoded(tokens, emitted, slots, seconds)
    prompt = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    plain, plain_seconds = decode_plain(target, prompt, settings.sampling, settings.max_new_tokens)
    identical = torch.equal(plain, output.sequences) if settings.temperature == 0 else None
    return Decoded(tokens, emitted, slots, seconds, plain_seconds, plain.shape[1] - input_ids.shape[1], identical)


def slots_of(emitted: list[int], drafted: list[int], max_new_tokens: int) -> list[tuple[int, int]]:
    """Draft tokens (accepted, tried) of each round, from the tokens that each emitted and the budget of the call.

    A text that ended before its budget ended with a stop token: what its last round accepted after it is not known.
    """
    slots = [(count - 1, tried) for count, tried in zip(emitted, drafted, strict=True)]
    return slots[:-1] if sum(emitted) < max_new_tokens - 1 else slots


def score(decoded: list[Decoded], block: int) -> Score:
    """The figures of several calls together."""
    emitted = [count for one in decoded for count in one.emitted]
    speed = sum(len(one.tokens) for one in decoded) / sum(one.seconds for one in decoded)
    compared = [one for one in decoded if one.plain_seconds is not None]
    plain = None
    if compared:
        plain = sum(one.plain_tokens for one in compared) / sum(one.plain_seconds for one in compared)
    return Score(
        texts=len(decoded),
        new_tokens=sum(len(one.tokens) for one in decoded),
        rounds=len(emitted),
        tau=sum(emitted) / len(emitted) if emitted else None,
        acceptance=acceptance_by_slot([slot for one in decoded for slot in one.slots], block - 1),
        tokens_per_second=speed,
        plain_tokens_per_second=plain,
        speedup=None if plain is None else speed / plain,
        identical=sum(one.identical is True for one in decoded),
        different=sum(one.identical is False for one in decoded),
    )


def real_tau(
    draft, target, prompts, max_new_tokens: int = 128, temperature: float = 0.0, seed: int = 0, block_size=None
) -> float:
    """Mean tokens per round of real speculative decoding; 1.0 if no prompt took a round.

    Args:
        draft (`DFlashDraftModel`), target (`PreTrainedModel`): the pair; modes and gradients are left as they are.
        prompts: token ids of held-out prompts, each [P] or [1, P], as the target is served with them; see
            `prompts_of` for those of documents.
        seed: of the first prompt's sampling; each following one has the next.
    """
    settings = Decoding(max_new_tokens=max_new_tokens, temperature=temperature, block_size=block_size)
    decoded = [
        decode(draft, target, ids.reshape(1, -1), settings, seed + i)
        for i, ids in enumerate(map(torch.as_tensor, prompts))
    ]
    if not decoded:
        raise ValueError("no prompts to decode")
    tau = score(decoded, draft.config.proposals(block_size) + 1).tau
    return 1.0 if tau is None else tau


def prompts_of(documents) -> list[torch.Tensor]:
    """The tokens [P] before the target's first own token, of each training `Document` that has both."""
    prompts = []
    for document in documents:
        first = int(document.loss_mask.int().argmax()) if document.loss_mask.any() else 0
        if first:
            prompts.append(document.input_ids[:first])
    return prompts
