"""Writes the goldens of speculators' format beside this file, with that project's own code and random weights.

Run it in an environment of its own: `pip install torch==2.13.0 speculators==0.9.0`, then
`python tests/dialects/write_speculators_goldens.py`. What the files hold is in README.md.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.attention import create_float_mask
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

VOCAB, WIDTH, BLOCK, LENGTH, ANCHORS = 64, 16, 5, 24, (3, 11, 18)
CASES = {
    "full": {},
    "sliding": {"layers": ["sliding_attention", "sliding_attention"]},
    "mixed_not_causal": {"layers": ["sliding_attention", "full_attention"], "sliding_window_non_causal": True},
    "reduced": {"draft_vocab_size": 24},
    "from_anchor": {"sample_from_anchor": True},
}


def layer_config(layers: list[str]) -> Qwen3Config:
    slides = "sliding_attention" in layers
    return Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=len(layers),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        layer_types=layers,
        use_sliding_window=slides,
        sliding_window=6 if slides else None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )


def build(layers=("full_attention", "full_attention"), **settings) -> DFlashDraftModel:
    shifted = settings.get("sample_from_anchor", False)
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config(list(layers)),
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        aux_hidden_state_layer_ids=[1, 3, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - (not shifted))],
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
        **{"draft_vocab_size": VOCAB, **settings},
    )
    config.transformer_layer_config._attn_implementation = "eager"
    model = DFlashDraftModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    if model.use_draft_vocab:
        chosen = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[chosen] = True
        model.load_vocab_mappings(t2d, chosen - torch.arange(len(chosen)))
    return model


@torch.no_grad()
def outputs(model: DFlashDraftModel, features: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs after the final norm, and logits, of the blocks at all anchors, by the project's own parts and masks."""
    anchors = torch.tensor(ANCHORS)
    masks = {}
    for kind, window in (("full_attention", None), ("sliding_attention", model.sliding_window)):
        rule, queries, keys = create_anchor_block_mask_mod(
            document_ids=torch.zeros(LENGTH, dtype=torch.long),
            total_seq_len=LENGTH,
            anchor_positions=anchors,
            block_size=BLOCK,
            sliding_window=window,
            sliding_window_non_causal=model.sliding_window_non_causal,
        )
        masks[kind] = create_float_mask(rule, B=None, H=None, Q_LEN=queries, KV_LEN=keys, device="cpu")
    block = torch.full((1, len(ANCHORS) * BLOCK), model.mask_token_id)
    block[:, ::BLOCK] = ids[anchors]
    hidden = model.embed_tokens(block)
    context = model.hidden_norm(model.fc(features))
    positions = torch.cat([torch.arange(LENGTH), (anchors[:, None] + torch.arange(BLOCK)).flatten()])[None]
    angles = model.rotary_emb(hidden, positions)
    for layer, kind in zip(model.layers, model.config.transformer_layer_config.layer_types, strict=True):
        hidden = layer(
            hidden_states=hidden, target_hidden=context, attention_mask=masks[kind], position_embeddings=angles
        )
    hidden = model.norm(hidden)
    return hidden, model.lm_head(hidden)


def main() -> None:
    for seed, (name, settings) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        model = build(**settings)
        folder = Path(__file__).parent / "golden" / f"speculators_{name}"
        model.save_pretrained(folder)
        for extra in folder.glob("*.py"):
            extra.unlink()
        features, ids = torch.randn(1, LENGTH, 3 * WIDTH), torch.randint(0, VOCAB, (LENGTH,))
        hidden, logits = outputs(model, features, ids)
        expected = {"features": features, "ids": ids, "anchors": torch.tensor(ANCHORS), "hidden": hidden}
        expected |= {"logits": logits, "embed_tokens.weight": model.embed_tokens.weight.detach()}
        expected |= {"lm_head.weight": model.lm_head.weight.detach().clone()}
        save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
