"""What data and features belong to: a target's weights and config, its tokenizer and its chat template."""

import json
from pathlib import Path

from dflash.modeling.pairing_dflash import chat_template_hash, thinking_default, tokenizer_hash, weights_hash
from dflash.modeling.target_dflash import unwrap

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
        record["target_chat_template_hash"] = chat_template_hash(tokenizer)
    return record


def differences(stored: dict, found: dict) -> list[str]:
    """What two records of `identify` say differently, in words; what only one of them says is not compared."""
    names = ("target_weights_hash", "target_tokenizer_hash", "target_chat_template_hash")
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
