"""What every command starts with: a target, its drafter, the target's tokenizer, and a prompt in tokens."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import demo
from dflash.dialects import load_drafter


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """What all commands take; `target` and `draft` are folders or Hub repositories."""

    target: str | None = None
    draft: str | None = None
    demo: bool = False
    revision: str | None = None
    draft_revision: str | None = None
    device: str | None = None
    dtype: str | None = None
    max_new_tokens: int = 256
    block_size: int | None = None
    system: str | None = None
    raw: bool = False
    json: bool = False


def load(options: PairOptions):
    """Target, drafter and tokenizer, on one device."""
    target_name, draft_name = options.target, options.draft
    if options.demo:
        target_name, draft_name = str(demo.demo_target(say)), str(demo.DRAFTER)
    device = options.device or default_device()
    dtype = options.dtype or ("float32" if device == "cpu" else "auto")
    say(f"loading target {_short(target_name)} on {device} in {dtype}")
    target = AutoModelForCausalLM.from_pretrained(target_name, revision=options.revision, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_name, revision=options.revision)
    say(f"loading drafter {_short(draft_name)}")
    draft = load_drafter(draft_name, revision=options.draft_revision, dtype=dtype, target=target).to(device).eval()
    return target, draft, tokenizer


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


def _short(name: str) -> str:
    return Path(name).name if Path(name).exists() else name
