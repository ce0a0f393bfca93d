"""What decoding needs of a target: embedding rows, head, taps, a forward over new tokens, and its rollback."""

import inspect
import threading

import torch
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicCache

from .cache_layers_dflash import keeps_keys, keeps_state
from .configuration_dflash import ARCHITECTURES
from .devices_dflash import execution_device, weights_in_place
from .rollback_dflash import CacheRollback, find_mixers

# Attention patterns, and the cache layers they use, that roll back exactly: by cropping, or by restoring and replaying.
_PATTERNS = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "moe", "mlp", "dummy"}
_LAYERS = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "DummyLayer",
}


def check_capabilities(target) -> None:
    """Raises `ValueError`, naming what is missing, unless `target` is a decoder whose cache can be rolled back."""
    model = unwrap(target)
    name = type(model).__name__
    if names_drafter(model):
        raise ValueError(f"the target is a drafter: {misloaded(model)}")
    if getattr(model.config, "is_encoder_decoder", False) or not hasattr(model, "get_decoder"):
        raise ValueError(f"{name} is not a decoder-only language model; only such targets are supported")
    adapter = getattr(getattr(target, "_orig_mod", target), "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(f"{name} has an adapter that puts virtual tokens before the text; only others are supported")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language model head; load the target with AutoModelForCausalLM")
    cache_argument(target)
    unknown = _patterns(model.config.get_text_config(decoder=True)) - _PATTERNS
    layers = [] if unknown else DynamicCache(config=model.config).layers
    unknown |= {type(layer).__name__ for layer in layers} - _LAYERS
    if unknown:
        found = ", ".join(sorted(unknown))
        raise ValueError(f"{name} has layers whose cache cannot be rolled back exactly ({found}); not supported")
    if not hasattr(model.get_decoder(), "layers"):
        raise ValueError(f"{name} has no `layers` in what its get_decoder() gives, so its taps cannot be read")
    if not any(keeps_keys(layer) for layer in layers):
        raise ValueError(f"{name} has no attention layer, so its cache does not count tokens; not supported")
    if getattr(model, "_is_stateful", False) and not any(keeps_state(layer) for layer in layers):
        raise ValueError(f"{name} keeps a state outside its cache, where it cannot be rolled back; not supported")


def names_drafter(model) -> bool:
    """Whether the config of any model says that its checkpoint is a DFlash drafter."""
    return bool(set(ARCHITECTURES) & set(getattr(getattr(model, "config", None), "architectures", None) or ()))


def misloaded(model) -> str:
    """What happened to a drafter that is not of the class in `modeling_dflash.py`, and how to load it."""
    name, kind = getattr(model.config, "_name_or_path", ""), type(model)
    return (
        f"{name!r} is the checkpoint of a DFlash drafter, loaded as {kind.__module__}.{kind.__name__}. Its config.json "
        f"says model_type {model.config.model_type!r}, which serving engines read, so without trust_remote_code=True "
        "Transformers builds a plain model of this type, with random embeddings and without the drafter's `fc` and "
        f"`hidden_norm`. Load it with AutoModel.from_pretrained({name!r}, trust_remote_code=True), or, if the "
        f"checkpoint does not carry this code, with dflash.DFlashDraftModel.from_pretrained({name!r})"
    )


def _patterns(text) -> set[str]:
    """The attention patterns of a text config's layers."""
    named = getattr(text, "layer_types", None)
    if named is None:
        return {"full_attention"} if getattr(text, "attention_chunk_size", None) is None else {"chunked_attention"}
    return set(named)


def unwrap(target):
    """The Transformers model inside a `torch.compile`d or PEFT-wrapped one."""
    target = getattr(target, "_orig_mod", target)
    return target.get_base_model() if hasattr(target, "get_base_model") else target


def cache_argument(target) -> str:
    """The name under which the target's forward takes its cache; it changed with Transformers 5.24."""
    parameters = inspect.signature(unwrap(target).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ValueError(f"{type(unwrap(target)).__name__}.forward takes no cache, only {', '.join(parameters)}")


def mixers_of(target) -> list[str]:
    """Names of the modules that drive the target's states; raises `ValueError` if these cannot be rolled back."""
    name = cache_argument(target)
    return find_mixers(unwrap(target), lambda *inputs: _run(target, name, *inputs, logits_to_keep=1))


def _run(target, cache_name: str, ids, position_ids, cache, logits_to_keep: int):
    """The target's output for new tokens [N, n], after those in the cache, which it takes under `cache_name`.

    Which logits to keep is said by index: told a number, a target whose last layers share keys runs those layers on
    that many tokens only, and their taps would lack the others.
    """
    count = ids.shape[1]
    kept = 0 if logits_to_keep == count else torch.arange(count - logits_to_keep, count, device=ids.device)
    return target(
        input_ids=ids,
        position_ids=position_ids,
        use_cache=True,
        logits_to_keep=kept,
        **{cache_name: cache},
    )


def tap_module(model, tap: int):
    """The module whose output is `hidden_states[tap + 1]`: that of the last layer is taken after the final norm."""
    decoder = model.get_decoder()
    return decoder.layers[tap] if tap < len(decoder.layers) - 1 else decoder


def tap_output(output) -> torch.Tensor:
    """The hidden states [N, n, H] in what a tapped module gave."""
    return output if isinstance(output, torch.Tensor) else output[0]


class TargetSession:
    """One sequence of forwards over a target, with its cache and its taps. Use it in a `with` block.

    Args:
        target (`PreTrainedModel`): the target.
        target_layer_ids (`list[int]`): taps.
        cache (`Cache`, *optional*): the cache of an earlier session, to continue, or an empty one; default: a new
            `DynamicCache`.
    """

    def __init__(self, target, target_layer_ids, cache: Cache | None = None):
        self.target = target
        self.model = unwrap(target)
        self.target_layer_ids = list(target_layer_ids)
        self._cache_name = cache_argument(target)
        self._embedding, self.head_module = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self.device = execution_device(self._embedding)
        self._head_input = self.device, self._embedding.weight.dtype
        self.cache = DynamicCache(config=self.model.config) if cache is None else cache
        self._rollback = CacheRollback(self.cache, self.model.get_decoder().layers, mixers_of(target))
        self._taps: dict[int, torch.Tensor] = {}
        self._hooks: list = []

    def __enter__(self):
        thread = threading.get_ident()  # a target may serve several threads, each with its own session

        def keep(tap):
            def hook(module, inputs, output):
                if threading.get_ident() == thread:
                    self._taps[tap] = tap_output(output)

            return hook

        def note(module, inputs):
            if threading.get_ident() == thread:
                self._head_input = inputs[0].device, inputs[0].dtype

        self._hooks.append(self.head_module.register_forward_pre_hook(note))
        for tap in self.target_layer_ids:
            self._hooks.append(tap_module(self.model, tap).register_forward_hook(keep(tap)))
        self._hooks += self._rollback.attach()
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()
        self._rollback.close()

    @property
    def length(self) -> int:
        """Tokens that the cache holds."""
        return int(self.cache.get_seq_length())  # a static cache counts in a tensor

    def room(self, tokens: int) -> int:
        """How many of `tokens` tokens the next forward may have if the last of them may be taken back."""
        return self._rollback.room(tokens)

    def embed(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Raw embedding rows [..., H] of ids, bypassing whatever the target does to them, times `scale`."""
        with weights_in_place(self._embedding):
            rows = functional.embedding(ids, self._embedding.weight)
        return rows if scale == 1.0 else rows * scale

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's logits [..., V], on the session's device, of hidden states [..., H] of any device and dtype.

        They go in as what the target itself last gave its head: a quantised or offloaded head's weight does not tell.
        """
        return self.head_module(hidden_states.to(*self._head_input)).to(self.device)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: int):
        """Appends ids [N, n] -> logits [N, logits_to_keep, V] on the session's device, and features [N, n, K*H].

        Tokens whose logits were asked for can be taken back, except the first of them.
        """
        before, count = self.length, ids.shape[1]
        with self._rollback.forward(count, tentative=logits_to_keep > 1):
            output = _run(self.target, self._cache_name, ids, position_ids, self.cache, logits_to_keep)
        if self.length != before + count:
            raise ValueError(
                f"the target's cache went from {before} to {self.length} positions on {count} tokens, so it cannot "
                "decode (is it in training mode with gradient checkpointing?)"
            )
        for tap, hidden in self._taps.items():
            if hidden.dim() != 3:
                raise ValueError(
                    f"{type(self.model).__name__}'s layer {tap} gives {list(hidden.shape)}, not one vector per token "
                    "[N, n, H], so its taps cannot be read; not supported"
                )
        features = torch.cat([self._taps[tap].to(self.device) for tap in self.target_layer_ids], dim=-1)
        self._taps.clear()
        return output.logits.to(self.device), features

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back. Called after every forward: sliding layers trim themselves here."""
        self._rollback.take_back(count)
