"""`target.generate(custom_generate=<folder>, trust_remote_code=True, assistant_model=...)`."""

import pytest
import torch
from transformers import AutoModel, Qwen3Config, Qwen3Model, StopStringCriteria, TextStreamer

from dflash.checkpoint import write_checkpoint
from tiny import SHAPE, letter_tokenizer, plain, tiny_drafter, tiny_prompt, tiny_target

NEW = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_checkpoint(tiny_drafter(), tmp_path_factory.mktemp("generate") / "tiny-DFlash"))


@pytest.fixture
def rounds(monkeypatch):
    """How often any drafter, wherever its code comes from, has filled a block."""
    calls = []
    propose = torch.nn.Module.__call__

    def count(module, *args, **kwargs):
        if type(module).__name__ == "DFlashDraftModel":
            calls.append(module)
        return propose(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", count)
    return calls


@pytest.mark.parametrize("kind", ["name", "remote object", "object"])
def test_the_drafter_comes_as_assistant_model(folder, kind, rounds):
    target, ids = tiny_target(), tiny_prompt(7)
    draft = {"name": lambda: folder, "object": tiny_drafter}.get(
        kind, lambda: AutoModel.from_pretrained(folder, trust_remote_code=True, dtype="auto")
    )()
    settings = dict(repetition_penalty=1.4, min_new_tokens=9, eos_token_id=list(range(0, 60, 3)))
    expected = plain(target, ids, NEW, **settings)
    assert not rounds
    text = plain(
        target,
        ids,
        NEW,
        **settings,
        custom_generate=folder,
        trust_remote_code=True,
        assistant_model=draft,
        block_size=4,
    )
    assert torch.equal(text, expected) and rounds


def test_stop_strings_and_a_streamer(folder, capsys):
    target, ids, tokenizer = tiny_target(), tiny_prompt(7), letter_tokenizer()
    word = tokenizer.decode(plain(target, ids, NEW)[0, 16:18])
    expected = plain(target, ids, NEW, stop_strings=word, tokenizer=tokenizer)
    settings = dict(custom_generate=folder, trust_remote_code=True, assistant_model=folder)
    text = plain(target, ids, NEW, **settings, stop_strings=word, tokenizer=tokenizer, streamer=TextStreamer(tokenizer))
    assert torch.equal(text, expected)
    assert capsys.readouterr().out.strip() == tokenizer.decode(expected[0])
    kept = plain(target, ids, NEW, **settings, stopping_criteria=[StopStringCriteria(tokenizer, [word])])
    assert torch.equal(kept, expected)


def test_what_is_missing_is_named(folder):
    target, ids = tiny_target(), tiny_prompt(7)
    settings = dict(custom_generate=folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="assistant_model is missing"):
        plain(target, ids, NEW, **settings)
    with pytest.raises(ValueError, match="Qwen3Model"):  # what the drafter becomes without remote code
        plain(target, ids, NEW, **settings, assistant_model=Qwen3Model(Qwen3Config(**SHAPE, num_hidden_layers=1)))
    with pytest.raises(ValueError, match="tokenizer"):
        plain(target, ids, NEW, **settings, assistant_model=folder, stop_strings="a")
