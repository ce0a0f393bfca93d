"""A prompt that is prefilled in chunks decodes as one that is not, in less memory."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from dflash.modeling.decoding_dflash import chunks
from dflash.modeling.target_dflash import cache_argument
from families import FAMILIES, build_target, exists
from memory import LiveBytes
from tiny import VOCAB, WIDTH, ScriptedDrafter, plain, tiny_drafter, tiny_prompt, tiny_target

PROMPT, CHUNK, TAPS = 1536, 128, [0, 2, 3]


def test_chunks_cover_every_position_once():
    for begin in (0, 3):
        for end in range(begin + 1, begin + 30):
            for size in (1, 2, 3, 7, 29, 100, None):
                pieces = chunks(begin, end, size)
                assert [i for piece in pieces for i in range(*piece)] == list(range(begin, end))
                lengths = [stop - start for start, stop in pieces]
                assert max(lengths) <= (max(2, size) + 1 if size else end - begin)
                assert min(lengths) > 1 or end - begin == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_sliding"])
@pytest.mark.parametrize("layers", ["full", "mixed"])
@pytest.mark.parametrize("size", [1, 5, 16])
def test_tokens_and_rounds_do_not_depend_on_the_chunks(family, layers, size):
    target, draft = tiny_target(family), tiny_drafter(layers, block_size=5)
    for prompt in (1, 16, 33):
        ids = tiny_prompt(prompt)
        options = {"target": target, "input_ids": ids, "max_new_tokens": 24, "return_dict": True}
        whole = draft.spec_generate(**options)
        output = draft.spec_generate(**options, prefill_chunk_size=size)
        assert torch.equal(output.sequences, plain(target, ids, 24))
        assert torch.equal(output.emitted, whole.emitted)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_targets(family):
    if not exists(family):
        pytest.skip(f"the installed transformers has no {family}")
    target = build_target(family)
    ids = tiny_prompt(29)
    text = plain(target, ids, 30)
    draft = tiny_drafter(cls=ScriptedDrafter).script(text, lambda call: call % 6)
    for size in (4, 13):
        draft.calls = 0
        output = draft.spec_generate(
            target=target, input_ids=ids, max_new_tokens=20, prefill_chunk_size=size, return_dict=True
        )
        assert torch.equal(output.sequences, text[:, :49]) and output.emitted.max() > 4


@pytest.mark.parametrize("layers", ["full", "mixed"])
def test_the_drafter_sees_the_same_context(layers):
    """By value: what a drafter computes after a prompt in chunks is what it computes after the prompt at once."""
    seen = []

    class Watched(ScriptedDrafter):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            seen[-1].append(output.last_hidden_state)
            return output

    target, ids = tiny_target("qwen3_sliding"), tiny_prompt(50)
    draft = tiny_drafter(layers, cls=Watched).script(plain(target, ids, 40), lambda call: call % 7)
    for size in (None, 7, 13):
        seen.append([])
        draft.calls = 0
        draft.spec_generate(target=target, input_ids=ids, max_new_tokens=30, prefill_chunk_size=size)
    for other in seen[1:]:
        assert len(other) == len(seen[0]) > 3
        for ours, reference in zip(other, seen[0], strict=True):
            torch.testing.assert_close(ours, reference, rtol=0, atol=1e-6)


def plain_peak(target, ids, size):
    """Peak of the target alone over the prompt, in pieces of `size`."""
    with torch.inference_mode(), LiveBytes() as memory:
        cache = DynamicCache(config=target.config)
        name = cache_argument(target)
        for piece in ids.split(size, dim=1):
            target(piece, logits_to_keep=1, use_cache=True, **{name: cache})
    return memory.peak


def spec_peak(draft, target, ids, size):
    with LiveBytes(columns=VOCAB) as memory:
        output = draft.spec_generate(
            target=target, input_ids=ids, max_new_tokens=9, prefill_chunk_size=size, return_dict=True
        )
    assert output.emitted.sum() == 8
    return memory


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
def test_memory_of_a_long_prompt(family):
    """Within a tenth of plain prefill and what decoding has to keep: the taps, and the drafter's keys and values."""
    changes = {"dtype": torch.float32, "max_position_embeddings": 4096}
    target, draft = tiny_target(family, **changes), tiny_drafter(**changes)
    ids = tiny_prompt(PROMPT)
    item = 4
    tap_row = len(TAPS) * WIDTH * item
    context = 2 * draft.config.num_hidden_layers * (PROMPT + 256) * 16 * item
    whole, parts = spec_peak(draft, target, ids, None), spec_peak(draft, target, ids, CHUNK)
    assert whole.peak <= 1.1 * (plain_peak(target, ids, PROMPT) + PROMPT * tap_row + context)
    assert parts.peak <= 1.1 * (plain_peak(target, ids, CHUNK) + CHUNK * tap_row + context)
    assert parts.peak <= 0.8 * whole.peak
    assert max(whole.tallest, parts.tallest) <= max(WIDTH, draft.config.block_size)  # no logits of the prompt


def test_memory_of_a_very_long_prompt():
    """8k tokens in chunks: the same bound, and a fraction of what all hidden states would hold."""
    tokens, chunk = 8192, 1024
    changes = {"dtype": torch.float32, "max_position_embeddings": tokens + 64, "num_hidden_layers": 2}
    dflash = {"mask_token_id": 60, "target_layer_ids": [0, 1]}
    target = tiny_target("qwen3_sliding", use_sliding_window=True, sliding_window=64, max_window_layers=0, **changes)
    draft = tiny_drafter(
        dtype=torch.float32, max_position_embeddings=tokens + 64, num_target_layers=2, dflash_config=dflash
    )
    ids = tiny_prompt(tokens)
    parts = spec_peak(draft, target, ids, chunk)
    context = 2 * draft.config.num_hidden_layers * (tokens + 256) * 16 * 4
    assert parts.peak <= 1.1 * (plain_peak(target, ids, chunk) + chunk * 2 * WIDTH * 4 + context)


@pytest.mark.parametrize("size", [0, -3, 2.0, True, "8"])
def test_wrong_sizes_are_named(size):
    with pytest.raises(ValueError, match=r"prefill_chunk_size.*got"):
        tiny_drafter().spec_generate(
            target=tiny_target(), input_ids=tiny_prompt(3), max_new_tokens=2, prefill_chunk_size=size
        )
