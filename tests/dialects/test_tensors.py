"""Names of tensors, and projections that are fused."""

import pytest
import torch

from dflash.dialects.findings import Findings
from dflash.dialects.tensors import canonical_name, split_fused, tidy
from dflash.dialects.torchspec import even_taps

NAMES = {
    "model.layers.0.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
    "module.draft_model.fc.weight": "fc.weight",
    "dflash_module.norm.weight": "norm.weight",
    "context_proj.weight": "fc.weight",
    "draft_model.final_norm.weight": "norm.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "midlayer.self_attn.q_norm.weight": "layers.0.self_attn.q_norm.weight",
    "layers.0.model.fc.weight": "layers.0.model.fc.weight",
    "d2t": "d2t",
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    assert canonical_name(name) == NAMES[name]


def test_two_tensors_of_one_name_are_a_problem():
    findings = Findings("here")
    tidied = tidy({"fc.weight": torch.zeros(1), "model.fc.weight": torch.ones(1), "rotary_emb.inv_freq": 1}, findings)
    assert set(tidied) == {"fc.weight"} and "model.fc.weight and fc.weight" in findings.problems[0]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_fused_projections_split_in_order(kind):
    """Row by row: queries of all heads, then keys, then values."""
    settings = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 2}
    rows = torch.arange(10.0)
    fused = rows if kind == "bias" else rows[:, None].expand(10, 4)
    findings = Findings("here")
    parts = split_fused({f"layers.7.self_attn.qkv_proj.{kind}": fused}, settings, findings)
    wanted = {"q": [0, 1, 2, 3, 4, 5], "k": [6, 7], "v": [8, 9]}
    for part, values in wanted.items():
        tensor = parts.pop(f"layers.7.self_attn.{part}_proj.{kind}")
        assert (tensor if kind == "bias" else tensor[:, 0]).tolist() == values
    assert not parts and not findings.problems
    split_fused({f"layers.7.self_attn.qkv_proj.{kind}": fused[:9]}, settings, findings)
    assert "9 rows" in findings.problems[0] and "6 + 2 + 2" in findings.problems[0]


@pytest.mark.parametrize(
    ("count", "depth", "taps"),
    [(5, 36, [1, 9, 17, 25, 33]), (5, 32, [1, 8, 15, 22, 29]), (5, 48, [1, 12, 23, 34, 45]), (1, 36, [18])],
)
def test_even_taps_are_those_of_published_drafters(count, depth, taps):
    assert even_taps(count, depth) == taps
