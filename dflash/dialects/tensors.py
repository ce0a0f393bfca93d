"""Tensor names: prefixes and aliases that projects put on z-lab's names, and projections that some of them fuse."""

import re

import torch

_PREFIXES = ("dflash_module.", "draft_model.", "module.", "model.")
# TorchSpec and AngelSpec; Transformers' own assistant class; the aliases that vLLM takes.
_ALIASES = {
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
}
_FUSED = re.compile(r"(layers\.\d+\.self_attn\.)qkv_proj\.(weight|bias)")


def canonical_name(name: str) -> str:
    """A tensor's name without prefixes, by z-lab's naming."""
    while prefix := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    for alias, ours in _ALIASES.items():
        if name.startswith(alias):
            return ours + name.removeprefix(alias)
    return name


def tidy(tensors: dict[str, torch.Tensor], findings) -> dict[str, torch.Tensor]:
    """Tensors by canonical names; RoPE's frequencies, which follow from the config, are left out."""
    tidied, origins = {}, {}
    for name, tensor in tensors.items():
        ours = canonical_name(name)
        if ours.endswith("rotary_emb.inv_freq"):
            continue
        if ours in tidied:
            findings.add(f"{name} and {origins[ours]} both stand for {ours}")
        tidied[ours], origins[ours] = tensor, name
    return tidied


def split_fused(tensors: dict[str, torch.Tensor], settings: dict, findings) -> dict[str, torch.Tensor]:
    """Splits `qkv_proj` [(heads + 2 * kv_heads) * head_dim, ...] into the three projections, in that order."""
    output = {}
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            output[name] = tensor
            continue
        head_dim = settings["head_dim"]
        sizes = [settings["num_attention_heads"] * head_dim, *[settings["num_key_value_heads"] * head_dim] * 2]
        if tensor.shape[0] != sum(sizes):
            findings.add(
                f"{name} has {tensor.shape[0]} rows, but the config's heads make {' + '.join(map(str, sizes))}"
            )
            continue
        for projection, part in zip("qkv", tensor.split(sizes), strict=True):
            split = f"{match[1]}{projection}_proj.{match[2]}"
            if split in tensors:
                findings.add(f"{name} and {split} both stand for {split}")
            output[split] = part.contiguous()
    return output
