"""Tau without decoding: the same as that of real decoding, and only for texts of which this is true."""

import json

import pytest
import torch

from dflash.evaluation import prompts_of, real_tau
from dflash.training.anchors import candidates
from dflash.training.blocks import pack_blocks
from dflash.training.documents import Document
from dflash.training.features import OnlineFeatures
from dflash.training.replay import answers_of, replayed_tau, rounds_between
from dflash.training.run import check_greedy
from dflash.training.step import Objective, TrainableDrafter
from dflash.training.target import TargetParts
from tiny import VOCAB, plain, tiny_drafter, tiny_prompt, tiny_target


def greedy_texts(target, count=6, new=30):
    """Prompts of different lengths with greedy answers."""
    texts = []
    for i in range(count):
        prompt = tiny_prompt(4 + 3 * i, seed=i)
        text = plain(target, prompt, new)[0]
        texts.append(Document(str(i), text, torch.arange(len(text)) >= prompt.shape[1]))
    return texts


def half_right_drafter(target, texts, shifted=False, **changes):
    """A drafter that has learnt some of the texts."""
    draft = tiny_drafter(sample_from_anchor=shifted, initializer_range=0.3, **changes)
    optimizer = torch.optim.Adam(draft.parameters(), 3e-3)
    model = TrainableDrafter(draft.train(), TargetParts(target), Objective())
    states = OnlineFeatures(target, draft.config.target_layer_ids)(texts)
    batch = pack_blocks(texts, [candidates(text.loss_mask) for text in texts], states, draft.config)
    for _ in range(30):
        output = model(batch)
        (output["loss"] / output["weight"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft.eval()


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("layers", ["full", "mixed"])
def test_a_replay_is_what_decoding_does(shifted, layers):
    target = tiny_target()
    texts = greedy_texts(target)
    draft = half_right_drafter(target, texts, shifted, layers=layers)
    for new in (30, 17, 2):
        real = real_tau(draft, target, prompts_of(texts), new)
        assert replayed_tau(draft, target, texts, new) == pytest.approx(real, abs=1e-12)
    assert 1.5 < real_tau(draft, target, prompts_of(texts), 30) < 7


def test_a_replay_with_some_tokens_is_what_decoding_does_with_them():
    target = tiny_target()
    texts = greedy_texts(target)
    draft = half_right_drafter(target, texts)
    whole = replayed_tau(draft, target, texts, 30)
    said = torch.cat([text.input_ids[text.loss_mask] for text in texts])
    draft.config.draft_token_ids = sorted(said.bincount(minlength=VOCAB).argsort()[-4:].tolist())
    assert not set(said.tolist()) <= set(draft.config.draft_token_ids)
    replayed = replayed_tau(draft, target, texts, 30)
    assert replayed == pytest.approx(real_tau(draft, target, prompts_of(texts), 30), abs=1e-12) != whole


def test_each_answer_of_a_text_counts_and_stop_tokens_end_it():
    target = tiny_target()
    stop = int(plain(target, tiny_prompt(7), 30)[0, 20])
    target.generation_config.eos_token_id = stop
    first = plain(target, tiny_prompt(7), 30)
    second = plain(target, torch.cat([first, tiny_prompt(3, seed=1)], dim=1), 12)
    length = second.shape[1]
    mask = torch.zeros(length, dtype=torch.bool)
    mask[7 : first.shape[1]] = mask[first.shape[1] + 3 :] = True
    text = Document("0", second[0], mask)
    assert first[0, -1] == stop and first.shape[1] < 37
    assert answers_of(mask) == [(7, first.shape[1]), (first.shape[1] + 3, length)]
    draft = half_right_drafter(target, [text])
    prompts = [second[0, :7], second[0, : first.shape[1] + 3]]
    assert replayed_tau(draft, target, [text], 12) == pytest.approx(real_tau(draft, target, prompts, 12), abs=1e-12)


def test_texts_without_a_round():
    target, draft = tiny_target(), tiny_drafter()
    mask = torch.tensor([False, False, True])
    assert replayed_tau(draft, target, [Document("one token", torch.tensor([1, 2, 3]), mask)]) == 1.0
    assert replayed_tau(draft, target, [Document("no prompt", torch.tensor([1, 2, 3]), mask | True)]) == 1.0
    assert answers_of(torch.zeros(4, dtype=torch.bool)) == []


def test_rounds_between():
    runs = {3: 0, 4: 2, 7: 5}
    assert [rounds_between(3, last, runs) for last in (3, 4, 5, 7, 8, 12)] == [0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answers": "transformers", "generation": {"temperature": 0.7}}, "sampled at temperature 0.7"),
        ({"answers": "server", "generation": {"temperature": 1.0}}, "sampled at temperature 1.0"),
        ({"answers": "kept", "generation": {}}, "not written by the target"),
        ({"answers": "transformers", "generation": {"temperature": 0.0}}, None),
        (None, None),
    ],
)
def test_only_greedy_answers_are_replayed(tmp_path, record, message):
    path = tmp_path / "held.jsonl"
    if record is not None:
        (tmp_path / "held.jsonl.meta.json").write_text(json.dumps(record))
    if message is None:
        check_greedy(path)
    else:
        with pytest.raises(ValueError, match=message):
            check_greedy(path)
