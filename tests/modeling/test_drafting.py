"""A drafter with a bounded context computes what one that starts anew on that context computes."""

import warnings

import pytest
import torch

from dflash import DFlashDraftModel
from dflash.modeling.drafting_dflash import window_start
from dflash.modeling.target_dflash import TargetSession
from tiny import MASK, WatchedDrafter, plain, tiny_drafter, tiny_prompt, tiny_target

TAPS = [0, 2, 3]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


def first_position(length, window):
    """`window_start` as a loop that anybody can read."""
    start = 0
    while length - start > window:
        start += max(1, window // 2)
    return start


def test_the_window_moves_by_halves():
    for window in range(1, 20):
        for length in range(80):
            assert window_start(length, window) == first_position(length, window)
    assert window_start(10**6, None) == 0


@torch.no_grad()
def twin(draft, target, sequences, anchor_position, start):
    """The block's outputs after `anchor_position`, from features start.. of one forward, at positions 0.., uncached."""
    ids = sequences[:, :anchor_position]
    with TargetSession(target, TAPS) as session:
        _, features = session.forward(ids, torch.arange(anchor_position)[None], logits_to_keep=1)
        block = torch.full((1, draft.config.block_size), MASK)
        block[:, 0] = sequences[:, anchor_position]
        noise = session.embed(block)
    return DFlashDraftModel.forward(draft, noise, features[:, start:]).last_hidden_state


def check_against_the_twin(draft, target, prompt, window, **options):
    ids = tiny_prompt(prompt)
    text = plain(target, ids, 70)
    draft.script(text, lambda call: (None, 0, 3, 6, 1)[call % 5])
    output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=60, return_dict=True, **options)
    assert torch.equal(output.sequences, text[:, : prompt + 60])
    assert output.emitted.max() == draft.config.block_size
    moves = set()
    for position, hidden in draft.seen:
        start = first_position(position, window)
        moves.add(start)
        expected = twin(draft, target, text, position, start)
        torch.testing.assert_close(hidden, expected, rtol=0, atol=3e-4)
    assert draft.highest < window + draft.config.block_size and len(moves) > 1
    position, hidden = draft.seen[-1]
    assert (hidden - twin(draft, target, text, position, 0)).abs().max() > 1e-2, "the window changes nothing"


@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
@pytest.mark.parametrize("layers", ["full", "mixed"])
@pytest.mark.parametrize(("window", "chunk"), [(1, None), (2, 5), (7, None), (16, 11), (16, 30), (40, None)])
def test_windowed_context(family, layers, window, chunk):
    options = {"draft_context_window": window, "prefill_chunk_size": chunk}
    check_against_the_twin(tiny_drafter(layers, cls=WatchedDrafter), tiny_target(family), 33, window, **options)


@pytest.mark.parametrize("rope", [YARN, DYNAMIC], ids=["yarn", "dynamic"])
def test_other_kinds_of_positions(rope):
    """Scaled angles turn like others, and frequencies that depend on the length stay those of the trained one."""
    draft = tiny_drafter(cls=WatchedDrafter, rope_theta=None, rope_parameters=rope, max_position_embeddings=40)
    with pytest.warns(UserWarning, match=r"93 positions.*max_position_embeddings is 40.*last 32"):
        check_against_the_twin(draft, tiny_target(), 33, 32)


def test_the_default_is_unlimited_while_prompt_and_budget_fit():
    target, ids = tiny_target(), tiny_prompt(20)
    for limit, bounded in ((30, False), (29, True), (8, True), (1, True)):
        draft = tiny_drafter(max_position_embeddings=limit, cls=WatchedDrafter)
        draft.script(plain(target, ids, 20), lambda _: 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=10)
        assert torch.equal(output, plain(target, ids, 10))
        assert len([w for w in caught if "draft_context_window" in str(w.message)]) == bounded
        assert draft.highest < max(30 + 8, limit) if not bounded else draft.highest < max(limit, 9)


def test_bounded_keys_take_bounded_room():
    """The buffers do not grow with the text."""
    target, draft, ids = tiny_target(), tiny_drafter(cls=WatchedDrafter), tiny_prompt(3)
    draft.script(plain(target, ids, 420), lambda _: None)
    caches = []
    draft.register_forward_pre_hook(lambda module, args, kwargs: caches.append(kwargs["cache"]), with_kwargs=True)
    draft.spec_generate(target=target, input_ids=ids, max_new_tokens=400, draft_context_window=64)
    assert caches[0].start > 300 and caches[0].capacity < 300


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "all"])
def test_wrong_windows_are_named(window):
    with pytest.raises(ValueError, match=r"draft_context_window.*got"):
        tiny_drafter().spec_generate(
            target=tiny_target(), input_ids=tiny_prompt(3), max_new_tokens=2, draft_context_window=window
        )
