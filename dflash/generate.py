"""`dflash generate`: decode one prompt with a target and its drafter, and say what it cost."""

import json
import time
from dataclasses import asdict, dataclass

import torch
from transformers import TextStreamer

from dflash.loading import PairOptions, encode, load, say
from dflash.modeling.pairing_dflash import check_drafter


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PairOptions):
    """What the command line asks for."""

    prompt: str
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    draft_temperature: float = 0.0
    draft_confidence: float = 0.0
    seed: int | None = None
    compare: bool = False


@dataclass(frozen=True)
class Report:
    """What one run produced. Speeds are new tokens per second, prompt included."""

    text: str
    prompt_tokens: int
    new_tokens: int
    rounds: int
    tau: float | None
    tokens_per_second: float
    plain_tokens_per_second: float | None = None
    identical: bool | None = None

    def summary(self) -> str:
        tau = "none" if self.tau is None else f"{self.tau:.2f}"
        line = f"{self.new_tokens} tokens in {self.rounds} rounds, tau {tau}, {self.tokens_per_second:.1f} tok/s"
        if self.plain_tokens_per_second is None:
            return line
        ratio = self.tokens_per_second / self.plain_tokens_per_second
        line += f"; plain decoding {self.plain_tokens_per_second:.1f} tok/s, so {ratio:.2f}x"
        if self.identical is not None:
            line += f"; tokens {'identical' if self.identical else 'DIFFER'}"
        return line


def run(options: GenerateOptions) -> int:
    """Runs the command; 0, or 3 if plain greedy decoding gave other tokens."""
    target, draft, tokenizer = load(options)
    inputs = encode(tokenizer, options.prompt, options, target.device)
    streamer = None if options.json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    report = decode(target, draft, tokenizer, inputs, options, streamer)
    print(json.dumps(asdict(report)) if options.json else f"\n[{report.summary()}]")
    if report.identical is False:
        say(
            "the tokens differ from plain decoding. In bfloat16 or float16 a tie may round either way (try --dtype "
            "float32); in float32 this is a bug, please report it"
        )
        return 3
    return 0


def decode(target, draft, tokenizer, inputs, options: GenerateOptions, streamer) -> Report:
    check_drafter(draft)
    prompt = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    sampling = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    generator = None
    if options.seed is not None:
        generator = torch.Generator(device=target.device).manual_seed(options.seed)
    begin = time.perf_counter()
    output = draft.spec_generate(
        target=target,
        **prompt,
        **sampling,
        max_new_tokens=options.max_new_tokens,
        draft_temperature=options.draft_temperature,
        draft_confidence=options.draft_confidence,
        block_size=options.block_size,
        streamer=streamer,
        generator=generator,
        return_dict=True,
    )
    seconds = time.perf_counter() - begin
    new = output.sequences[0, prompt["input_ids"].shape[1] :]
    plain_speed, identical = None, None
    if options.compare:
        say("decoding the same prompt without a drafter")
        plain, plain_seconds = decode_plain(target, prompt, sampling, options.max_new_tokens)
        plain_speed = (plain.shape[1] - prompt["input_ids"].shape[1]) / plain_seconds
        identical = torch.equal(plain, output.sequences) if options.temperature == 0 else None
    return Report(
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=prompt["input_ids"].shape[1],
        new_tokens=len(new),
        rounds=output.emitted.shape[1],
        tau=output.tau,
        tokens_per_second=len(new) / seconds,
        plain_tokens_per_second=plain_speed,
        identical=identical,
    )


def decode_plain(target, prompt, sampling, max_new_tokens: int) -> tuple[torch.Tensor, float]:
    """The sequences [1, P + T] that the target gives without a drafter, and the seconds it takes."""
    greedy = sampling["temperature"] == 0
    settings = {"do_sample": False} if greedy else {"do_sample": True, **sampling, "top_k": sampling["top_k"] or 0}
    begin = time.perf_counter()
    plain = target.generate(**prompt, max_new_tokens=max_new_tokens, **settings)
    return plain, time.perf_counter() - begin
