"""What every command starts with: a target, its drafter, the target's tokenizer, and a prompt in tokens."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import demo
from dflash.dialects import load_drafter


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which target, and where it runs; `target` is a folder or a Hub repository, `demo` the embedded default."""

    target: str | None = None
    demo: bool = False
    revision: str | None = None
    device: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class PairOptions(TargetOptions):
    """What all commands take that decode with a drafter; `draft` is a folder or a Hub repository."""

    draft: str | None = None
    draft_revision: str | None = None
    max_new_tokens: int = 256
    block_size: int | None = None
    system: str | None = None
    raw: bool = False
    json: bool = False


def draft_name(options: PairOptions) -> str:
    """The folder or repository of the drafter."""
    return str(demo.DRAFTER) if options.demo else options.draft


def load(options: PairOptions):
    """Target, drafter and tokenizer, on one device."""
    target, tokenizer = load_target(options)
    return target, load_draft(options, target), tokenizer


def load_target(options: TargetOptions):
    """A target, in evaluation mode, and its tokenizer."""
    name = str(demo.demo_target(say)) if options.demo else options.target
    device, dtype = _where(options)
    say(f"loading target {short(name)} on {device} in {dtype}")
    target = AutoModelForCausalLM.from_pretrained(name, revision=options.revision, dtype=dtype).to(device).eval()
    return target, AutoTokenizer.from_pretrained(name, revision=options.revision)


def load_draft(options: PairOptions, target=None):
    """The drafter, of any format that is read, with the classes of this library, whatever its `auto_map` names."""
    name = draft_name(options)
    device, dtype = _where(options)
    say(f"loading drafter {short(name)}")
    return load_drafter(name, revision=options.draft_revision, dtype=dtype, target=target).to(device).eval()


def _where(options: TargetOptions) -> tuple[str, str]:
    """Device and dtype of both models."""
    device = options.device or default_device()
    return device, options.dtype or ("float32" if torch.device(device).type == "cpu" else "auto")


def default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def encode(tokenizer, prompt: str, options: PairOptions, device):
    """The prompt as a user turn of the tokenizer's chat template, or as it is with `raw`."""
    if options.raw:
        return tokenizer(prompt, return_tensors="pt").to(device)
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template; pass --raw to use the prompt as it is")
    messages = [{"role": "system", "content": options.system}] if options.system else []
    messages.append({"role": "user", "content": prompt})
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded.to(device)


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def short(name: str) -> str:
    """A model's name without the folders that it lies in."""
    return Path(name).name if Path(name).exists() else name
