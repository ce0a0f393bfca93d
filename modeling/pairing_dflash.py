"""Whether a drafter and a target belong together: checked at every call, and reported in full on request."""

import hashlib
import json
from dataclasses import dataclass, field
from itertools import groupby

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from .rollback_dflash import keeps_keys, keeps_state
from .target_dflash import check_capabilities, misloaded, mixers_of, names_drafter, unwrap

_SAMPLES = 4096
_THINKING = {"true": "on", "false": "off", "on": "on", "off": "off"}


@dataclass(frozen=True)
class Fact:
    """One thing that has to fit: the drafter's value, and the target's that it has to equal, or to stay below."""

    name: str
    drafter: int
    what: str
    target: int
    below: bool = False

    @property
    def holds(self) -> bool:
        return self.drafter < self.target if self.below else self.drafter == self.target

    def __str__(self) -> str:
        return f"{self.name} {self.drafter} {'<' if self.below else '='} {self.what}, {self.target}"


@dataclass(frozen=True)
class PairReport:
    """What `DFlashDraftModel.check_target` found for a pair that can work.

    Attributes:
        facts: what was checked, with both values; all of them hold.
        settings: what is in use once everything is resolved, as JSON types: `block_size`, `sample_from_anchor`,
            `proposals` (draft tokens per block), `target_layer_ids`, `mask_token_id`, `layers` (causality and window of
            each drafter layer), `window_from_anchor`, `attention_sink_bias`, `rope` (type, theta, attention factor),
            `embedding` and `head` ("target" or "own", with the tokens it covers), `input_embedding_scale`, `attention`,
            `dtype` and `device` of both models, and `rollback`: how each layer of the target's cache takes tokens back.
        warnings: what does not make the output wrong, but may lower acceptance.
    """

    facts: list[Fact]
    settings: dict
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"ok: {fact}" for fact in self.facts]
        lines += [f"{name}: {_words(value)}" for name, value in self.settings.items()]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def check_drafter(draft) -> None:
    """Raises `ValueError`, saying what happened and how to load it, if `draft` is not a `DFlashDraftModel`.

    A checkpoint loaded without `trust_remote_code=True` is silently another model. Attributes are compared, not
    classes: each folder that is loaded has a class of its own.
    """
    if all(hasattr(draft, name) for name in ("fc", "hidden_norm", "propose", "absorb")):
        return
    if names_drafter(draft):
        raise ValueError(misloaded(draft))
    raise ValueError(f"the drafter is a {type(draft).__name__}, but has to be a DFlashDraftModel")


def check_pair(config, target) -> None:
    """Raises `ValueError`, with what to do, if the drafter's config cannot belong to `target` or it cannot roll back.

    Nothing here depends on the target's name: only on its shapes and on what its cache can do.
    """
    check_capabilities(target)
    _require(_facts(config, target))
    mixers_of(target)


def report_pair(draft, target, tokenizer=None) -> PairReport:
    """The `PairReport` of a drafter (`DFlashDraftModel`), its target, and the target's tokenizer if there is one.

    Raises:
        ValueError: the pair cannot work.
    """
    check_drafter(draft)
    check_pair(draft.config, target)
    facts = [*_facts(draft.config, target), _fc_fact(draft, target)]
    _require(facts)
    warnings = _mask_warnings(draft.config, tokenizer) + _provenance_warnings(draft.config, target, tokenizer)
    return PairReport(facts, _settings(draft, target), warnings)


def tokenizer_hash(tokenizer) -> str:
    """What `provenance.target_tokenizer_hash` holds: SHA-256 of which token has which id, added ones included."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), separators=(",", ":"))
    return hashlib.sha256(vocabulary.encode("utf-8")).hexdigest()


def chat_template_hash(tokenizer) -> str | None:
    """What `provenance.target_chat_template_hash` holds: SHA-256 of the chat template; None if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def weights_hash(model) -> str:
    """What `provenance.target_weights_hash` holds: SHA-256 of a model's tensors, by name, shape and up to 4096 evenly
    spaced values of each.

    The values are taken in bfloat16, so that a model has one hash in whatever dtype it is loaded. Training, merging or
    quantising changes nearly all values of a matrix, so a sample tells models apart, in milliseconds.

    Raises:
        ValueError: the model is offloaded.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            raise ValueError(f"{name} is offloaded, so the weights cannot be hashed; load the model without offloading")
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        values = tensor.detach().reshape(-1)
        values = values[:: max(1, len(values) // _SAMPLES)]
        if values.is_floating_point():
            values = values.to(torch.bfloat16).view(torch.int16)
        digest.update(values.to("cpu", torch.int64).numpy().tobytes())
    return digest.hexdigest()


def _facts(config, target) -> list[Fact]:
    model = unwrap(target)
    text = model.config.get_text_config(decoder=True)
    rows, width = model.get_input_embeddings().weight.shape
    depth = len(model.get_decoder().layers)
    return [
        Fact("hidden_size", config.hidden_size, "the target's hidden size", text.hidden_size),
        Fact("hidden_size", config.hidden_size, "the width of the target's embedding", width),
        Fact("num_target_layers", config.num_target_layers, "the target's number of layers", depth),
        Fact("last target_layer_ids", max(config.target_layer_ids), "the target's number of layers", depth, below=True),
        Fact("vocab_size", config.vocab_size, "the target's vocabulary", text.vocab_size),
        Fact("mask_token_id", config.mask_token_id, "the rows of the target's embedding", rows, below=True),
    ]


def _fc_fact(draft, target) -> Fact:
    taps = len(draft.config.target_layer_ids)
    width = unwrap(target).get_input_embeddings().weight.shape[1]
    return Fact("fc.in_features", draft.fc.in_features, f"the width of {taps} taps of the target", taps * width)


def _require(facts: list[Fact]) -> None:
    for fact in facts:
        if not fact.holds:
            relation = "has to be below" if fact.below else "has to equal"
            raise ValueError(
                f"this drafter does not fit this target: its {fact.name} is {fact.drafter}, which {relation} "
                f"{fact.what}, {fact.target}; load the target it was trained for, and weights that match its config"
            )


def _settings(draft, target) -> dict:
    config, model = draft.config, unwrap(target)
    layers = range(config.num_hidden_layers)
    rope = {"type": draft.rotary_emb.rope_type, "theta": config.rope_parameters["rope_theta"]}
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    return {
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        "proposals": config.proposals(),
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "layers": [{"causal": config.layer_is_causal(i), "window": config.layer_window(i)} for i in layers],
        "window_from_anchor": config.window_from_anchor,
        "attention_sink_bias": config.attention_sink_bias,
        "embedding": "own" if config.has_embed_tokens else "target",
        "head": _head(config),
        "rope": {**rope, "attention_factor": draft.rotary_emb.attention_scaling},
        "input_embedding_scale": config.input_embedding_scale,
        "attention": {"drafter": config._attn_implementation, "target": attention},
        "dtype": {"drafter": _dtype(draft.fc.weight), "target": _dtype(model.get_input_embeddings().weight)},
        "device": {"drafter": _devices(draft), "target": _devices(model)},
        "rollback": [_rollback_of(layer) for layer in DynamicCache(config=model.config).layers],
    }


def _head(config) -> str:
    if config.has_lm_head:
        return f"own, {config.draft_vocab_size} tokens"
    return "target" if config.draft_token_ids is None else f"target, {len(config.draft_token_ids)} of its tokens"


def _rollback_of(layer) -> str:
    """How a layer of a target's cache takes tokens back."""
    ways = []
    if isinstance(layer, DynamicSlidingWindowLayer):
        ways.append("record and crop")
    elif keeps_keys(layer):
        ways.append("crop")
    if keeps_state(layer):
        ways.append("copy and replay")
    return ", ".join(ways) or "nothing kept"


def _mask_warnings(config, tokenizer) -> list[str]:
    """A mask is usually a reserved token; one that occurs in text was perhaps meant for another tokenizer."""
    mask = config.mask_token_id
    if tokenizer is None or mask in tokenizer.added_tokens_decoder or mask in tokenizer.all_special_ids:
        return []
    if mask not in tokenizer.get_vocab().values():
        return []
    token = tokenizer.convert_ids_to_tokens(mask)
    return [f"mask_token_id {mask} is {token!r}, an ordinary token of this tokenizer; was it meant for another one?"]


def _provenance_warnings(config, target, tokenizer) -> list[str]:
    """Compares what the config says of its training, and nothing that it does not say."""
    provenance = getattr(config, "provenance", None)
    if provenance is None:
        return []
    if not isinstance(provenance, dict):
        return [f"provenance is {provenance!r} where a dictionary is expected, so it was not compared"]
    revision = _revision_warning(provenance.get("target_revision"), target)
    weights = _weights_warning(provenance.get("target_weights_hash"), target)
    hashes = _hash_warning(provenance.get("target_tokenizer_hash"), tokenizer)
    template = _template_warning(provenance.get("target_chat_template_hash"), tokenizer)
    thinking = _thinking_warning(provenance.get("thinking_mode"), tokenizer)
    return [warning for warning in (revision, weights, hashes, template, thinking) if warning]


def _revision_warning(trained, target) -> str | None:
    loaded = getattr(unwrap(target).config, "_commit_hash", None)
    if trained in (None, loaded):
        return None
    return (
        f"the drafter was trained on target_revision {trained}, the target loaded is {loaded} (None: not from the Hub)"
    )


def _weights_warning(trained, target) -> str | None:
    model = unwrap(target)
    if trained is None or any(tensor.is_meta for tensor in model.state_dict().values()):
        return None
    found = weights_hash(model)
    if found == trained:
        return None
    return (
        f"target_weights_hash is {trained}, this target's is {found}: it was trained further, merged or quantised, "
        "so expect fewer accepted tokens"
    )


def _hash_warning(trained, tokenizer) -> str | None:
    if trained is None or tokenizer is None or trained == tokenizer_hash(tokenizer):
        return None
    return f"target_tokenizer_hash is {trained}, this tokenizer's is {tokenizer_hash(tokenizer)}: ids differ in meaning"


def _template_warning(trained, tokenizer) -> str | None:
    if trained is None or tokenizer is None or trained == chat_template_hash(tokenizer):
        return None
    return (
        f"target_chat_template_hash is {trained}, this tokenizer's is {chat_template_hash(tokenizer)}: prompts come "
        "out in another form than in training, so expect fewer accepted tokens"
    )


def _thinking_warning(trained, tokenizer) -> str | None:
    default = None if trained is None or tokenizer is None else thinking_default(tokenizer)
    if default is None or _THINKING.get(str(trained).lower()) == default:
        return None
    return (
        f"the drafter was trained with thinking_mode {trained!r}, this chat template's default is {default!r}; "
        "expect fewer accepted tokens unless enable_thinking is passed to the template to match"
    )


def thinking_default(tokenizer) -> str | None:
    """Whether the chat template thinks unless told: "on" or "off"; None if `enable_thinking` changes nothing."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "a"}]

    def render(**switch):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switch)

    on, off = render(enable_thinking=True), render(enable_thinking=False)
    if on == off:
        return None
    return "on" if render() == on else "off"


def _dtype(weight) -> str:
    return str(weight.dtype).removeprefix("torch.")


def _devices(model) -> list[str]:
    return sorted({str(parameter.device) for parameter in model.parameters()})


def _words(value) -> str:
    """A setting in one line; equal neighbours in a list are counted."""
    if not isinstance(value, list):
        return json.dumps(value)
    groups = [(key, len(list(group))) for key, group in groupby(json.dumps(item) for item in value)]
    return ", ".join(key if count == 1 else f"{count} x {key}" for key, count in groups)
