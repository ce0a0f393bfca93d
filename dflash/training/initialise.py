"""Starting a new drafter from layers of its target."""

import torch

from dflash.modeling.target_dflash import unwrap

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_PROJECTIONS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


@torch.no_grad()
def copy_target_layers(draft, target, layer_ids) -> None:
    """Gives each layer of `draft` the projections and the two norms of a layer of `target`.

    Norms of queries and keys stay as they are unless the target has them. Norms are copied by what they do to a vector
    of ones, so that those that keep `weight - 1` are copied right.

    Args:
        draft (`DFlashDraftModel`), target (`PreTrainedModel`): the pair.
        layer_ids: a layer of the target for each layer of the drafter.

    Raises:
        ValueError: another number of layers, or a layer of other parts or shapes.
    """
    layers = unwrap(target).get_decoder().layers
    if len(layer_ids) != len(draft.layers):
        raise ValueError(
            f"init_layers names {len(layer_ids)} layers of the target, the drafter has {len(draft.layers)}"
        )
    if not all(0 <= layer_id < len(layers) for layer_id in layer_ids):
        raise ValueError(f"init_layers {list(layer_ids)} must lie in 0..{len(layers) - 1}, the target's layers")
    for own, layer_id in zip(draft.layers, layer_ids, strict=True):
        for name in _PROJECTIONS:
            _copy(name, _part(layers[layer_id], name, layer_id).weight, own.get_submodule(name).weight, layer_id)
        for name in (*_NORMS, "self_attn.q_norm", "self_attn.k_norm"):
            if name in _NORMS or _has(layers[layer_id], name):
                module = _part(layers[layer_id], name, layer_id)
                _copy(name, _norm_weight(module), own.get_submodule(name).weight, layer_id)


def _norm_weight(norm) -> torch.Tensor:
    """What an RMS norm multiplies by: its output for ones, whose root mean square is one."""
    return norm(torch.ones_like(norm.weight, dtype=torch.float32))


def _copy(name: str, theirs: torch.Tensor, own: torch.Tensor, layer_id: int) -> None:
    if theirs.shape != own.shape:
        raise ValueError(
            f"{name} of the target's layer {layer_id} is {tuple(theirs.shape)}, the drafter's {tuple(own.shape)}; "
            "init_layers needs a drafter with the target's heads and intermediate size"
        )
    own.copy_(theirs)


def _has(layer, name: str) -> bool:
    return name in dict(layer.named_modules())


def _part(layer, name: str, layer_id: int):
    if not _has(layer, name):
        raise ValueError(f"the target's layer {layer_id} has no {name} to start from")
    return layer.get_submodule(name)
