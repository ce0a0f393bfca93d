"""Static and quantised caches, and a caller's own, decode as `generate` does with the same kind of cache."""

import pytest
import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, QuantizedLayer, StaticCache

from dflash.modeling.target_dflash import TargetSession
from families import LAYERS, build_target, exists
from tiny import ScriptedDrafter, plain, tiny_drafter, tiny_prompt

BLOCK, NEW, TAPS = 5, 33, [0, 2, 3]
SLOTS = [0, 1, 2, 3, None, 0, 0, None, None, 2]
# One family a mix of layers: full, sliding, both, sinks, shared keys, latent, recurrent, convolution, all in one.
STATIC = ["llama", "mistral", "qwen2_sliding", "gpt_oss", "gemma4_shared", "deepseek_v3"]
STATIC += ["qwen3_5", "kimi_linear", "nemotron_h", "lfm2", "falcon_h1"]
NEWER = hasattr(cache_utils, "Fp8QuantizedLayer")


class Grid(QuantizedLayer):
    """Rounds keys to a coarse grid whose step depends on all of them, so that it matters which are rounded together."""

    def _quantize(self, tensor, axis):
        step = tensor.abs().max() / 6
        return (tensor / step).round() * step

    def _dequantize(self, q_tensor):
        return q_tensor


def grid_cache(residual_length):
    cache = DynamicCache()
    cache.layers = [Grid(residual_length=residual_length) for _ in range(LAYERS)]
    return cache


def cache_argument(cache):
    return {"cache" if NEWER else "past_key_values": cache}


def decode(target, ids, text, new=NEW, draft=None, **options):
    """Decodes `new` tokens of text [1, P + T] with a drafter that is wrong at every slot in turn; gives the output."""
    draft = draft or tiny_drafter(block_size=BLOCK, cls=ScriptedDrafter)
    draft.script(text, lambda call: SLOTS[call % len(SLOTS)])
    output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=new, return_dict=True, **options)
    assert torch.equal(output.sequences, text[:, : ids.shape[1] + new])
    return output


def speculated(output):
    """Whether every round emitted what the script says, cut by the budget."""
    counts, left = [], int(output.emitted.sum())
    while left:
        slot = SLOTS[len(counts) % len(SLOTS)]
        counts.append(min(BLOCK if slot is None else slot + 1, left))
        left -= counts[-1]
    return output.emitted[0].tolist() == counts


@pytest.mark.parametrize("family", STATIC)
def test_every_kind_of_layer_with_a_static_cache(family):
    """Prompts before, at and beyond the edge of the windows of 8."""
    if not exists(family):
        pytest.skip(f"the installed transformers has no {family}")
    target = build_target(family)
    for length in (6, 21):
        ids = tiny_prompt(length, seed=length)
        output = decode(target, ids, plain(target, ids, NEW + 16), cache_implementation="static")
        assert isinstance(output.cache.target_cache, StaticCache)
        assert speculated(output)


@pytest.mark.parametrize("length", [5, 9, 21])
@pytest.mark.parametrize("residual_length", [1, 2, 6, 16])
def test_keys_quantised_in_groups(residual_length, length):
    """Rejections right before and after a group is quantised; speculation goes on between."""
    target, ids = build_target("llama"), tiny_prompt(length, seed=length)
    text = plain(target, ids, NEW + 16, **cache_argument(grid_cache(residual_length)))
    assert not torch.equal(text, plain(target, ids, NEW + 16))
    output = decode(target, ids, text, cache=grid_cache(residual_length))
    assert (output.emitted.max() > 1) == (residual_length > 2)
    assert all(layer.get_seq_length() == length + NEW - 1 for layer in output.cache.target_cache.layers)


@pytest.mark.skipif(not NEWER, reason="this cache comes with Transformers 5.24")
def test_keys_quantised_one_by_one():
    target, ids = build_target("qwen3"), tiny_prompt(9)
    kind = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    text = plain(target, ids, NEW + 16, **kind)
    assert not torch.equal(text, plain(target, ids, NEW + 16))
    output = decode(target, ids, text, **kind)
    assert speculated(output)


class Counting(ScriptedDrafter):
    """Compares the context that it has with where the anchor stands."""

    def forward(self, noise_embeds, context_hidden_states, *args, **kwargs):
        known = kwargs["cache"].get_seq_length() + context_hidden_states.shape[1]
        output = super().forward(noise_embeds, context_hidden_states, *args, **kwargs)
        assert known == self.anchor_position
        return output


def test_a_round_without_room_leaves_no_hole_in_the_drafters_context(monkeypatch):
    target, ids = build_target("llama"), tiny_prompt(9)
    text = plain(target, ids, NEW + 16, **cache_argument(grid_cache(6)))
    monkeypatch.setattr("dflash.modeling.resume_dflash.make_cache", lambda *_: grid_cache(6))
    draft = tiny_drafter(block_size=BLOCK, cls=Counting).script(text, lambda _: None)
    sequences = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=NEW)
    assert torch.equal(sequences, text[:, :-16]) and 3 < draft.calls < NEW // 2


@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_callers_empty_cache_is_filled(family, kind):
    """Afterwards `generate` itself goes on with it."""
    target, ids = build_target(family), tiny_prompt(11)
    text = plain(target, ids, 50)
    cache = kind(config=target.config, **({"max_cache_len": 80} if kind is StaticCache else {}))
    output = decode(target, ids, text, new=20, past_key_values=cache)
    assert output.cache.target_cache is cache and int(cache.get_seq_length()) == 30
    with torch.no_grad():
        assert torch.equal(plain(target, output.sequences, 12, **cache_argument(cache)), text[:, : 11 + 32])


def test_a_cache_without_layers_yet():
    """It keeps all keys of sliding layers too, and cannot hold states."""
    target, ids = build_target("gemma2"), tiny_prompt(11)
    decode(target, ids, plain(target, ids, NEW + 16), cache=DynamicCache())
    with pytest.raises(ValueError, match=r"without layers.*DynamicCache\(config=target\.config"):
        decode(build_target("qwen3_5"), ids, tiny_prompt(99), cache=DynamicCache())


@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "qwen3_5"])
def test_turns_on_a_static_cache(family):
    """A turn that does not fit takes nothing: the cache goes on afterwards."""
    target, ids, draft = build_target(family), tiny_prompt(9), tiny_drafter(block_size=BLOCK, cls=ScriptedDrafter)
    options = {"draft": draft, "cache_implementation": "static", "cache_config": {"max_cache_len": 90}}
    first = decode(target, ids, plain(target, ids, 36), new=20, **options)
    text = torch.cat([first.sequences, tiny_prompt(3, seed=1)], dim=1)
    with pytest.raises(ValueError, match="room for 90 tokens, but prompt and budget need 164"):
        decode(target, text, text, new=133, cache=first.cache, draft=draft)
    decode(target, text, plain(target, text, 49), cache=first.cache, draft=draft)


def test_turns_on_a_quantised_cache_go_on_as_those_of_generate_do():
    target, ids, draft = build_target("llama"), tiny_prompt(9), tiny_drafter(block_size=BLOCK, cls=ScriptedDrafter)
    text = plain(target, ids, 28, **cache_argument(grid_cache(6)))
    first = decode(target, ids, text, new=12, cache=grid_cache(6), draft=draft)
    other = grid_cache(6)
    plain(target, ids, 12, **cache_argument(other))
    longer = torch.cat([first.sequences, tiny_prompt(3, seed=1)], dim=1)
    with pytest.raises(ValueError, match=r"cannot go back there \(Grid\)"):
        decode(target, ids, ids, cache=first.cache, draft=draft)
    decode(target, longer, plain(target, longer, 49, **cache_argument(other)), cache=first.cache, draft=draft)


def test_the_generation_config_chooses_the_cache():
    target, ids = build_target("llama"), tiny_prompt(9)
    text = plain(target, ids, NEW + 16)
    target.generation_config.cache_implementation = "static"
    assert isinstance(decode(target, ids, text).cache.target_cache, StaticCache)
    assert isinstance(decode(target, ids, text, cache=DynamicCache()).cache.target_cache, DynamicCache)
    assert isinstance(decode(target, ids, text, cache_implementation="dynamic").cache.target_cache, DynamicCache)
    target.generation_config.cache_implementation = "hybrid"
    assert isinstance(decode(target, ids, text).cache.target_cache, DynamicCache)
    target.generation_config.cache_implementation = "offloaded"
    with pytest.warns(UserWarning, match="'offloaded' cannot be rolled back.*a dynamic cache"):
        decode(target, ids, text)


def full(target, count=3):
    cache = DynamicCache(config=target.config)
    target.model(tiny_prompt(count), use_cache=True, **cache_argument(cache))
    return cache


def unknown_layers(target):
    cache = DynamicCache(config=target.config)
    for layer in cache.layers:
        layer.__class__ = type("OtherLayer", (type(layer),), {})
    return cache


REFUSED = {
    "no cache": (lambda t: {"cache": ((), ())}, TypeError, "cache is a tuple; pass"),
    "encoder and decoder": (
        lambda t: {"cache": EncoderDecoderCache(DynamicCache(), DynamicCache())},
        TypeError,
        "cache is a EncoderDecoderCache",
    ),
    "not empty": (lambda t: {"cache": full(t)}, ValueError, "DynamicCache with 3 tokens.*lacks the drafter's context"),
    "too short": (
        lambda t: {"cache": StaticCache(t.config, max_cache_len=20)},
        ValueError,
        "room for 20 tokens, but prompt and budget need 41",
    ),
    "another depth": (
        lambda t: {"cache": DynamicCache(config=build_target("llama", num_hidden_layers=2).config)},
        ValueError,
        "DynamicCache of 2 layers, the target has 4",
    ),
    "another window": (
        lambda t: {"cache": DynamicCache(config=build_target("qwen2_sliding").config)},
        ValueError,
        r"DynamicSlidingWindowLayer \(window: 8\) where the target has a DynamicLayer",
    ),
    "unknown layers": (lambda t: {"cache": unknown_layers(t)}, ValueError, "OtherLayer"),
    "two names": (lambda t: {"cache": DynamicCache(), "past_key_values": DynamicCache()}, ValueError, "two names"),
    "a cache and a kind": (
        lambda t: {"cache": DynamicCache(), "cache_implementation": "static"},
        ValueError,
        "'static'.*one already",
    ),
    "unknown kind": (
        lambda t: {"cache_implementation": "offloaded"},
        ValueError,
        "dynamic, static, quantized, got 'off",
    ),
    "settings of nothing": (
        lambda t: {"cache_config": {"nbits": 4}},
        ValueError,
        "nbits, but a dynamic cache takes no",
    ),
    "unknown setting": (
        lambda t: {"cache_implementation": "static", "cache_config": {"length": 4}},
        ValueError,
        "length, but a static cache takes max_cache_len",
    ),
    "chunks": (
        lambda t: {"cache": grid_cache(4), "prefill_chunk_size": 4},
        ValueError,
        "prefill_chunk_size=4.*quantised",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_caches_that_cannot_work(case):
    build, error, message = REFUSED[case]
    target = build_target("llama")
    with pytest.raises(error, match=message):
        decode(target, tiny_prompt(9), tiny_prompt(99), **build(target))


def test_a_short_static_window_is_refused():
    """It would forget keys that the target's window still has."""
    target = build_target("mistral")
    cache = StaticCache(target.config, max_cache_len=5)
    with pytest.raises(ValueError, match="room for 5 tokens, but prompt and budget need 8"):
        decode(target, tiny_prompt(9), tiny_prompt(99), cache=cache)


@pytest.mark.parametrize("prompt", [2, 7, 8, 20])
@pytest.mark.parametrize("block", [2, 5, 8])
def test_a_static_window_goes_back_by_any_count(prompt, block):
    """By value: the logits after a rollback are those of a forward over all tokens, across the edge of the window."""
    target, ids = build_target("qwen2_sliding"), tiny_prompt(40)
    positions = torch.arange(40)[None]
    with torch.inference_mode():
        expected = target(input_ids=ids).logits
        for count in range(block):
            cache = StaticCache(target.config, max_cache_len=40)
            with TargetSession(target, TAPS, cache) as session:
                session.forward(ids[:, :prompt], positions[:, :prompt], logits_to_keep=1)
                session.rollback(0)
                session.forward(ids[:, prompt : prompt + block], positions[:, prompt : prompt + block], block)
                session.rollback(count)
                start = prompt + block - count
                logits, _ = session.forward(ids[:, start : start + 8], positions[:, start : start + 8], 8)
            torch.testing.assert_close(logits, expected[:, start : start + 8])


def test_kinds_are_known_by_what_they_do():
    cache: Cache = grid_cache(4)
    cache.layers = [type("Rewritten", (Grid,), {"update": lambda *args: 0})(residual_length=4) for _ in range(LAYERS)]
    with pytest.raises(ValueError, match="Rewritten"):
        decode(build_target("llama"), tiny_prompt(9), tiny_prompt(99), cache=cache)
