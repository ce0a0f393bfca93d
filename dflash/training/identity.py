"""What data and features belong to: a target's weights and config, its tokenizer and its chat template."""

import hashlib
import json
from pathlib import Path

import torch

from dflash.modeling.pairing_dflash import thinking_default, tokenizer_hash
from dflash.modeling.target_dflash import unwrap

SAMPLES = 4096
# Where a model came from, and how it is run, do not change what it is; what a version adds is not compared either.
_NOT_COMPARED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}


def identify(target, tokenizer=None) -> dict:
    """A record, of JSON types, of a target (`PreTrainedModel`) and its tokenizer; see `differences`."""
    model = unwrap(target)
    name = model.config._name_or_path
    record = {
        "target": Path(name).name if Path(name).exists() else name,
        "target_revision": getattr(model.config, "_commit_hash", None),
        "target_weights_hash": weights_hash(model),
        "target_config": json.loads(json.dumps(model.config.to_dict(), default=str)),
    }
    if tokenizer is not None:
        record["target_tokenizer_hash"] = tokenizer_hash(tokenizer)
        record["template_hash"] = template_hash(tokenizer)
    return record


def weights_hash(model) -> str:
    """SHA-256 of a model's tensors, by name and shape and by up to 4096 evenly spaced values of each.

    The values are taken in bfloat16, so that a model has one hash in whatever dtype it is loaded. Training, merging or
    quantising changes nearly all values of a matrix, so a sample tells models apart, in milliseconds.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            raise ValueError(f"{name} is offloaded, so the weights cannot be hashed; load the model without offloading")
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        values = tensor.detach().reshape(-1)
        values = values[:: max(1, len(values) // SAMPLES)]
        if values.is_floating_point():
            values = values.to(torch.bfloat16).view(torch.int16)
        digest.update(values.to("cpu", torch.int64).numpy().tobytes())
    return digest.hexdigest()


def template_hash(tokenizer) -> str | None:
    """SHA-256 of the chat template; None without one."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else hashlib.sha256(json.dumps(template).encode()).hexdigest()


def differences(stored: dict, found: dict) -> list[str]:
    """What two records of `identify` say differently, in words; what only one of them says is not compared."""
    names = ("target_weights_hash", "target_tokenizer_hash", "template_hash")
    lines = [
        f"{name} is {stored[name]}, here {found[name]}"
        for name in names
        if None not in (stored.get(name), found.get(name)) and stored[name] != found[name]
    ]
    ours, theirs = stored.get("target_config") or {}, found.get("target_config") or {}
    for key in sorted((ours.keys() & theirs.keys()) - _NOT_COMPARED):
        if ours[key] != theirs[key]:
            lines.append(f"{key} in the target's config is {ours[key]}, here {theirs[key]}")
    return lines


def thinking_mode(tokenizer, template: dict) -> str | None:
    """Whether the target thinks, by arguments of the chat template or its default: on, off, or None if it cannot."""
    default = thinking_default(tokenizer)
    if default is None or "enable_thinking" not in template:
        return default
    return "on" if template["enable_thinking"] else "off"
