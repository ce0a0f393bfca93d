"""Proposals over some tokens only: their notation, their rows of the target's head, and output that stays exact."""

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from dflash import DFlashConfig
from dflash.modeling.draft_tokens_dflash import RestrictedHead, read_token_ids, write_token_ids
from tiny import VOCAB, drafter_settings, plain, tiny_drafter, tiny_prompt, tiny_target

CHOSEN = [*range(0, VOCAB, 3), 1, 4]
CHOSEN.sort()


def decode(draft, target, ids, new, **options):
    return draft.spec_generate(target=target, input_ids=ids, max_new_tokens=new, return_dict=True, **options)


def proposals(draft, target, ids, **options):
    """The draft tokens that each round verifies."""
    seen = []

    def watch(module, args, kwargs):
        seen.append(kwargs["input_ids"][0, 1:].tolist())

    hook = target.register_forward_pre_hook(watch, with_kwargs=True)
    decode(draft, target, ids, 30, **options)
    hook.remove()
    return [block for block in seen[1:] if block]


@pytest.mark.parametrize("seed", range(20))
def test_ids_survive_being_written_as_ranges(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(200, generator=generator) < (seed + 1) / 21).nonzero()[:, 0].tolist()
    written = write_token_ids(ids)
    assert read_token_ids(written, 200) == ids and written.count(",") <= len(ids)
    with pytest.raises(ValueError, match=f"vocab_size is {ids[-1]}"):
        read_token_ids(written, ids[-1])


def test_how_ranges_look():
    assert write_token_ids([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert read_token_ids("5,7-8,0-2", 9) == [5, 7, 8, 0, 1, 2]
    assert read_token_ids(None, 9) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "neither"),
        ("1-", "neither"),
        ("1,,2", "neither"),
        ("-1", "neither"),
        ("1 - 2", "neither"),
        ("one", "'one' is neither"),
        ("0-99999999999999999", "vocab_size is 61"),
        ("9" * 40, "neither"),
        (f"{VOCAB}", f"vocab_size is {VOCAB}"),
        ("5-3", "strictly increasing"),
        ("3,1", "strictly increasing"),
        ("1-3,3", "strictly increasing"),
        ([], "at least one"),
        ([1, 1], "strictly increasing"),
        ([1, 2.5], "strictly increasing"),
        ([True, 2], "strictly increasing"),
        (7, "strictly increasing"),
        ([-1, 3], "span -1..3"),
        ([1, VOCAB], f"span 1..{VOCAB}, but vocab_size is {VOCAB}"),
    ],
)
def test_wrong_ids_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**drafter_settings(draft_token_ids=value))


def test_a_drafter_without_use_of_them_is_refused():
    with pytest.raises(ValueError, match="has_lm_head"):
        DFlashConfig(**drafter_settings(draft_token_ids="0-4", has_lm_head=True))
    selector = dict(conv_kernel_size=2, conv_group_size=4, selector_rank=4, selector_top_k=3)
    with pytest.raises(ValueError, match="selector"):
        DFlashConfig(**drafter_settings(draft_token_ids="0-4", architectures=["DFlash2DraftModel"], **selector))


def test_the_config_keeps_them(tmp_path):
    config = DFlashConfig(**drafter_settings(draft_token_ids=CHOSEN))
    written = config.to_dict()
    assert written["dflash_config"]["draft_token_ids"] == write_token_ids(CHOSEN)
    assert "draft_token_ids" not in written
    config.save_pretrained(tmp_path)
    assert DFlashConfig.from_pretrained(tmp_path).draft_token_ids == CHOSEN
    assert DFlashConfig(**drafter_settings()).draft_token_ids is None
    assert "draft_token_ids" not in DFlashConfig(**drafter_settings()).to_dict()["dflash_config"]


@pytest.mark.parametrize("bias", [False, True])
def test_the_head_has_the_rows_of_its_tokens(bias):
    head, hidden = nn.Linear(8, VOCAB, bias=bias).double(), torch.randn(2, 3, 8)
    logits = RestrictedHead(head, CHOSEN)(hidden)
    expected = head(hidden.double())
    for place, token in enumerate(CHOSEN):
        assert torch.allclose(logits[..., place], expected[..., token])


def test_heads_that_rows_cannot_be_taken_of():
    class Adapted(nn.Linear):
        pass

    assert RestrictedHead.suits(nn.Linear(4, 6))
    assert not RestrictedHead.suits(Adapted(4, 6))
    assert not RestrictedHead.suits(nn.Sequential(nn.Linear(4, 6)))
    wrapped = nn.Linear(4, 6)
    wrapped.weight = type("Packed", (nn.Parameter,), {})(torch.zeros(6, 4))
    assert not RestrictedHead.suits(wrapped)


@pytest.mark.parametrize("shifted", [False, True])
def test_the_most_likely_of_these_tokens_is_proposed(shifted):
    target, ids = tiny_target(), tiny_prompt(12)
    draft = tiny_drafter(sample_from_anchor=shifted, initializer_range=0.5)
    outputs, forward = [], draft.forward
    draft.forward = lambda **kwargs: outputs.append(forward(**kwargs)) or outputs[-1]
    whole = proposals(draft, target, ids)
    draft.config.draft_token_ids = CHOSEN
    outputs.clear()
    found = proposals(draft, target, ids)
    assert len(found) == len(outputs) > 5 and {token for block in found for token in block} <= set(CHOSEN)
    for block, output in zip(found, outputs, strict=True):
        with torch.inference_mode():
            logits = target.lm_head(output.last_hidden_state[0, 0 if shifted else 1 :])
        expected = [max(CHOSEN, key=lambda token: row[token].item()) for row in logits]
        assert block == expected[: len(block)]
    draft.config.draft_token_ids = list(range(VOCAB))
    assert proposals(draft, target, ids) == whole != found
    assert len({token for block in found for token in block}) > 3


@pytest.mark.parametrize("options", [{}, {"draft_confidence": 0.05}, {"block_size": 3}, {"draft_context_window": 5}])
def test_greedy_is_lossless(options):
    target, ids = tiny_target(), tiny_prompt(12)
    text = plain(target, ids, 40)
    draft = tiny_drafter(draft_token_ids=sorted(set(text[0, 12:].tolist())))
    output = decode(draft, target, ids, 40, **options)
    assert torch.equal(output.sequences, text) and output.drafted.sum() > 20
    custom = plain(target, ids, 40, custom_generate=draft.custom_generate, **options)
    assert torch.equal(custom, text)


def test_a_head_that_does_not_suit_is_used_whole():
    class Adapted(nn.Linear):
        pass

    target, ids = tiny_target(), tiny_prompt(12)
    whole = proposals(tiny_drafter(), target, ids)
    target.lm_head.__class__ = Adapted
    assert proposals(tiny_drafter(draft_token_ids=CHOSEN), target, ids) == whole


def test_an_offloaded_head_gives_its_rows():
    ids = tiny_prompt(12)
    draft, target = tiny_drafter(draft_token_ids=CHOSEN), tiny_target()
    expected = proposals(draft, target, ids)
    cpu_offload(target, torch.device("cpu"))
    assert target.lm_head.weight.is_meta
    assert proposals(draft, target, ids) == expected and target.lm_head.weight.is_meta
    assert torch.equal(decode(draft, target, ids, 30).sequences, plain(tiny_target(), ids, 30))
