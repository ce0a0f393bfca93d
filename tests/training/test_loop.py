"""A run: what it learns in real decoding, how batches are cut, how it is resumed, and what it refuses."""

import json
import math
import signal

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from dflash import DFlashDraftModel
from dflash.training import loop
from dflash.training.documents import Document
from dflash.training.features import TargetStates
from dflash.training.loop import Trainer
from toy import WORDS, speak, toy_config, toy_documents, toy_drafter, toy_source, toy_target


def trainer(output, draft=None, source=None, documents=None, evaluate=None, **changes):
    target = toy_target()
    source = source or toy_source(target)
    documents = documents or toy_documents()
    return Trainer(toy_config(output, **changes), draft or toy_drafter(), target, documents, source, evaluate)


def weights(folder):
    return load_file(folder / "model.safetensors")


def metrics(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_a_trained_drafter_has_every_token_accepted(tmp_path, sample_from_anchor):
    draft = toy_drafter(4, sample_from_anchor=sample_from_anchor)
    most = draft.config.proposals() + 1
    assert most == (5 if sample_from_anchor else 4)
    run = trainer(tmp_path, draft, max_steps=160, learning_rate=5e-3, log_every=10)
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    result = run.run()
    for name, parameter in draft.named_parameters():
        assert not torch.equal(parameter, before[name]), f"{name} did not move"
    trained, target = DFlashDraftModel.from_pretrained(result.final), toy_target()
    for first in range(WORDS):
        prompt, new = speak(first, 4)[None], 1 + 3 * most
        output = trained.spec_generate(target, prompt, max_new_tokens=new, return_dict=True)
        assert output.sequences[0].tolist() == speak(first, 4 + new).tolist()
        assert output.emitted.tolist() == [[most] * 3]
        assert output.tau == most
    first, *_, last = metrics(tmp_path)
    assert last["simulated_tau"] == most and first["simulated_tau"] < 3
    assert last["slot_accuracy"] == [1.0] * (most - 1)
    assert last["loss"] < first["loss"] / 10
    assert last["coverage"] == 20 / 21  # all but the first token of each answer


@pytest.mark.parametrize("micro", [4, 1])
def test_how_a_batch_is_cut_does_not_change_the_losses(tmp_path, micro):
    results = []
    for name, size in (("whole", 8), ("cut", micro)):
        draft, target = toy_drafter().double(), toy_target().double()
        config = toy_config(tmp_path / name, batch_size=8, micro_batch_size=size, max_steps=3, log_every=1)
        Trainer(config, draft, target, toy_documents(), toy_source(target)).run()
        results.append(([line["loss"] for line in metrics(tmp_path / name)], draft))
    (losses, whole), (cut_losses, cut) = results
    assert losses == pytest.approx(cut_losses, rel=1e-9)
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_two_halves_are_the_whole_bit_for_bit(tmp_path, schedule):
    settings = dict(max_steps=8, log_every=1, schedule=schedule)
    trainer(tmp_path / "whole", **settings).run()
    half = trainer(tmp_path / "halves", **settings)
    stop_after(half, 4)
    result = half.run()
    assert result.interrupted and result.final is None and result.steps == 4
    with pytest.raises(FileExistsError, match="pass --resume"):
        trainer(tmp_path / "halves", **settings).run()
    continued = trainer(tmp_path / "halves", toy_drafter(seed=99), **settings)
    assert continued.run(resume=True).steps == 8
    whole, halves = weights(tmp_path / "whole" / "final"), weights(tmp_path / "halves" / "final")
    assert whole.keys() == halves.keys() and len(whole) > 20
    for name, tensor in whole.items():
        assert torch.equal(tensor, halves[name]), name
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("whole", "halves")]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def stop_after(run, steps):
    """Sends the process SIGTERM in the last of so many steps."""
    source, calls = run.source, []

    def counted(documents):
        calls.append(1)
        if len(calls) == steps:
            signal.raise_signal(signal.SIGTERM)
        return source(documents)

    run.source = counted


def test_a_run_is_not_continued_with_other_settings(tmp_path):
    trainer(tmp_path, max_steps=2).run()
    with pytest.raises(ValueError, match=r"learning_rate was 0\.003 and is 0\.1"):
        trainer(tmp_path, max_steps=2, learning_rate=0.1).run(resume=True)
    assert trainer(tmp_path, max_steps=2, log_every=1).run(resume=True).steps == 2


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path):
    run = trainer(tmp_path, max_steps=4, log_every=1)
    poison(run, {1})
    moved = []
    step = run.optimizer.step
    run.optimizer.step = lambda: (moved.append(run.step), step())
    assert run.run().steps == 4
    assert moved == [0, 2, 3]
    lines = metrics(tmp_path)
    assert math.isnan(lines[1]["loss"]) and [line["skipped"] for line in lines] == [0, 1, 1, 1]
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "final").values())


def test_too_many_of_them_stop_the_run(tmp_path):
    run = trainer(tmp_path, max_steps=9, max_bad_steps=3)
    poison(run, {2, 4, 5, 6})
    with pytest.raises(FloatingPointError, match="3 steps in a row were not finite, up to step 6"):
        run.run()
    assert not (tmp_path / "final").exists()


def poison(run, steps):
    """Puts a NaN in the features of these steps."""
    source = run.source

    def states(documents):
        found = source(documents)
        if run.step in steps:
            found = [TargetStates(state.features * math.nan, state.last_hidden) for state in found]
        return found

    run.source = states


def test_the_best_drafter_is_kept_by_its_tau(tmp_path):
    seen, taus = [], iter([1.5, 2.5, 2.0])

    def evaluate(draft):
        assert not draft.training
        seen.append(draft.fc.weight.detach().clone())
        return {"tau": next(taus), "other": 0.5}

    run = trainer(tmp_path, evaluate=evaluate, max_steps=6, eval_every=2, eval_prompts="given")
    result = run.run()
    assert result.best_tau == 2.5 and run.model.training
    assert torch.equal(weights(tmp_path / "best")["fc.weight"], seen[1])
    assert torch.equal(weights(tmp_path / "final")["fc.weight"], seen[2])
    assert [line["eval_tau"] for line in metrics(tmp_path) if "eval_tau" in line] == [1.5, 2.5, 2.0]
    DFlashDraftModel.from_pretrained(tmp_path / "best")
    assert (tmp_path / "best" / "train.yaml").read_text() == (tmp_path / "train.yaml").read_text()


def test_only_the_newest_states_stay(tmp_path):
    trainer(tmp_path, max_steps=5, save_every=1, keep_states=2).run()
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["step-00000004", "step-00000005"]


def test_gradient_checkpointing_and_the_restricted_head_change_nothing(tmp_path):
    trainer(tmp_path / "plain", max_steps=3).run()
    trainer(tmp_path / "saving", max_steps=3, gradient_checkpointing=True, head_chunk=5).run()
    # All words occur as labels; only the mask is missing, which nothing predicts.
    trainer(tmp_path / "restricted", max_steps=3, head_tokens="data").run()
    plain = weights(tmp_path / "plain" / "final")
    for name, tensor in weights(tmp_path / "saving" / "final").items():
        assert torch.allclose(tensor, plain[name], atol=1e-5), name
    restricted, loss = metrics(tmp_path / "restricted")[0], metrics(tmp_path / "plain")[0]
    assert restricted["slot_accuracy"] == pytest.approx(loss["slot_accuracy"], abs=0.02)


def test_a_drafter_proposes_the_tokens_of_its_restricted_head(tmp_path):
    def trained(name, tokens, *texts, draft=None):
        mask = torch.tensor([False, False, True, True, True])
        documents = [Document(str(i), torch.tensor(text), mask) for i, text in enumerate(texts)]
        run = trainer(tmp_path / name, draft, documents=documents, head_tokens=tokens, max_steps=1).run()
        return DFlashDraftModel.from_pretrained(run.final)

    texts = [1, 2, 5, 4, 5], [1, 3, 7, 8, 4]
    assert trained("all", "all", *texts).config.draft_token_ids is None
    part = trained("data", "data", *texts)
    assert part.config.draft_token_ids == [4, 5, 7, 8]
    assert trained("more", "data", [4, 6, 6, 6, 5], draft=part).config.draft_token_ids == [4, 5, 6, 7, 8]
    assert trained("again", "all", *texts, draft=part).config.draft_token_ids is None


def test_losses_on_the_target_distribution_train(tmp_path):
    trainer(tmp_path, max_steps=40, ce_weight=0.1, kl_weight=0.5, tv_weight=0.4, log_every=5).run()
    first, *_, last = metrics(tmp_path)
    assert last["cross_entropy"] < first["cross_entropy"] - 0.5


def test_documents_without_a_place_for_a_block_are_an_error(tmp_path):
    documents = [type(d)(d.id, d.input_ids, torch.zeros_like(d.loss_mask)) for d in toy_documents(3)]
    with pytest.raises(ValueError, match="none of 3 documents has two supervised tokens in a row"):
        trainer(tmp_path, documents=documents)
    assert not (tmp_path / "states").exists()


def test_a_batch_that_cannot_be_cut_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="batch_size 8 is not a multiple of micro_batch_size 3 times 1"):
        trainer(tmp_path, micro_batch_size=3)


def test_documents_longer_than_the_drafter_are_shortened(tmp_path):
    run = trainer(tmp_path, max_length=10)
    assert {len(document.input_ids) for document in run.stream.documents} == {10}
    with pytest.raises(ValueError, match="max_length 513 exceeds the drafter's max_position_embeddings, 512"):
        trainer(tmp_path, max_length=513)


@pytest.fixture
def fresh_accelerate():
    """Accelerate settles its precision once per process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_autocast_keeps_float32_weights_and_trains(tmp_path):
    run = trainer(tmp_path, max_steps=20, log_every=5, mixed_precision="bf16")
    seen = []
    hook = run.model.draft.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    run.run()
    hook.remove()
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    first, *_, last = metrics(tmp_path)
    assert last["cross_entropy"] < first["cross_entropy"] - 0.3


def test_a_drafter_that_was_being_replaced_is_not_lost(tmp_path):
    run = trainer(tmp_path, max_steps=1)
    run.run()
    (tmp_path / "final").rename(tmp_path / ".final.old")  # as a kill between the two moves leaves it
    listed = []
    write = loop.write_checkpoint

    def watched(model, folder):
        listed.append((tmp_path / "final" / "config.json").exists())
        return write(model, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_checkpoint", watched)
        run._write_drafter("final")
    assert listed == [True] and not list(tmp_path.glob(".final*"))
