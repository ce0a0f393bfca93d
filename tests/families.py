"""Tiny random targets, one per family: 4 layers that mix the family's kinds, windows of 8, float64."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS, WIDTH, VOCABULARY, WINDOW = 4, 32, 61, 8

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED = ["sliding_attention", "full_attention"] * 2
_SLIDING = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LINEAR_MIX = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_GDN = {
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": _LINEAR_MIX,
}
_SHARED_EXPERT = _MOE | {"shared_expert_intermediate_size": 24}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
_MLA = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
_MUSE_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

# name: (model_type, settings); a wrapper's settings are those of its text model, under "text_config".
FAMILIES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 8, **_MOE}),
    "gpt_oss": ("gpt_oss", _SLIDING | _LOCAL_MOE),
    "gemma2": ("gemma2", _SLIDING),
    "gemma3": ("gemma3_text", _SLIDING),
    "gemma4": ("gemma4_text", _SLIDING | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 8.0}),
    "gemma4_shared": (
        "gemma4_text",
        _SLIDING
        | {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2},
    ),
    "glm4": ("glm4", {"head_dim": 8}),
    "glm4_moe": ("glm4_moe", {"head_dim": 8, **_ROUTED}),
    "deepseek_v3": ("deepseek_v3", _MLA | _ROUTED | {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4}),
    "minimax_m2": ("minimax_m2", {"head_dim": 8, **_LOCAL_MOE}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "ministral": ("ministral", _SLIDING),
    "ministral3": ("ministral3", {"head_dim": 8}),
    "olmo3": ("olmo3", _SLIDING),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "phi3": ("phi3", {}),
    "cohere2": ("cohere2", _SLIDING),
    "muse_glimmer": ("muse_glimmer", {"text_config": _SLIDING, "vision_config": _MUSE_VISION}),
    "qwen3_next": ("qwen3_next", _GDN | _SHARED_EXPERT),
    "qwen3_5": ("qwen3_5_text", _GDN),
    "qwen3_5_wrapper": ("qwen3_5", {"text_config": _GDN, "vision_config": _VISION}),
    "qwen3_5_moe": ("qwen3_5_moe_text", _GDN | _SHARED_EXPERT),
    "kimi_linear": (
        "kimi_linear",
        _MLA
        | _LOCAL_MOE
        | {
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
            "layer_types": _LINEAR_MIX,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        _MAMBA | _LOCAL_MOE | {"layer_types": _LINEAR_MIX, "shared_intermediate_size": 24},
    ),
    "nemotron_h": (
        "nemotron_h",
        _ROUTED
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "bamba": ("bamba", _MAMBA | {"attn_layer_indices": [2]}),
    "falcon_h1": ("falcon_h1", _MAMBA | {"mamba_d_ssm": 64}),
}

# Decoders that cannot be rolled back, with the part of the message that says why.
REFUSED = {
    "jamba": (
        "jamba",
        {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, "num_experts": 4},
        "cannot continue its state over several tokens",
    ),
    "zamba": (
        "zamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "n_mamba_heads": 2, "mamba_dt_rank": 4},
        "cannot continue its state over several tokens",
    ),
    "minimax": (
        "minimax",
        _LOCAL_MOE | {"head_dim": 8, "block_size": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
        "cannot be rolled back on Transformers' DynamicCache",
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {"head_dim": 8, "lru_width": WIDTH, "attention_window_size": WINDOW},
        "state outside its cache|no module that is handed the cache",
    ),
    "mamba2": (
        "mamba2",
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
        "no attention layer|takes no cache",
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
        "chunked_attention",
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        _MLA | _ROUTED | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "num_key_value_heads": 4},
        "indexed_attention|sparse_attention",
    ),
    "deepseek_v4": ("deepseek_v4", {}, "compressed_sparse_attention"),
    "gpt2": ("gpt2", {}, "no `layers`"),
}


def exists(family: str) -> bool:
    """Whether the installed transformers knows the family."""
    return (FAMILIES | REFUSED)[family][0] in CONFIG_MAPPING


def build_target(family: str, seed: int = 0, dtype=torch.float64, **overrides):
    """A random target of the family, in evaluation mode."""
    model_type, settings, *_ = (FAMILIES | REFUSED)[family]
    nested = "text_config" in settings
    text = _BASE | (settings["text_config"] if nested else settings) | overrides
    config = AutoConfig.for_model(model_type, **(settings | {"text_config": text} if nested else text))
    auto = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    torch.manual_seed(seed)
    target = auto.from_config(config, attn_implementation="eager", experts_implementation="eager")
    target.generation_config.eos_token_id = target.generation_config.pad_token_id = None
    return target.to(dtype).eval()
