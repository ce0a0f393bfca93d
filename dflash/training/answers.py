"""A target's own answers to prompts, in tokens: through Transformers, many at a time.

An *answerer* maps prompts (lists of token ids) to `(index, Answer)` pairs, in the order in which they are done.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

from dflash.loading import say
from dflash.modeling.sampling_dflash import Sampler, ignored_settings
from dflash.modeling.target_dflash import cache_argument
from dflash.training.row_cache import RowCache


@dataclass(frozen=True)
class Answer:
    """New tokens, with the stop token that ended them; `finished` is False if the budget did."""

    tokens: list[int]
    finished: bool


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are made; see `spec_generate`."""

    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    @property
    def sampling(self) -> dict:
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def transformers_answerer(target, settings: AnswerSettings, rows: int = 32):
    """What answers with a target in this process, `rows` texts at a time: continuously where its cache allows it."""
    if ignored := ignored_settings(target.generation_config):
        say(f"not applied, though the target's generation config asks for it: {', '.join(ignored)}")
    kind = ContinuousAnswerer if RowCache.suits(target) else BatchAnswerer
    return kind(target, settings, rows)


def stop_tokens(target) -> list[int]:
    """The tokens that end the target's answers.

    Raises:
        ValueError: its generation config names none, so that nothing would end.
    """
    stops = target.generation_config.eos_token_id
    if stops is None:
        raise ValueError("the target's generation config has no eos_token_id, so its answers would not end")
    return [stops] if isinstance(stops, int) else list(stops)


class ContinuousAnswerer:
    """Decodes R rows at once; a row whose text ends takes the next prompt, so that none waits for the longest."""

    def __init__(self, target, settings: AnswerSettings, rows: int):
        self.target, self.settings, self.rows = target, settings, rows
        self.stops = frozenset(stop_tokens(target))
        self.device = target.get_input_embeddings().weight.device
        self.cache_name = cache_argument(target)
        generator = torch.Generator(device=self.device).manual_seed(settings.seed)
        self.sampler = Sampler(**settings.sampling, generator=generator)

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]]) -> Iterator[tuple[int, Answer]]:
        """Answers prompts, longest first."""
        queue = iter(sorted(range(len(prompts)), key=lambda i: -len(prompts[i])))
        rows = min(self.rows, len(prompts))
        capacity = max(map(len, prompts), default=0) + self.settings.max_new_tokens
        cache, texts = RowCache(rows, capacity, self.device), {}  # row: (index, new tokens)
        last = torch.zeros(rows, dtype=torch.long, device=self.device)
        for row in range(rows):
            yield from self._refill(row, queue, prompts, cache, last, texts)
        while texts:
            if len(texts) < len(last):  # no prompts are left for the other rows
                kept = sorted(texts)
                texts = {i: texts[row] for i, row in enumerate(kept)}
                cache.keep(kept)
                last = last[kept]
            last = self._step(cache, last)
            for row, token in enumerate(last.tolist()):
                texts[row][1].append(token)
                if answer := self._ended(texts[row][1]):
                    yield texts.pop(row)[0], answer
                    yield from self._refill(row, queue, prompts, cache, last, texts)

    def _refill(self, row, queue, prompts, cache, last, texts):
        """Puts the next prompt into a row; answers that are one token long are given at once."""
        for index in queue:
            token = self._prefill(row, prompts[index], cache)
            if answer := self._ended([token]):
                yield index, answer
                continue
            last[row], texts[row] = token, (index, [token])
            return

    def _ended(self, tokens: list[int]) -> Answer | None:
        if tokens[-1] in self.stops:
            return Answer(tokens, finished=True)
        return Answer(tokens, finished=False) if len(tokens) == self.settings.max_new_tokens else None

    def _prefill(self, row: int, prompt: list[int], cache: RowCache) -> int:
        """Runs a prompt, whose states become the row's; its first token."""
        text = DynamicCache(config=self.target.config)
        ids = torch.tensor([prompt], device=self.device)
        logits = self.target(ids, **{self.cache_name: text}, use_cache=True, logits_to_keep=1).logits
        cache.fill(row, text)
        return self.sampler.choose(logits[:, -1]).item()

    def _step(self, cache: RowCache, last: torch.Tensor) -> torch.Tensor:
        """The token after each row's `last` [R]."""
        mask = cache.mask(self.target.dtype)
        inputs = {"input_ids": last[:, None], "position_ids": cache.lengths[:, None], "attention_mask": mask}
        logits = self.target(**inputs, **{self.cache_name: cache}, use_cache=True).logits
        cache.advance()
        return self.sampler.choose(logits[:, -1])


class BatchAnswerer:
    """Decodes batches of prompts of similar length with `generate`; for targets with other caches."""

    def __init__(self, target, settings: AnswerSettings, rows: int):
        self.target, self.settings, self.rows = target, settings, rows
        self.stops = stop_tokens(target)
        self.device = target.get_input_embeddings().weight.device

    def __call__(self, prompts: list[list[int]]) -> Iterator[tuple[int, Answer]]:
        """Answers prompts, longest first."""
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        for begin in range(0, len(order), self.rows):
            batch = order[begin : begin + self.rows]
            for index, tokens in zip(batch, self._generate([prompts[i] for i in batch], begin), strict=True):
                end = next((i + 1 for i, token in enumerate(tokens) if token in self.stops), None)
                yield index, Answer(tokens[:end], finished=end is not None)

    def _generate(self, prompts: list[list[int]], number: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[self.stops[0]] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        greedy = self.settings.temperature == 0
        sampling = {} if greedy else {**self.settings.sampling, "top_k": self.settings.top_k or 0}
        config = GenerationConfig(
            max_new_tokens=self.settings.max_new_tokens,
            do_sample=not greedy,
            eos_token_id=self.stops,
            pad_token_id=self.stops[0],
            **sampling,
        )
        kept = self.target.generation_config
        self.target.generation_config = config  # `generate` would take from there what the given one does not say
        try:
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(self.settings.seed + number)
                output = self.target.generate(ids.to(self.device), attention_mask=mask.to(self.device))
        finally:
            self.target.generation_config = kept
        return output[:, width:].tolist()
