"""What decoding needs of a target: embedding rows, head, taps, a forward over new tokens, and its rollback."""

import inspect
import threading

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

# Cache layers that crop exactly, and the attention patterns they stand for.
_EXACT_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_EXACT_PATTERNS = {"full_attention", "sliding_attention"}


def check_pair(config, target) -> None:
    """Raises `ValueError`, with what to do, if the drafter's config cannot belong to `target` or it cannot roll back.

    Nothing here depends on the target's name: only on its shapes and on what its cache can do.
    """
    _check_capabilities(target)
    text = target.config.get_text_config(decoder=True)
    rows, width = target.get_input_embeddings().weight.shape
    depth = len(target.get_decoder().layers)
    facts = (
        ("hidden_size", config.hidden_size, "the target's hidden size", text.hidden_size),
        ("hidden_size", config.hidden_size, "the width of the target's embedding", width),
        ("num_target_layers", config.num_target_layers, "the target's number of layers", depth),
        ("vocab_size", config.vocab_size, "the target's vocabulary", text.vocab_size),
    )
    for name, ours, what, theirs in facts:
        if ours != theirs:
            raise ValueError(f"this drafter belongs to another target: its {name} is {ours}, {what} is {theirs}")
    if config.mask_token_id >= rows:
        raise ValueError(f"mask_token_id {config.mask_token_id} has no row in the target's embedding of {rows} rows")


def _check_capabilities(target) -> None:
    name = type(target).__name__
    if getattr(target.config, "is_encoder_decoder", False) or not hasattr(target, "get_decoder"):
        raise ValueError(f"{name} is not a decoder-only language model; only such targets are supported")
    if target.get_output_embeddings() is None:
        raise ValueError(f"{name} has no language model head; load the target with AutoModelForCausalLM")
    if getattr(target, "_is_stateful", False):
        raise ValueError(f"{name} keeps a recurrent state that cannot be rolled back exactly; it is not supported yet")
    text = target.config.get_text_config(decoder=True)
    patterns = set(getattr(text, "layer_types", None) or ()) - _EXACT_PATTERNS
    layers = {type(layer) for layer in DynamicCache(config=target.config).layers} - set(_EXACT_LAYERS)
    if patterns or layers:
        found = ", ".join(sorted(patterns | {layer.__name__ for layer in layers}))
        raise ValueError(f"{name} has layers whose cache cannot be rolled back exactly ({found}); not supported yet")


class TargetSession:
    """One sequence of forwards over a target, with its cache and its taps. Use it in a `with` block.

    Args:
        target (`PreTrainedModel`): the target.
        target_layer_ids (`list[int]`): taps.
    """

    def __init__(self, target, target_layer_ids):
        self.target = target
        self.target_layer_ids = list(target_layer_ids)
        self.device = target.get_input_embeddings().weight.device
        self.cache = DynamicCache(config=target.config)
        self.cache.activate_past_recording()
        self._cache_name = "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
        self._taps: dict[int, torch.Tensor] = {}
        self._hooks: list = []

    def __enter__(self):
        thread = threading.get_ident()  # a target may serve several threads, each with its own session
        decoder = self.target.get_decoder()
        last = len(decoder.layers) - 1

        def keep(tap):
            def hook(module, inputs, output):
                if threading.get_ident() == thread:
                    self._taps[tap] = output if isinstance(output, torch.Tensor) else output[0]

            return hook

        for tap in self.target_layer_ids:
            # hidden_states[i + 1] of the last layer is taken after the final norm, so it is the decoder's output.
            module = decoder.layers[tap] if tap < last else decoder
            self._hooks.append(module.register_forward_hook(keep(tap)))
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()

    def embed(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Raw embedding rows [..., H] of ids, bypassing whatever the target does to them, times `scale`."""
        rows = functional.embedding(ids, self.target.get_input_embeddings().weight)
        return rows if scale == 1.0 else rows * scale

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's output head on hidden states [..., H] of any device and dtype."""
        head = self.target.get_output_embeddings()
        return head(hidden_states.to(head.weight.device, head.weight.dtype))

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: int):
        """Appends ids [N, n] -> logits [N, logits_to_keep, V] on the session's device, and features [N, n, K*H]."""
        before = self.cache.get_seq_length()
        output = self.target(
            input_ids=ids,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self._cache_name: self.cache},
        )
        if self.cache.get_seq_length() != before + ids.shape[1]:
            raise ValueError(
                f"the target's cache went from {before} to {self.cache.get_seq_length()} positions on {ids.shape[1]} "
                "tokens, so it cannot decode (is it in training mode with gradient checkpointing?)"
            )
        features = torch.cat([self._taps[tap].to(self.device) for tap in self.target_layer_ids], dim=-1)
        self._taps.clear()
        return output.logits.to(self.device), features

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back. Called after every forward: sliding layers trim themselves here."""
        self.cache.crop(-count)
