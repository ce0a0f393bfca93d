"""A conversation that goes on from a cache gives what one from scratch gives: tokens, rounds, the drafter's view."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache

from dflash.modeling.resume_dflash import shared_prefix
from dflash.modeling.target_dflash import cache_argument
from families import build_target, exists
from tiny import VOCAB, WatchedDrafter, plain, tiny_drafter, tiny_prompt, tiny_target

HYBRIDS = ["qwen3_next", "qwen3_5", "nemotron_h", "falcon_h1", "kimi_linear", "lfm2", "gemma3", "gemma4_shared"]


def slots(call):
    return (None, 0, 3, 6, 1, 2)[call % 6]


def speak(draft, target, ids, new, wrong=slots, **options):
    """One turn of a drafter that mostly proposes the right text; gives the output and what the drafter computed."""
    draft.script(plain(target, ids, new + 16), wrong)
    output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=new, return_dict=True, **options)
    return output, draft.seen


def assert_same(resumed, scratch):
    (output, seen), (expected, expected_seen) = resumed, scratch
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.emitted, expected.emitted)
    assert len(seen) == len(expected_seen) > 1
    for (position, hidden), (expected_position, expected_hidden) in zip(seen, expected_seen, strict=True):
        assert position == expected_position
        torch.testing.assert_close(hidden, expected_hidden, rtol=0, atol=1e-4)  # state-space mixers compute in float32


def converse(target, draft, budgets, **options):
    """Turns with a few tokens of the user between them, each compared with the same turn from scratch."""
    text, cache = tiny_prompt(9), None
    for turn, new in enumerate(budgets):
        resumed = speak(draft, target, text, new, cache=cache, **options)
        assert_same(resumed, speak(draft, target, text, new, **options)) if new > 9 else None
        output = resumed[0]
        assert torch.equal(output.sequences, plain(target, text, new))
        assert cache is None or output.cache is cache
        cache = output.cache
        assert torch.equal(cache.ids, output.sequences[:, :-1])
        assert cache.target_cache.get_seq_length() == cache.ids.shape[1]
        assert cache.draft_cache.start + cache.draft_cache.length == cache.ids.shape[1]
        text = torch.cat([output.sequences, tiny_prompt(turn + 1, seed=turn)], dim=1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_sliding"])
@pytest.mark.parametrize("layers", ["full", "mixed"])
def test_turns(family, layers):
    """Budgets end a turn anywhere in a block: also right after the prompt, and in a round without a draft."""
    target, draft = tiny_target(family), tiny_drafter(layers, cls=WatchedDrafter)
    converse(target, draft, [14, 1, 15, 2, 16, 3, 17])


@pytest.mark.parametrize("family", HYBRIDS)
def test_turns_of_every_kind_of_cache(family):
    if not exists(family):
        pytest.skip(f"the installed transformers has no {family}")
    converse(build_target(family), tiny_drafter(cls=WatchedDrafter), [14, 1, 15, 12])


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 3}, {"draft_context_window": 12}, {"block_size": 4}])
def test_turns_with_options(options):
    wrong = {"wrong": lambda call: call % 3} if "block_size" in options else {}
    converse(tiny_target("qwen3_sliding"), tiny_drafter(cls=WatchedDrafter), [14, 15, 16], **options, **wrong)


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "qwen3_5"])
@pytest.mark.parametrize("position", range(1, 9))
def test_a_stop_token_anywhere_in_a_block(family, position):
    """What a round accepted after the stop token is in no cache."""
    target = build_target(family) if family == "qwen3_5" else tiny_target(family)
    draft, ids = tiny_drafter(cls=WatchedDrafter), tiny_prompt(9)
    stop = plain(target, ids, 9)[0, 9 + position].item()
    first, _ = speak(draft, target, ids, 30, wrong=lambda _: None, stop_token_ids=stop)
    assert first.sequences[0, -1] == stop and torch.equal(first.cache.ids, first.sequences[:, :-1])
    text = torch.cat([first.sequences, tiny_prompt(3, seed=1)], dim=1)
    resumed = speak(draft, target, text, 14, cache=first.cache, stop_token_ids=[])
    assert_same(resumed, speak(draft, target, text, 14, stop_token_ids=[]))


def test_rounds_without_drafts_leave_no_hole():
    target, draft = tiny_target(), tiny_drafter(cls=WatchedDrafter)
    first, _ = speak(draft, target, tiny_prompt(9), 12, block_size=1)
    resumed = speak(draft, target, first.sequences, 14, cache=first.cache)
    assert_same(resumed, speak(draft, target, first.sequences, 14))


def test_an_edited_text_goes_back_to_the_common_prefix():
    """Changed anywhere, shortened, or asked again."""
    target, draft, ids = tiny_target(), tiny_drafter("mixed", cls=WatchedDrafter), tiny_prompt(12)
    first, _ = speak(draft, target, ids, 20)
    for edit in (0, 1, 5, 11, 20, 30):
        text = first.sequences.clone()
        text[0, edit] = (text[0, edit] + 1) % VOCAB
        resumed = speak(draft, target, text, 12, cache=copy.deepcopy(first.cache))
        assert_same(resumed, speak(draft, target, text, 12))
    for text in (ids, ids[:, :1], first.sequences[:, :-1]):
        resumed = speak(draft, target, text, 12, cache=copy.deepcopy(first.cache))
        assert_same(resumed, speak(draft, target, text, 12))


@pytest.mark.parametrize("family", ["qwen3_sliding", "qwen3_5"])
def test_a_cache_that_cannot_go_back_says_where(family):
    target = build_target(family) if family == "qwen3_5" else tiny_target(family)
    draft = tiny_drafter(cls=WatchedDrafter)
    first, _ = speak(draft, target, tiny_prompt(12), 20)
    text = first.sequences.clone()
    text[0, 7] = (text[0, 7] + 1) % VOCAB
    with pytest.raises(ValueError, match=rf"31 tokens.*position 7 \(input_ids: {text[0, 7]} .*cannot go back"):
        speak(draft, target, text, 12, cache=first.cache)
    resumed = speak(draft, target, first.sequences, 12, cache=first.cache)
    assert_same(resumed, speak(draft, target, first.sequences, 12))


def test_a_short_sliding_cache_goes_back():
    target, draft, ids = tiny_target("qwen3_sliding"), tiny_drafter(cls=WatchedDrafter), tiny_prompt(3)
    first, _ = speak(draft, target, ids, 5)
    assert_same(
        speak(draft, target, ids, 12, cache=first.cache),
        speak(draft, target, ids, 12),
    )


def test_a_window_that_moved_on_cannot_go_back_before_it():
    target, draft = tiny_target(), tiny_drafter(cls=WatchedDrafter)
    first, _ = speak(draft, target, tiny_prompt(40), 20, draft_context_window=16)
    with pytest.raises(ValueError, match=r"position 11 .*drafter's context begins at \d+"):
        speak(draft, target, first.sequences[:, :12], 12, cache=first.cache)


def test_caches_of_something_else_are_refused():
    target, draft, ids = tiny_target(), tiny_drafter(cls=WatchedDrafter), tiny_prompt(9)
    bare = DynamicCache(config=target.config)
    plain(target, ids, 3, **{cache_argument(target): bare})
    with pytest.raises(
        ValueError, match=r"DynamicCache with 11 tokens, but lacks the drafter's context.*return_dict=True"
    ):
        speak(draft, target, ids, 12, cache=bare)
    first, _ = speak(draft, target, ids, 12)
    with pytest.raises(ValueError, match="another target"):
        speak(draft, tiny_target(), ids, 12, cache=first.cache)
    with pytest.raises(ValueError, match="another drafter"):
        speak(tiny_drafter(cls=WatchedDrafter), target, ids, 12, cache=first.cache)


def test_a_failed_call_spoils_its_cache():
    target, draft, ids = tiny_target(), tiny_drafter(cls=WatchedDrafter), tiny_prompt(9)
    first, _ = speak(draft, target, ids, 12)
    with pytest.raises(ZeroDivisionError):
        speak(draft, target, first.sequences, 12, wrong=lambda call: 1 / 0, cache=first.cache)
    with pytest.raises(ValueError, match="when a call failed"):
        speak(draft, target, first.sequences, 12, cache=first.cache)


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value
    parts = value if isinstance(value, list) else getattr(value, "__dict__", {}).values()
    for part in value.values() if isinstance(value, dict) else parts:
        yield from tensors_of(part)


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "qwen3_5"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_kept_is_no_inference_tensor(mode, family):
    """A cache made inside inference mode goes on outside of it, where such tensors could not be written."""
    target = build_target(family) if family == "qwen3_5" else tiny_target(family)
    draft, ids = tiny_drafter(cls=WatchedDrafter), tiny_prompt(9)
    text = plain(target, ids, 40)
    with mode():
        draft.script(text, slots)
        first = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=12, return_dict=True)
    kept = list(tensors_of([first.cache.ids, first.cache.draft_cache, *first.cache.target_cache.layers]))
    assert len(kept) > 10 and not any(tensor.is_inference() or tensor.requires_grad for tensor in kept)
    resumed = speak(draft, target, text[:, :25], 14, cache=first.cache)
    assert_same(resumed, speak(draft, target, text[:, :25], 14))


def test_shared_prefix():
    ids = torch.tensor([[1, 2, 3, 4]])
    for prompt, length in (([1, 2, 3, 4, 5], 4), ([1, 2, 3, 4], 3), ([1, 2, 9, 4, 5], 2), ([1], 0), ([7, 2, 3], 0)):
        assert shared_prefix(ids, torch.tensor([prompt])) == length
