"""The drafter computes what an independent implementation of z-lab's model computes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel
from transformers.cache_utils import DFlashCache

from dflash import DFlashDraftModel
from dflash.checkpoint import ship
from dflash.modeling.cache_dflash import DFlashDraftCache
from dflash.modeling.target_dflash import TargetSession
from naive import naive_block
from tiny import DEPTH, tiny_drafter, tiny_target

GOLDENS = sorted(path.parent for path in Path(__file__).parents[1].glob("golden/*/config.json"))


@pytest.fixture(params=GOLDENS, ids=lambda folder: folder.name)
def golden(request, tmp_path):
    """A golden's folder as a checkpoint with our shipped files, and what it should give."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(request.param / name, tmp_path)
    ship(tmp_path)
    return tmp_path, load_file(request.param / "expected.safetensors")


def new_cache(kind, config):
    if kind == "ours":
        return DFlashDraftCache([config.layer_window(i) for i in range(config.num_hidden_layers)], capacity=4)
    cache = DFlashCache(config=config)
    cache.activate_past_recording()
    return cache


@torch.no_grad()
def play(draft, expected, cache):
    """Feeds the three rounds; yields (round, hidden, logits, head)."""
    head = torch.nn.Linear(32, 97, bias=False, dtype=torch.float64)
    head.weight.copy_(expected["lm_head.weight"])
    start = 0
    for r in range(3):
        features = expected[f"round{r}.features"]
        fresh = features.shape[1]
        ids = torch.cat([expected[f"round{r}.anchor"].reshape(1, 1), torch.full((1, 7), 96)], dim=1)
        noise = expected["embed_tokens.weight"][ids] * draft.config.input_embedding_scale
        positions = torch.arange(start, start + fresh + 8)[None]
        output = draft(noise_embeds=noise, context_hidden_states=features, position_ids=positions, cache=cache)
        if isinstance(cache, DFlashCache):
            cache.crop(-8)
        else:
            cache.keep_context(fresh)
        start += fresh
        yield r, output.last_hidden_state, draft.compute_logits(output.last_hidden_state, head), head


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_goldens_through_automodel_and_the_cache(golden, implementation, kind):
    folder, expected = golden
    draft = AutoModel.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float64, attn_implementation=implementation
    ).eval()
    assert type(draft).__module__.startswith("transformers_modules")
    cache = new_cache(kind, draft.config)
    if kind == "ours":  # the cache class that belongs to the loaded code
        cache = type(draft).forward.__globals__["DFlashDraftCache"](cache.windows, capacity=4)
    for r, hidden, logits, head in play(draft, expected, cache):
        assert (hidden - expected[f"round{r}.hidden"]).abs().max() < 1e-5
        assert (logits - expected[f"round{r}.logits"]).abs().max() < 1e-5
        if f"round{r}.greedy_tokens" in expected:
            anchor = expected[f"round{r}.anchor"].reshape(1)
            tokens = draft.propose(hidden, anchor, head, lambda scores: (scores.argmax(-1), None)).tokens
            assert torch.equal(tokens, expected[f"round{r}.greedy_tokens"])


@pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
def test_flex_attention_equals_sdpa(layers):
    features, noise = torch.randn(1, 20, 96), torch.randn(1, 8, 32)
    outputs = []
    for name in ("sdpa", "flex_attention"):
        draft = tiny_drafter(layers, dtype=torch.float32)
        draft.set_attn_implementation(name)
        with torch.no_grad():
            outputs.append(draft(noise_embeds=noise, context_hidden_states=features).last_hidden_state)
    assert torch.allclose(*outputs, atol=1e-5)


def test_one_pass_equals_many():
    """Context fed in pieces through the cache equals the same context at once without a cache."""
    draft = tiny_drafter("mixed")
    features, noise = torch.randn(1, 30, 96).double(), torch.randn(1, 8, 32).double()
    with torch.no_grad():
        whole = draft(noise_embeds=noise, context_hidden_states=features).last_hidden_state
        cache = DFlashDraftCache([6, None], capacity=8)
        for begin, end in ((0, 11), (11, 12), (12, 19), (19, 30)):
            piece = features[:, begin:end]
            last = draft(noise_embeds=noise, context_hidden_states=piece, cache=cache).last_hidden_state
            cache.keep_context(end - begin)
    assert torch.allclose(whole, last, atol=1e-7)


def test_padding_is_invisible():
    draft = tiny_drafter("mixed")
    features, noise = torch.randn(1, 12, 96).double(), torch.randn(1, 8, 32).double()
    mask = torch.tensor([[0] * 4 + [1] * 16])
    positions = torch.arange(-4, 16)[None].clamp(min=0)
    with torch.no_grad():
        padded = draft(
            noise_embeds=noise, context_hidden_states=features, attention_mask=mask, position_ids=positions
        ).last_hidden_state
        short = draft(noise_embeds=noise, context_hidden_states=features[:, 4:]).last_hidden_state
    assert torch.allclose(padded, short, atol=1e-7)


def test_rope_frequencies_survive_a_cast():
    draft = tiny_drafter(dtype=torch.float32)
    before = draft.rotary_emb.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert draft.rotary_emb.inv_freq.dtype == torch.float32 and torch.equal(draft.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("given", [None, 1.41589])
def test_yarn_keeps_the_attention_factor_of_the_checkpoint(tmp_path, given):
    scaling = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64}
    scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0} | ({"attention_factor": given} if given else {})
    tiny_drafter(rope_theta=50000.0, rope_scaling=scaling).save_pretrained(tmp_path)
    draft = DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cos, _ = draft.rotary_emb(torch.zeros(1, dtype=torch.float32), torch.zeros(1, 1, dtype=torch.long))
    assert cos.flatten()[0].item() == pytest.approx(given or 1.0)
    assert draft.rotary_emb.inv_freq.dtype == torch.float32


def test_features_of_a_wrong_width_are_named():
    with pytest.raises(ValueError, match=r"64.*3 taps of width 32 make 96"):
        tiny_drafter()(noise_embeds=torch.zeros(1, 8, 32), context_hidden_states=torch.zeros(1, 2, 64))


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_match_are_refused(tmp_path, change):
    """Transformers would only warn, and decode with random tensors or with half a model."""
    tiny_drafter().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        weights.pop("layers.1.mlp.up_proj.weight")
    elif change == "mismatched":
        weights["layers.1.mlp.up_proj.weight"] = torch.zeros(47, 32)
    else:
        weights["layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shapes = r".*\[47, 32\].*\[48, 32\]" if change == "mismatched" else ""
    with pytest.raises(ValueError, match=f"up_proj{shapes}"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_sliding"])
def test_taps_are_the_hidden_states(family):
    """Tap i is `hidden_states[i + 1]`, by value; so after the final norm for the last layer."""
    target = tiny_target(family)
    ids = torch.arange(1, 15)[None]
    with torch.no_grad(), TargetSession(target, [0, 1, DEPTH - 1]) as session:
        _, features = session.forward(ids, torch.arange(14)[None], logits_to_keep=1)
        states = target(ids, output_hidden_states=True).hidden_states
    assert torch.equal(features, torch.cat([states[1], states[2], states[DEPTH]], dim=-1))


def test_native_generation_takes_the_drafter():
    """Transformers' own DFlash loop gives the same tokens with our drafter, and really speculates."""
    for family in ("llama", "qwen3", "qwen3_sliding"):
        target, draft = tiny_target(family), tiny_drafter("mixed")
        ids = torch.arange(3, 20)[None]
        calls = []
        handle = draft.register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        native = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            assistant_model=draft,
            speculation_type="dflash",
        )
        assert calls
        handle.remove()
        assert torch.equal(native, draft.spec_generate(target=target, input_ids=ids, max_new_tokens=20))


VARIANTS = {
    "plain": {},
    "sink": {"attention_sink_bias": True},
    "not_causal": {"is_causal": False},
    "from_anchor": {"window_from_anchor": True},
    "from_anchor_not_causal": {"window_from_anchor": True, "is_causal": False},
    "all": {"window_from_anchor": True, "attention_sink_bias": True, "is_causal": True, "attention_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_variants_equal_a_drafter_written_as_loops(variant, implementation):
    """All at once, in pieces through our cache, and through Transformers' cache where that can hold it."""
    draft = tiny_drafter("mixed", **VARIANTS[variant])
    draft.set_attn_implementation(implementation)
    torch.manual_seed(3)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    features, noise = torch.randn(1, 20, 96).double(), torch.randn(1, 5, 32).double()
    with torch.no_grad():
        expected = naive_block(draft, features[0], noise[0])
        whole = draft(noise_embeds=noise, context_hidden_states=features).last_hidden_state[0]
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)
        cache = DFlashDraftCache([draft.config.cache_window(i) for i in range(2)], capacity=8)
        for begin, end in ((0, 9), (9, 10), (10, 20)):
            piece = features[:, begin:end]
            last = draft(noise_embeds=noise, context_hidden_states=piece, cache=cache).last_hidden_state[0]
            cache.keep_context(end - begin)
    torch.testing.assert_close(last, expected, rtol=0, atol=1e-5)


def test_the_variants_differ():
    """So that the comparison above can fail."""
    torch.manual_seed(3)
    features, noise = torch.randn(20, 96).double(), torch.randn(5, 32).double()
    outputs = []
    for variant in VARIANTS.values():
        draft = tiny_drafter("mixed", **variant)
        torch.manual_seed(4)
        for name, parameter in draft.named_parameters():
            if "sink" not in name and "bias" not in name:
                torch.nn.init.normal_(parameter, std=0.3)
        with torch.no_grad():
            outputs.append(naive_block(draft, features, noise))
    for i, one in enumerate(outputs):
        assert all((one - other).abs().max() > 1e-3 for other in outputs[:i])


@pytest.mark.parametrize("shifted", [False, True])
def test_which_outputs_predict(shifted):
    """By the words of the rule: slot k predicts the k-th token after the anchor, or the one after that."""
    draft, head = tiny_drafter(block_size=4, sample_from_anchor=shifted), torch.nn.Linear(32, 61, dtype=torch.float64)
    hidden = torch.randn(1, 4, 32, dtype=torch.float64)
    predictions = {k + shifted: head(hidden[0, k]).argmax().item() for k in range(4)}
    predictions.pop(0, None)  # the anchor itself is known
    tokens = draft.propose(hidden, torch.tensor([5]), head, lambda scores: (scores.argmax(-1), None)).tokens
    assert tokens[0].tolist() == [predictions[i] for i in sorted(predictions)] and len(predictions) == 3 + shifted


@pytest.mark.parametrize("switch", ["sample_from_anchor", "window_from_anchor", "has_embed_tokens", "has_lm_head"])
def test_native_generation_refuses_what_it_would_run_as_another_model(switch):
    target, draft, ids = tiny_target(), tiny_drafter("sliding", **{switch: True}), torch.arange(3, 20)[None]
    with pytest.raises(ValueError, match=rf"{switch}=True.*spec_generate"):
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            assistant_model=draft,
            speculation_type="dflash",
        )


def test_gradients_reach_every_weight():
    draft = tiny_drafter("mixed", dtype=torch.float32).train()
    output = draft(noise_embeds=torch.randn(1, 8, 32), context_hidden_states=torch.randn(1, 5, 96))
    output.last_hidden_state.sum().backward()
    assert all(parameter.grad is not None for parameter in draft.parameters())


def test_flash_attention_gets_arguments_instead_of_masks():
    """The kernel is not available everywhere; what it would be given is."""
    from dflash.modeling.attention_dflash import BlockAttention

    keys = torch.zeros(1, 2, 20, 8)
    assert BlockAttention(None, "flash_attention_2", 8, None, torch.float32).mask(True, 6, keys) is None
    padding = torch.ones(1, 30)
    assert BlockAttention(None, "flash_attention_3", 8, padding, torch.float32).mask(True, 6, keys).shape == (1, 20)


def test_shipped_config_on_disk(tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["model_type"] == "qwen3" and settings["architectures"] == ["DFlashDraftModel"]
    assert settings["auto_map"] == {
        "AutoConfig": "configuration_dflash.DFlashConfig",
        "AutoModel": "modeling_dflash.DFlashDraftModel",
    }
