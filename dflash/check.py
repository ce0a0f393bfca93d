"""`dflash check`: whether a drafter and a target belong together, and whether decoding with them stays exact.

Shapes: P prompt tokens, T new tokens, w positions of a verified block, V vocabulary.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from dflash import prompts
from dflash.loading import PairOptions, draft_name, encode, load, load_draft, say
from dflash.modeling.pairing_dflash import check_drafter
from dflash.remote_code import CodeReport, report_code

DIFFERS = 3
# Logits computed in blocks and one by one differ by rounding, which flips the choice between two tokens that are nearly
# as likely: in bfloat16 their logits were seen 0 to 0.375 apart. After a cache had not been rolled back they were 0.6
# to 12 apart. The limit lies between. In float32 no logit was seen to move by more than 0.0002.
LARGE_MARGIN, LARGE_MARGIN_FLOAT32 = 0.5, 0.01
PROMPTS = (
    "How many positive whole-number divisors does 196 have?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Describe a walk along the coast in autumn.",
)


@dataclass(frozen=True, kw_only=True)
class CheckOptions(PairOptions):
    """What the command line asks for."""

    max_new_tokens: int = 64
    probe: bool = False
    prompts: str | None = None


@dataclass(frozen=True)
class Disagreement:
    """A position where the block's most likely token is not that of one-by-one decoding on the same text.

    `position` counts new tokens from 0. `block_margin` is how far, by the block's logits, its token lies above the
    other one; `step_margin` is how far, by one-by-one decoding, the other lies above the block's. `large`: rounding
    does not explain it.
    """

    prompt: int
    position: int
    block_token: int
    step_token: int
    block_margin: float
    step_margin: float
    large: bool


@dataclass(frozen=True)
class ProbeReport:
    """Greedy decoding of a few prompts, checked token by token.

    Attributes:
        tau: mean tokens per round, None if there was no round.
        acceptance: for each draft slot, the share of rounds that accepted it (and so all before it); None: not tried.
        largest_difference: between any logit of a block and the same one by one.
    """

    prompts: int
    new_tokens: int
    rounds: int
    tau: float | None
    acceptance: list[float | None]
    largest_difference: float
    disagreements: list[Disagreement]

    def lines(self, tokenizer) -> list[str]:
        tau = "none" if self.tau is None else f"{self.tau:.2f}"
        slots = ", ".join(f"slot {i} {rate:.0%}" for i, rate in enumerate(self.acceptance, 1) if rate is not None)
        return [
            f"probe: {self.prompts} prompts, {self.new_tokens} new tokens in {self.rounds} rounds, tau {tau}",
            f"accepted: {slots or 'nothing was drafted'}",
            f"blocks against one by one: {len(self.disagreements)} of {self.new_tokens} positions disagree, logits "
            f"differ by up to {self.largest_difference:.2g}",
            *(_line(disagreement, tokenizer) for disagreement in self.disagreements),
        ]


def run(options: CheckOptions) -> int:
    """Runs the command; 0, 1 if the pair cannot work, 3 if decoding in blocks differs by more than rounding."""
    if options.draft and not options.target:
        return show(options, code_of(load_draft(options), options))
    texts = read_prompts(Path(options.prompts)) if options.prompts else list(PROMPTS)
    target, draft, tokenizer = load(options)
    code = code_of(draft, options)
    try:
        pair = draft.check_target(target, tokenizer)
    except ValueError as error:
        if not options.json:
            raise
        print(json.dumps({"works": False, "error": str(error), "code": asdict(code)}))
        return 1
    if not options.json:
        print(pair, flush=True)
    report = probe(target, draft, tokenizer, texts, options) if options.probe else None
    return show(options, code, pair, report, tokenizer)


def code_of(draft, options: CheckOptions) -> CodeReport:
    """What Transformers alone makes of the drafter that the options name."""
    return report_code(draft, draft_name(options), options.draft_revision)


def show(options: CheckOptions, code: CodeReport, pair=None, report=None, tokenizer=None) -> int:
    """Prints what has not been printed, as text or as one JSON object; gives the exit code."""
    if options.json:
        parts = {"pair": pair, "probe": report, "code": code}
        print(json.dumps({"works": True} | {name: asdict(part) if part else None for name, part in parts.items()}))
    else:
        print("\n".join([*code.lines(), *(report.lines(tokenizer) if report else [])]))
    return _verdict(report)


def read_prompts(path: Path) -> list[str]:
    """What is asked first in each row of a JSONL file; see `dflash.prompts.read_prompts`."""
    return [prompt.messages[-1]["content"] for prompt in prompts.read_prompts(path)]


def probe(target, draft, tokenizer, texts: list[str], options: CheckOptions) -> ProbeReport:
    """Decodes each prompt in blocks, then follows the same text one by one, and compares the logits."""
    check_drafter(draft)
    emitted, slots, found, difference, count = [], [], [], 0.0, 0
    for i, prompt in enumerate(texts):
        say(f"probing prompt {i + 1} of {len(texts)}")
        ids = encode(tokenizer, prompt, options, target.device)["input_ids"]
        text = decode_in_blocks(target, draft, ids, options.max_new_tokens, options.block_size)
        steps = decode_one_by_one(target, ids, text.tokens)
        found += disagreements(i, text.logits, steps, large_margin(target.dtype))
        difference = max(difference, largest_difference(text.logits, steps))
        emitted, slots, count = emitted + text.emitted, slots + text.slots, count + len(text.tokens)
    return ProbeReport(
        prompts=len(texts),
        new_tokens=count,
        rounds=len(emitted),
        tau=sum(emitted) / len(emitted) if emitted else None,
        acceptance=acceptance_by_slot(slots, draft.config.proposals(options.block_size)),
        largest_difference=difference,
        disagreements=found,
    )


class BlockText(NamedTuple):
    """A text decoded in blocks: its tokens [T], the logits [T, V] that chose them, tokens emitted by each round, and
    draft tokens (accepted, tried) of each round.

    A round that reaches a stop token is not among the latter: what it accepted after that is cut.
    """

    tokens: list[int]
    logits: torch.Tensor
    emitted: list[int]
    slots: list[tuple[int, int]]


def decode_in_blocks(target, draft, ids, max_new_tokens: int, block_size: int | None) -> BlockText:
    """Decodes ids [1, P] greedily with the drafter, and keeps what the target said to each block."""
    blocks = []
    hook = target.register_forward_hook(lambda module, inputs, output: blocks.append(output.logits[0].float()))
    try:
        output = draft.spec_generate(
            target=target, input_ids=ids, max_new_tokens=max_new_tokens, block_size=block_size, return_dict=True
        )
    finally:
        hook.remove()
    tokens, emitted = output.sequences[0, ids.shape[1] :].tolist(), output.emitted[0].tolist()
    if len(blocks) != len(emitted) + 1:
        raise RuntimeError(f"{len(emitted)} rounds and a prompt took {len(blocks)} forwards of the target")
    logits = torch.cat([block[:count] for block, count in zip(blocks, [1, *emitted], strict=True)])
    slots = [(count - 1, len(block) - 1) for block, count in zip(blocks[1:], emitted, strict=True)]
    return BlockText(tokens, logits, emitted, slots[:-1] if len(tokens) < max_new_tokens else slots)


def decode_one_by_one(target, ids, tokens: list[int]) -> torch.Tensor:
    """The logits [T, V] of plain `generate` on ids [1, P], made to choose `tokens` whatever it finds most likely."""
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=len(tokens),
        logits_processor=LogitsProcessorList([_Forced(tokens, ids.shape[1])]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    if output.sequences[0, ids.shape[1] :].tolist() != tokens:
        raise RuntimeError("plain generation did not follow the given text; does its generation config end it early?")
    return torch.cat(output.logits).float()


class _Forced(LogitsProcessor):
    """Leaves only the next token of a given text possible."""

    def __init__(self, tokens: list[int], start: int):
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.tokens[input_ids.shape[1] - self.start]] = 0.0
        return forced


def large_margin(dtype: torch.dtype) -> float:
    """The margin above which a difference is a bug, for a target of this dtype."""
    return LARGE_MARGIN if dtype.itemsize <= 2 else LARGE_MARGIN_FLOAT32


def disagreements(prompt: int, block: torch.Tensor, steps: torch.Tensor, limit: float) -> list[Disagreement]:
    """The positions where logits [T, V] of blocks and of single steps choose different tokens."""
    ours, theirs = block.argmax(-1), steps.argmax(-1)
    found = []
    for i in (ours != theirs).nonzero()[:, 0].tolist():
        a, b = ours[i].item(), theirs[i].item()
        margins = (block[i, a] - block[i, b]).item(), (steps[i, b] - steps[i, a]).item()
        found.append(Disagreement(prompt, i, a, b, *margins, large=max(margins) > limit))
    return found


def largest_difference(block: torch.Tensor, steps: torch.Tensor) -> float:
    """Between two logits [T, V]; equal infinities (tokens that a model rules out) do not differ."""
    return torch.where(block == steps, 0.0, (block - steps).abs()).max().item()


def acceptance_by_slot(rounds: list[tuple[int, int]], slots: int) -> list[float | None]:
    """For each draft slot, the share of the rounds that tried it and accepted it; rounds are (accepted, tried)."""
    rates = []
    for slot in range(slots):
        kept = [accepted > slot for accepted, tried in rounds if tried > slot]
        rates.append(sum(kept) / len(kept) if kept else None)
    return rates


def _line(found: Disagreement, tokenizer) -> str:
    ours, theirs = (repr(tokenizer.decode([token])) for token in (found.block_token, found.step_token))
    return (
        f"prompt {found.prompt + 1}, token {found.position}: block {ours} ({found.block_token}, margin "
        f"{found.block_margin:.3g}), one by one {theirs} ({found.step_token}, margin {found.step_margin:.3g}): "
        f"{'NOT ROUNDING' if found.large else 'rounding'}"
    )


def _verdict(report: ProbeReport | None) -> int:
    if report is None or not any(found.large for found in report.disagreements):
        return 0
    say(
        "dflash: choices differ from one-by-one decoding by larger logit margins than rounding explains; please report "
        "this pair, with the versions of torch and transformers"
    )
    return DIFFERS
