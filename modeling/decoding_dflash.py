"""The decode loop: prefill, then rounds of draft, verify and commit, until every row is done.

Shapes: N rows, P prompt tokens, w verified positions (the anchor and its draft tokens), K taps, H width, V vocabulary.
"""

import time
import warnings
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers.utils import ModelOutput

from .devices_dflash import execution_device
from .drafting_dflash import BlockDrafter
from .pairing_dflash import check_drafter, check_pair
from .resume_dflash import DFlashSessionCache, give_cache, open_caches
from .sampling_dflash import DraftProposal, Sampler, Verdict, ignored_settings
from .target_dflash import TargetSession, unwrap


@dataclass
class DFlashGenerateOutput(ModelOutput):
    """What `spec_generate(return_dict=True)` gives.

    Attributes:
        sequences: [N, P + T] prompt and new tokens.
        emitted: [N, R] tokens that each round added to each row: accepted draft tokens and one of the target's own.
        drafted: [N, R] draft tokens that each round verified.
        tau: mean of `emitted` per round, None if the first token already ended the text.
        prefill_time, draft_time, verify_time: seconds in the prompt's forward, in drafting, and in verifying.
        cache: a `DFlashSessionCache` of all tokens but the last, to continue from with `spec_generate(cache=...)`.
        scores, logits: for each new token its processed scores or the target's logits [N, V]; only if `generate` was
            asked for them.
    """

    sequences: torch.LongTensor | None = None
    emitted: torch.LongTensor | None = None
    drafted: torch.LongTensor | None = None
    tau: float | None = None
    prefill_time: float | None = None
    draft_time: float | None = None
    verify_time: float | None = None
    cache: DFlashSessionCache | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None


@dataclass
class DecodeState:
    """Where each row stands. Everything else is derived from it."""

    tokens: list[list[int]]  # new tokens of each row
    budgets: list[int]  # how many there may be
    stops: frozenset[int]
    anchor: torch.Tensor  # [N] the last token of each row that goes on; the target has not seen it
    length: torch.Tensor  # [N] tokens before the anchor
    features: torch.Tensor  # [N, n, K*H] of the positions before the anchor that the drafter has not seen
    rounds: list[list[int]]  # emitted counts, [R][N]
    drafted: list[int]  # draft tokens verified, [R]; the same number in all rows

    def remaining(self, row: int) -> int:
        done = self.tokens[row] and self.tokens[row][-1] in self.stops
        return 0 if done else self.budgets[row] - len(self.tokens[row])

    @property
    def width(self) -> int:
        """Positions worth verifying next: no row can emit more than it has left."""
        return max(self.remaining(row) for row in range(len(self.tokens)))

    def append(self, row: int, tokens: list[int]) -> list[int]:
        """Adds tokens up to the first stop token, within the budget; gives those added."""
        tokens = tokens[: self.remaining(row)]
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.stops), len(tokens))
        self.tokens[row] += tokens[:end]
        return tokens[:end]


def speculative_generate(
    draft, target, input_ids, attention_mask=None, return_dict=False, streamer=None, cache=None, **options
):
    """Decodes `input_ids` [1, P] with `target`, speeded up by `draft`; see `DFlashDraftModel.spec_generate`.

    Args:
        draft (`DFlashDraftModel`), target (`PreTrainedModel`): the pair, on any devices.
        input_ids (`torch.LongTensor` of shape [1, P]): the prompt; P >= 1.
        attention_mask ([1, P], *optional*): 0 at padding on the left.
        max_new_tokens, max_length (`int`): at least one; `max_new_tokens` wins, as in `generate`.
        stop_token_ids (`int` or `list[int]`, *optional*): default: `eos_token_id` of the target's generation config.
        temperature, top_k, top_p, min_p, draft_temperature, generator: see `Sampler`.
        prefill_chunk_size (`int`, *optional*): prompt positions that go through the target at a time, so that what it
            holds for the prompt besides its cache stays bounded; default: all of them. At least two go together.
        draft_context_window (`int`, *optional*): the drafter attends to at most this many of the last positions, which
            count from 0 again. Default: all, if prompt and budget fit the drafter's `max_position_embeddings`;
            otherwise as many as fit beside a block, with a warning. The output is exact either way.
        draft_confidence (`float`): verify only the leading draft tokens whose joint probability, by the drafter's own
            distributions, is at least this. Where a round's time grows with the positions verified, fewer of them may
            be faster although tau falls. 0 (default): all.
        block_size (`int`, *optional*): positions of the drafter's block, at most the trained number; 1 is plain
            decoding, or one draft token for a drafter that samples from the anchor.
        cache (`DFlashSessionCache` or `Cache`, *optional*): the `cache` of an earlier call's output, continued in
            place: only the tokens of `input_ids`, which hold the whole text, that it does not stand for are run. Or an
            empty cache of Transformers, to be filled. `past_key_values` is the same.
        cache_implementation (`str`, *optional*): which cache to make, as in `generate`: "dynamic", "static" or
            "quantized"; default: as the target's generation config says.
        cache_config (`dict`, *optional*): its settings; see `target_cache_dflash.make_cache`.
        streamer (`BaseStreamer`, *optional*): gets the prompt, then the tokens of each round.
        return_dict (`bool`): give a `DFlashGenerateOutput` instead of the sequences [1, P + T].
        sampler (`Sampler`, *optional*): takes the place of the sampling settings and of the generation config.

    Raises:
        ValueError: the two models do not belong together, the target cannot be rolled back, or an argument is wrong.
    """
    check_drafter(draft)
    check_pair(draft.config, target)
    prompt = _check_prompt(input_ids, attention_mask, target)
    block = _resolve_block(options.pop("block_size"), draft.config)
    chunk = _check_chunk(options.pop("prefill_chunk_size"))
    budget = _resolve_budget(options.pop("max_new_tokens"), options.pop("max_length"), input_ids.shape[1])
    window = _resolve_window(options.pop("draft_context_window"), draft.config, block, prompt.shape[1] + budget)
    sure = _check_confidence(options.pop("draft_confidence"))
    stops = _resolve_stops(options.pop("stop_token_ids"), target)
    making = options.pop("cache_implementation"), options.pop("cache_config")
    sampler = options.pop("sampler", None) or _make_sampler(target, options)
    outlives = return_dict or cache is not None
    held = open_caches(draft, target, prompt, prompt.shape[1] + budget - 1, chunk, cache, *making)
    was_training = draft.training
    draft.eval()
    try:
        with torch.inference_mode(), TargetSession(target, draft.config.target_layer_ids, held[0]) as session:
            drafter = BlockDrafter(draft, session, block, prompt.shape[1], window, sure, held[1], outlives)
            state, clock = decode(drafter, session, prompt, chunk, [budget], stops, sampler, streamer)
            drafter.skip(state)
    finally:
        draft.train(was_training)
        if streamer is not None:
            streamer.end()
    if outlives:
        if held[1] is None:
            cache = DFlashSessionCache(draft, target, drafter.cache, session.cache)
        give_cache(cache, torch.cat([prompt, prompt.new_tensor([state.tokens[0][:-1]])], dim=1))
    return _result(input_ids, state, clock, cache if return_dict else None)


def decode(drafter, session, prompt, chunk, budgets, stops, sampler, streamer=None):
    """The loop. prompt [N, P] -> the final state and the time spent in each stage."""
    clock = Stopwatch(session.device)
    if streamer is not None:
        streamer.put(prompt.cpu())
    state = prefill(session, drafter, prompt, chunk, budgets, stops, sampler, streamer)
    clock.lap("prefill")
    while width := 0 if sampler.finished else session.room(min(drafter.width, state.width)):
        proposal = drafter.propose(state, sampler, width - 1) if width > 1 else drafter.skip(state)
        clock.lap("draft")
        verdict, features = verify(session, state, proposal, sampler)
        commit(session, state, proposal, verdict, features, streamer)
        clock.lap("verify")
    return state, clock


def prefill(session, drafter, prompt, chunk, budgets, stops, sampler, streamer) -> DecodeState:
    """Runs what the cache lacks of the prompt [N, P] through the target, chunk by chunk, and takes the first token.

    The drafter takes in each chunk's features before the next one; the last chunk's go with its first block.
    """
    rows, length = prompt.shape
    features = None
    for begin, end in chunks(session.length, length, chunk):
        if features is not None:
            drafter.absorb(features)
            features = None
        positions = torch.arange(begin, end, device=session.device)[None]
        logits, features = session.forward(prompt[:, begin:end], positions, logits_to_keep=1)
        session.rollback(0)
    anchor = sampler.choose(logits[:, -1])
    lengths = torch.full((rows,), length, device=session.device)
    state = DecodeState([[] for _ in range(rows)], budgets, stops, anchor, lengths, features, [], [])
    for row, token in enumerate(anchor.tolist()):
        _stream(streamer, state.append(row, [token]))
    return state


def chunks(begin: int, end: int, size: int | None) -> list[tuple[int, int]]:
    """Cuts positions begin..end into pieces of `size`, none of one position unless that is all there is.

    `generate` prefills in one piece, and some state-space mixers step over a single token by another rule than over
    several at once.
    """
    step = max(2, end - begin if size is None else size)
    cuts = list(range(begin, end, step))
    if len(cuts) > 1 and end - cuts[-1] == 1:
        cuts.pop()
    return list(pairwise([*cuts, end]))


def verify(session, state: DecodeState, proposal: DraftProposal | None, sampler) -> tuple[Verdict, torch.Tensor]:
    """One forward of the target over anchor and draft tokens [N, w]; judges them."""
    ids = state.anchor[:, None]
    if proposal is not None:
        ids = torch.cat([ids, proposal.tokens], dim=1)
    offsets = torch.arange(ids.shape[1], device=session.device)
    logits, features = session.forward(ids, state.length[:, None] + offsets, logits_to_keep=ids.shape[1])
    return sampler.verify(proposal, logits), features


def commit(session, state: DecodeState, proposal, verdict: Verdict, features, streamer) -> None:
    """Writes the accepted tokens and the target's own, and takes the rest back from the target."""
    drafted = verdict.next_token[:, None] if proposal is None else proposal.tokens
    facts = torch.cat([verdict.accepted[:, None], verdict.next_token[:, None], drafted], dim=1)
    emitted = []
    for row, (accepted, token, *drafts) in enumerate(facts.tolist()):  # the round's only wait for the device
        added = state.append(row, [*drafts[:accepted], token])
        _stream(streamer, added)
        emitted.append(len(added))
        kept = len(added)  # N = 1: all rows keep the same number; what a stop token cuts off, the caches lose too
    session.rollback(features.shape[1] - kept)
    state.rounds.append(emitted)
    state.drafted.append(features.shape[1] - 1)
    state.features = features[:, :kept]
    state.anchor = verdict.next_token
    state.length = state.length + kept


class Stopwatch:
    """Time per stage. On CUDA it records events, so that measuring does not make the device wait."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.device = device
        self.marks = [("", self._now())]

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def lap(self, stage: str) -> None:
        """Counts the time since the last lap to `stage`."""
        self.marks.append((stage, self._now()))

    def seconds(self, stage: str) -> float:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        total = 0.0
        for (_, begin), (name, end) in pairwise(self.marks):
            if name == stage:
                total += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
        return total


def _stream(streamer, tokens: list[int]) -> None:
    if streamer is not None and tokens:
        streamer.put(torch.tensor(tokens))


def _make_sampler(target, settings: dict) -> Sampler:
    """A sampler of the settings; warns of what the target's generation config asks for beyond them."""
    if ignored := ignored_settings(getattr(target, "generation_config", None)):
        warnings.warn(
            f"not applied, though the target's generation config asks for it: {', '.join(ignored)}; "
            "target.generate(..., custom_generate=draft.custom_generate) applies it",
            stacklevel=4,
        )
    return Sampler(**settings)


def _result(input_ids, state: DecodeState, clock: Stopwatch, cache: DFlashSessionCache | None):
    new = torch.tensor(state.tokens, dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat([input_ids, new], dim=1)
    if cache is None:
        return sequences
    rows = len(state.tokens)
    emitted = torch.tensor(state.rounds, dtype=torch.long).reshape(-1, rows).T
    return DFlashGenerateOutput(
        sequences=sequences,
        emitted=emitted,
        drafted=torch.tensor(state.drafted, dtype=torch.long).expand(rows, -1),
        tau=emitted[emitted > 0].double().mean().item() if emitted.numel() else None,
        prefill_time=clock.seconds("prefill"),
        draft_time=clock.seconds("draft"),
        verify_time=clock.seconds("verify"),
        cache=cache,
    )


def _check_prompt(input_ids, attention_mask, target) -> torch.Tensor:
    """The prompt without its padding, on the target's device."""
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(
            f"input_ids must be a tensor [1, P], got {type(input_ids).__name__}; what a tokenizer returns is passed as "
            "spec_generate(target=target, **inputs, ...)"
        )
    if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be integers [1, P], got {tuple(input_ids.shape)} of {input_ids.dtype}")
    if input_ids.shape[0] > 1:
        raise ValueError(f"input_ids has {input_ids.shape[0]} rows; one sequence a call is supported")
    embedding = unwrap(target).get_input_embeddings()
    rows = embedding.weight.shape[0]
    low, high = input_ids.min().item(), input_ids.max().item()
    if low < 0 or high >= rows:
        raise ValueError(f"input_ids span {low}..{high}, but the target's embedding has {rows} rows")
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
        real = attention_mask[0].bool()
        start = len(real) - int(real.sum())
        if start == len(real) or not real[start:].all():
            raise ValueError("attention_mask must be zeros on the left (padding), then ones, and not only zeros")
        input_ids = input_ids[:, start:]
    return input_ids.to(execution_device(embedding), torch.long)


def _resolve_block(block_size, config) -> int:
    if block_size is None:
        return config.block_size
    if not _is_positive(block_size):
        raise ValueError(f"block_size must be a positive integer, got {block_size!r}")
    if block_size > config.block_size:
        warnings.warn(
            f"block_size={block_size} exceeds the {config.block_size} this drafter was trained with; the output stays "
            "exact, but the extra positions are rarely accepted",
            stacklevel=4,
        )
    return block_size


def _check_chunk(size) -> int | None:
    if size is not None and not _is_positive(size):
        raise ValueError(f"prefill_chunk_size must be a positive integer or None (the whole prompt), got {size!r}")
    return size


def _resolve_window(window, config, block: int, total: int) -> int | None:
    """How many of `total` positions, prompt and budget, the drafter may attend to; None: all."""
    trained = config.max_position_embeddings
    if window is not None:
        if not _is_positive(window):
            raise ValueError(f"draft_context_window must be a positive integer or None (automatic), got {window!r}")
        return window
    if total <= trained:
        return None
    window = max(1, trained - block)
    warnings.warn(
        f"prompt and budget make {total} positions, but the drafter's max_position_embeddings is {trained}: it attends "
        f"to at most the last {window} (draft_context_window chooses another number); the output stays exact",
        stacklevel=4,
    )
    return window


def _check_confidence(value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"draft_confidence must be a number from 0 (verify all draft tokens) to 1, got {value!r}")
    return float(value)


def _is_positive(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _resolve_budget(max_new_tokens, max_length, prompt: int) -> int:
    if max_new_tokens is None and max_length is None:
        raise ValueError("set max_new_tokens or max_length")
    budget = max_length - prompt if max_new_tokens is None else max_new_tokens
    if budget < 1:
        given = f"max_length={max_length}" if max_new_tokens is None else f"max_new_tokens={max_new_tokens}"
        raise ValueError(f"{given} leaves no token to generate after a prompt of {prompt}")
    return budget


def _resolve_stops(stop_token_ids, target) -> frozenset[int]:
    if stop_token_ids is None:
        generation_config = getattr(target, "generation_config", None)
        stop_token_ids = getattr(generation_config, "eos_token_id", None)
    if stop_token_ids is None:
        return frozenset()
    return frozenset([stop_token_ids] if isinstance(stop_token_ids, int) else map(int, stop_token_ids))
