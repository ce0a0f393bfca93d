"""A drafter as loops over heads, slots and keys that anybody can read; slow, in float64."""

import torch


def sees(config, layer: int, query: int, key: int, anchor: int) -> bool:
    """Whether the slot at position `query` sees position `key`, by the words of the rules."""
    window, causal = config.layer_window(layer), config.layer_is_causal(layer)
    if causal and key > query:
        return False
    if window is None:
        return True
    if config.window_from_anchor:
        return key >= anchor - window
    return abs(query - key) < window


def naive_block(draft, features: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """features [n, K*H] at positions 0.., noise [B, H] after them -> the outputs [B, H] after the final norm."""
    config = draft.config
    context = norm(draft.hidden_norm, draft.fc(features), config)
    hidden = noise
    for index, layer in enumerate(draft.layers):
        hidden = hidden + attend(config, index, layer.self_attn, context, norm(layer.input_layernorm, hidden, config))
        hidden = hidden + layer.mlp(norm(layer.post_attention_layernorm, hidden, config))
    return norm(draft.norm, hidden, config)


def norm(module, x: torch.Tensor, config) -> torch.Tensor:
    return module.weight * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()


def attend(config, index: int, module, context: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    source, anchor, size = torch.cat([context, hidden]), len(context), config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    outputs = []
    for slot in range(len(hidden)):
        heads = []
        for head in range(config.num_attention_heads):
            own, shared = (
                slice(head * size, (head + 1) * size),
                slice(head // groups * size, (head // groups + 1) * size),
            )
            query = turn(norm(module.q_norm, module.q_proj(hidden[slot])[own], config), anchor + slot, config)
            scores, values = [], []
            for position in range(len(source)):
                if sees(config, index, anchor + slot, position, anchor):
                    key = norm(module.k_norm, module.k_proj(source[position])[shared], config)
                    scores.append(query @ turn(key, position, config) / size**0.5)
                    values.append(module.v_proj(source[position])[shared])
            if config.attention_sink_bias:
                scores.append(module.attention_sink_bias[head])
                values.append(torch.zeros_like(values[0]))
            heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        outputs.append(module.o_proj(torch.cat(heads)))
    return torch.stack(outputs)


def turn(x: torch.Tensor, position: int, config) -> torch.Tensor:
    """Default RoPE: pairs (i, i + d/2) turn by position * theta^(-2i/d)."""
    half = len(x) // 2
    angles = position * config.rope_parameters["rope_theta"] ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[:half], x[half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])
