"""`dflash eval`: decodes files of held-out prompts and says, in text and as JSON, what a drafter gains on each."""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm

from dflash.evaluation import Decoded, Decoding, Score, decode, score
from dflash.loading import PairOptions, load, say
from dflash.modeling.pairing_dflash import chat_template_hash, tokenizer_hash, weights_hash
from dflash.prompts import Prompt, encode_messages, read_prompts

DIFFERS = 3
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(PairOptions):
    """What the command line asks for. `prompts` are paths, or NAME=PATH; the name is that of the domain."""

    prompts: list[str]
    temperatures: list[float]
    seeds: list[int]
    limit: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    draft_temperature: float = 0.0
    draft_confidence: float = 0.0
    template: dict
    compare: bool = False
    output: str | None = None

    @property
    def decoding(self) -> Decoding:
        names = ("max_new_tokens", "top_k", "top_p", "min_p", "draft_temperature", "draft_confidence")
        names += ("block_size", "compare")
        return Decoding(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Answer:
    """A turn of a prompt of a domain, decoded at a temperature."""

    domain: str
    temperature: float
    seed: int
    prompt: str
    turn: int
    decoded: Decoded


def run(options: BenchmarkOptions) -> int:
    """Runs the command; 0, or 3 if greedy tokens in float32 are not those of plain decoding."""
    domains = read_domains(options.prompts, options.limit)
    target, draft, tokenizer = load(options)
    block = draft.config.proposals(options.block_size) + 1
    answers = evaluate(draft, target, tokenizer, domains, options)
    results = results_of(answers, block)
    report = {**describe(draft, target, tokenizer, options), "results": results, "texts": [_text(a) for a in answers]}
    if options.output:
        _write(Path(options.output), report)
    print(json.dumps(report) if options.json else "\n".join(lines(results)))
    return _verdict(answers, target.dtype)


def read_domains(places: list[str], limit: int | None) -> dict[str, list[Prompt]]:
    """The prompts of each domain: PATH, which names it by the file, or NAME=PATH."""
    domains = {}
    for place in places:
        name, separator, path = place.partition("=")
        name, path = (name, path) if separator and not Path(place).exists() else (Path(place).stem, place)
        if name in domains or name == ALL:
            raise ValueError(f"domain {name!r} is there twice or reserved; name them apart with NAME=PATH")
        domains[name] = read_prompts(path, limit)
    return domains


def evaluate(draft, target, tokenizer, domains: dict[str, list[Prompt]], options: BenchmarkOptions) -> list[Answer]:
    """Every prompt at every temperature; at temperature 0 once, else once a seed."""
    work = [
        (domain, temperature, seed, i, prompt)
        for temperature in options.temperatures
        for domain, prompts in domains.items()
        for seed in (options.seeds if temperature else options.seeds[:1])
        for i, prompt in enumerate(prompts)
    ]
    _warm_up(draft, target, tokenizer, work[0][-1], options)
    answers = []
    with tqdm(work, unit="prompt", file=sys.stderr) as bar:
        for domain, temperature, seed, i, prompt in bar:
            settings = replace(options.decoding, temperature=temperature)
            turns = converse(draft, target, tokenizer, prompt, settings, seed + 1000 * i, options)
            answers += [Answer(domain, temperature, seed, prompt.id, n, turn) for n, turn in enumerate(turns)]
            tau = score([answer.decoded for answer in answers], 1).tau
            bar.set_postfix_str("" if tau is None else f"tau {tau:.2f}")
    return answers


def _warm_up(draft, target, tokenizer, prompt: Prompt, options: BenchmarkOptions) -> None:
    """A few tokens that are not counted: the first call also pays for what is set up once."""
    settings = replace(options.decoding, max_new_tokens=min(8, options.max_new_tokens))
    converse(draft, target, tokenizer, replace(prompt, turns=[]), settings, 0, options)


def converse(draft, target, tokenizer, prompt: Prompt, settings: Decoding, seed: int, options) -> list[Decoded]:
    """Decodes an answer to each turn of a prompt, in a conversation with the answers before."""
    messages, answers = list(prompt.messages), []
    if options.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": options.system})
    for turn, following in enumerate([*prompt.turns, None]):
        ids = _encode(tokenizer, messages, prompt.tools, options)
        answers.append(decode(draft, target, ids, settings, seed + turn))
        text = tokenizer.decode(answers[-1].tokens, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": following}]
    return answers


def _encode(tokenizer, messages: list[dict], tools, options) -> torch.Tensor:
    if not options.raw:
        return encode_messages(tokenizer, messages, tools, **options.template)
    if len(messages) > 1:
        raise ValueError("--raw takes prompts of one text; these have several turns, which need a chat template")
    return tokenizer(messages[0]["content"], return_tensors="pt")["input_ids"]


def results_of(answers: list[Answer], block: int) -> list[dict]:
    """The `Score` of each domain, and of all together, at each temperature."""
    results = []
    for temperature in dict.fromkeys(answer.temperature for answer in answers):
        here = [answer for answer in answers if answer.temperature == temperature]
        domains = list(dict.fromkeys(answer.domain for answer in here))
        for domain in [*domains, ALL] if len(domains) > 1 else domains:
            chosen = [answer.decoded for answer in here if domain in (answer.domain, ALL)]
            results.append({"domain": domain, "temperature": temperature, **asdict(score(chosen, block))})
    return results


def lines(results: list[dict]) -> list[str]:
    found = []
    for result in results:
        figures = {key: value for key, value in result.items() if key not in ("domain", "temperature")}
        found.append(f"{result['domain']}, temperature {result['temperature']:g}: {Score(**figures)}")
    return found


def describe(draft, target, tokenizer, options: BenchmarkOptions) -> dict:
    """What was measured, with what, and where: enough to measure it again."""
    names = ("max_new_tokens", "block_size", "seeds", "limit", "top_k", "top_p", "min_p", "draft_temperature")
    names += ("draft_confidence", "system", "raw", "template")
    settings = {name: getattr(options, name) for name in names}
    return {
        "drafter": {
            **_model(draft),
            "block_size": draft.config.block_size,
            "target_layer_ids": list(draft.config.target_layer_ids),
        },
        "target": {
            **_model(target),
            "tokenizer_hash": tokenizer_hash(tokenizer),
            "template_hash": chat_template_hash(tokenizer),
        },
        "settings": settings,
        "machine": machine(target.device),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "dflash-transformers")}
        | {"python": platform.python_version()},
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _model(model) -> dict:
    name = model.config._name_or_path
    return {
        "name": Path(name).name if Path(name).exists() else name,
        "revision": getattr(model.config, "_commit_hash", None),
        "weights_hash": weights_hash(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def machine(device: torch.device) -> dict:
    """Where speeds were measured."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _text(answer: Answer) -> dict:
    """One answer, without its tokens."""
    fields = {key: value for key, value in asdict(answer).items() if key != "decoded"}
    decoded = asdict(answer.decoded)
    return {
        **fields,
        "new_tokens": len(decoded.pop("tokens")),
        **{key: decoded[key] for key in decoded if key != "slots"},
    }


def _write(path: Path, report: dict) -> None:
    staged = path.with_name(f".{path.name}.new")
    staged.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(staged, path)


def _verdict(answers: list[Answer], dtype: torch.dtype) -> int:
    different = [answer for answer in answers if answer.decoded.identical is False]
    if not different:
        return 0
    first = f"{len(different)} greedy texts, such as {different[0].prompt}, differ from plain decoding"
    if dtype.itemsize <= 2:
        say(f"{first}; in {dtype} a tie may round either way, `dflash check --probe` tells that from a bug")
        return 0
    say(f"{first}; in {dtype} this is a bug, please report it")
    return DIFFERS
