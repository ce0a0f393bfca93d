"""One small drafter per format: its config.json and tensors as that project writes them, and the drafter it stands for.

speculators' samples are that project's own files. The others follow what their projects' code writes; z-lab's own
files are the goldens in tests/golden.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash import DFlashConfig, DFlashDraftModel

VOCAB, WIDTH, DEPTH, BLOCK = 64, 16, 6, 5
GOLDEN = Path(__file__).parent / "golden"
SPECULATORS = sorted(path.name for path in GOLDEN.iterdir())


@dataclass(frozen=True)
class Sample:
    """What a checkpoint holds, what has to be said when reading it, and the drafter that it is (None: a golden's)."""

    settings: dict
    tensors: dict
    given: dict = field(default_factory=dict)
    drafter: DFlashDraftModel | None = None


def layer_settings(**changes) -> dict:
    """Keys of the transformer, which the formats share."""
    return {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        "transformers_version": "5.16.0",
        **changes,
    }


SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True}


def canonical_settings(**changes) -> dict:
    """The same drafter in this library's own form."""
    dflash = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2, 3], **changes.pop("dflash_config", {})}
    settings = layer_settings(architectures=["DFlashDraftModel"], model_type="qwen3", num_target_layers=DEPTH)
    return {**settings, "block_size": BLOCK, "dflash_config": dflash, **changes}


def drafter(**changes) -> DFlashDraftModel:
    torch.manual_seed(len(changes))
    model = DFlashDraftModel(DFlashConfig(**canonical_settings(**changes))).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def zlab(**changes) -> Sample:
    model = drafter(**changes)
    settings = canonical_settings(**changes, auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    return Sample(settings, model.state_dict(), drafter=model)


def zlab_nested() -> Sample:
    """Both schemas of z-lab: here `block_size` is nested and RoPE has only the keys of Transformers 5."""
    sample = zlab(
        **SLIDES, is_causal=False, dflash_config={"final_logit_softcapping": 3.0, "input_embedding_scale": 2.0}
    )
    settings = {key: value for key, value in sample.settings.items() if key not in ("block_size", "rope_theta")}
    settings["dflash_config"] = {**settings["dflash_config"], "block_size": BLOCK}
    settings["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    return Sample(settings, sample.tensors, drafter=sample.drafter)


def zlab_fused() -> Sample:
    """With `qkv_proj`, prefixes and RoPE's frequencies, as some exports have them."""
    sample = zlab()
    tensors = {
        f"model.{name}": tensor for name, tensor in sample.tensors.items() if "_proj" not in name or "o_" in name
    }
    tensors |= {f"model.{name}": tensor for name, tensor in sample.tensors.items() if ".mlp." in name}
    for i in range(2):
        attention = f"layers.{i}.self_attn."
        parts = [sample.tensors[f"{attention}{part}_proj.weight"] for part in "qkv"]
        tensors[f"model.{attention}qkv_proj.weight"] = torch.cat(parts)
        tensors[f"model.{attention}rotary_emb.inv_freq"] = torch.ones(4)
    return Sample(sample.settings, tensors, drafter=sample.drafter)


def modelopt(**changes) -> Sample:
    """All layers in one window and causal inside the block, though `layer_types` calls them full."""
    model = drafter(**SLIDES, is_causal=True)
    dflash = {"causal": True, "use_swa": True, "swa_window_size": 4, "attention_sink_bias": False}
    return Sample(canonical_settings(dflash_config=dflash), model.state_dict(), drafter=model)


def modelopt_sink() -> Sample:
    model = drafter(attention_sink_bias=True, is_causal=True, sample_from_anchor=True)
    dflash = {"causal": True, "use_swa": False, "attention_sink_bias": True, "shift_label": True}
    settings = canonical_settings(dflash_config=dflash, attention_sink_bias=True)
    return Sample(settings, model.state_dict(), drafter=model)


def deepspec() -> Sample:
    model = drafter(sample_from_anchor=True, has_embed_tokens=True, has_lm_head=True)
    settings = layer_settings(architectures=["Qwen3DSparkModel"], model_type="qwen3", num_target_layers=DEPTH)
    settings |= {"block_size": BLOCK, "mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2, 3], "num_anchors": 512}
    settings |= {"markov_rank": 0, "enable_confidence_head": False}
    return Sample(settings, model.state_dict(), drafter=model)


def torchspec() -> Sample:
    model = drafter(has_embed_tokens=True)
    aliases = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight"}
    aliases["norm.weight"] = "final_norm.weight"
    tensors = {f"draft_model.{aliases.get(name, name)}": tensor for name, tensor in model.state_dict().items()}
    absent = ("attention_bias", "hidden_act", "layer_types", "sliding_window", "use_sliding_window", "rope_scaling")
    settings = {key: value for key, value in layer_settings().items() if key not in absent}
    settings |= {"architectures": ["DFlashDraftModel"], "model_type": "dflash", "mask_token_id": VOCAB - 1}
    settings |= {"num_target_layers": 3, "target_hidden_size": WIDTH, "target_num_hidden_layers": DEPTH}
    settings |= {"target_layer_ids": [0, 2, 3]}
    return Sample(settings, tensors, {"settings": {"block_size": BLOCK}}, model)


def assistant() -> Sample:
    """See test_reading.py for files that Transformers writes."""
    model = drafter(**SLIDES, is_causal=False)
    aliases = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = {aliases.get(name, name): tensor for name, tensor in model.state_dict().items()}
    absent = ("attention_bias", "use_sliding_window", "vocab_size", "rope_theta", "rope_scaling", "max_window_layers")
    settings = {key: value for key, value in layer_settings(**SLIDES).items() if key not in absent}
    settings |= {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    settings |= {"block_size": BLOCK, "mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2, 3]}
    settings |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    return Sample(settings, tensors, {"settings": {"num_target_layers": DEPTH, "vocab_size": VOCAB}}, model)


def speculators(name: str) -> Sample:
    settings = json.loads((GOLDEN / name / "config.json").read_text())
    return Sample(settings, load_file(GOLDEN / name / "model.safetensors"), {"settings": {"num_target_layers": DEPTH}})


def speculators_old() -> Sample:
    """Older files hold copies of the target's embedding and head, and lack newer keys."""
    sample, expected = speculators("speculators_full"), load_file(GOLDEN / "speculators_full" / "expected.safetensors")
    newer = ("sample_from_anchor", "sliding_window_non_causal")
    settings = {key: value for key, value in sample.settings.items() if key not in newer}
    own = {name: expected[name] for name in ("embed_tokens.weight", "lm_head.weight")}
    return Sample(settings, sample.tensors | own, sample.given)


SAMPLES = {
    "zlab": zlab,
    "zlab_nested": zlab_nested,
    "zlab_fused": zlab_fused,
    "modelopt": modelopt,
    "modelopt_sink": modelopt_sink,
    "deepspec": deepspec,
    "torchspec": torchspec,
    "assistant": assistant,
    "speculators_old": speculators_old,
    **{name: (lambda name=name: speculators(name)) for name in SPECULATORS},
}


def build(checkpoint) -> DFlashDraftModel:
    """The drafter of a `Checkpoint`."""
    model = DFlashDraftModel(checkpoint.config).eval()
    model.load_state_dict(checkpoint.tensors)
    model.check_tensors()
    return model


@torch.no_grad()
def behaviour(model: DFlashDraftModel) -> tuple:
    """All that a drafter does with a block on a fixed target: which slots it fills from what, with what, in numbers."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    embedding, head = torch.randn(2, VOCAB, WIDTH, generator=generator)
    features = torch.randn(1, 9, len(config.target_layer_ids) * WIDTH, generator=generator)
    ids = torch.full((1, config.block_size), config.mask_token_id)
    ids[:, 0] = 7
    rows = embedding if model.embed_tokens is None else model.embed_tokens.weight
    hidden = model(rows[ids] * config.input_embedding_scale, features).last_hidden_state
    proposal = model.propose(
        hidden, ids[:, 0], lambda x: x @ head.T, lambda logits: (logits.argmax(-1), logits.softmax(-1))
    )
    facts = (config.block_size, list(config.target_layer_ids), config.sample_from_anchor)
    return facts, [hidden, proposal.tokens, proposal.probabilities]


def same(one: tuple, other: tuple, tolerance: float = 1e-6) -> bool:
    return one[0] == other[0] and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance)
        for a, b in zip(one[1], other[1], strict=True)
    )
