"""The support table: what it says of a target, and how it is written without losing the other version's column."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from families import build_target

PATH = Path(__file__).parents[1] / "benchmarks" / "support_table.py"
spec = importlib.util.spec_from_file_location("support_table", PATH)
support = importlib.util.module_from_spec(spec)
spec.loader.exec_module(support)

NEW = [support.Row("alpha", "full", "exact"), support.Row("beta", "full + recurrent", "refused: a | b")]
OLD = [support.Row("alpha", "sliding", "exact")]
README = f"# Title\n\n{support.BEGIN}\n{support.END}\n\nLast line.\n"


def test_table():
    assert support.table(support.columns("5.24.0", NEW)).splitlines() == [
        "| family | its cache keeps | transformers 5.24.0 |",
        "|---|---|---|",
        "| alpha | full | exact |",
        r"| beta | full + recurrent | refused: a \| b |",
    ]


def test_writing_twice_changes_nothing_more():
    once = support.write(README, "5.24.0", NEW, floor="5.16")
    assert once.startswith("# Title\n") and once.endswith("\n\nLast line.\n") and "| alpha |" in once
    assert support.write(once, "5.24.0", NEW, floor="5.16") == once


@pytest.mark.parametrize("order", [("5.24.0", "5.16.3"), ("5.16.3", "5.24.0")])
def test_the_other_column_is_kept(order):
    text = README
    for version in order:
        text = support.write(text, version, NEW if version == "5.24.0" else OLD, floor="5.16")
    assert "| family | its cache keeps | transformers 5.16.3 | transformers 5.24.0 |" in text
    assert "| alpha | full | exact | exact |" in text  # the newest version says what is kept
    assert r"| beta | full + recurrent | not in this version | refused: a \| b |" in text
    assert support.write(text, "5.16.3", OLD, floor="5.16") == text


def test_a_newer_version_takes_the_place_of_the_newest():
    text = support.write(README, "5.16.3", OLD, floor="5.16")
    text = support.write(text, "5.24.0", NEW, floor="5.16")
    text = support.write(text, "5.25.1", NEW, floor="5.16")
    assert "transformers 5.16.3 | transformers 5.25.1 |" in text and "5.24.0" not in text


@pytest.mark.parametrize("text", ["", support.BEGIN, f"{support.END} {support.BEGIN}", README + README])
def test_markers_have_to_be_there_once(text):
    with pytest.raises(ValueError, match="support table"):
        support.write(text, "5.24.0", NEW, floor="5.16")


def cache_of(*layers):
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


def filled(layer, heads, key_width, value_width):
    layer.update(torch.zeros(1, heads, 3, key_width), torch.zeros(1, heads, 3, value_width))
    return layer


def test_what_a_cache_keeps_is_seen_in_its_layers():
    full, latent = filled(DynamicLayer(), 2, 8, 8), filled(DynamicLayer(), 1, 8, 4)
    sliding = filled(DynamicSlidingWindowLayer(4), 2, 8, 8)
    assert support.keeps(cache_of(full, full)) == "full"
    assert support.keeps(cache_of(sliding, full, sliding)) == "full + sliding"
    assert support.keeps(cache_of(latent)) == "latent (MLA)"
    state = LinearAttentionLayer()
    state.conv_states = {0: torch.zeros(1)}
    assert support.keeps(cache_of(state, full)) == "full + convolution"
    state.recurrent_states = {0: torch.zeros(1)}
    assert support.keeps(cache_of(state, full, SimpleNamespace())) == "full + recurrent"


class OtherCache(DynamicCache):
    pass


def test_unknown_caches_are_named():
    assert support.keeps(OtherCache()) == "OtherCache"
    for kind, arguments in ((DynamicLayer, ()), (DynamicSlidingWindowLayer, (4,))):
        layer = filled(type("OtherLayer", (kind,), {})(*arguments), 2, 8, 8)
        assert support.keeps(cache_of(layer)) == "OtherLayer"


def test_rows_of_real_targets():
    assert support.judge("llama") == support.Row("llama", "full", "exact")
    refused = support.judge("llama4")
    assert refused.keeps == "full + sliding" and refused.verdict.startswith("refused: ")
    assert refused.verdict.endswith("cannot be rolled back exactly (chunked_attention)")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("LlamaForCausalLM has layers (one, two); not supported", "has layers (one, two)"),
        ("LlamaForCausalLM.forward takes no cache, only ids", "forward takes no cache"),
        ("LlamaForCausalLM cannot go on: 4 tokens, after 5", "cannot go on"),
    ],
)
def test_reasons_are_short(monkeypatch, message, reason):
    def refuse(*_):
        raise ValueError(message)

    monkeypatch.setattr(support, "assert_exact", refuse)
    assert support.verdict_of(build_target("llama")) == f"refused: {reason}"


def test_a_wrong_token_is_not_called_exact(monkeypatch):
    monkeypatch.setattr("dflash.modeling.rollback_dflash.crop_keys", lambda layer, count: None)
    assert support.verdict_of(build_target("llama")) == "WRONG TOKENS"
