"""Prompts in every form that they come in."""

import pytest

from dflash.prompts import encode_messages, make_prompt, read_prompts
from tiny import word_tokenizer


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM, TOOL = {"role": "system", "content": "s"}, {"role": "tool", "content": "t"}
CALL = answer("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}])
FORMS = [
    ({"prompt": "a"}, [user("a")], []),
    ({"turns": ["a", "b"]}, [user("a")], ["b"]),
    ({"prompt": "a", "turns": ["b"]}, [user("a")], []),
    ({"messages": [user("a")]}, [user("a")], []),
    ({"messages": [SYSTEM, user("a"), answer("b")]}, [SYSTEM, user("a")], []),
    ({"messages": [SYSTEM, user("a"), answer("b"), user("c")]}, [SYSTEM, user("a")], ["c"]),
    ({"messages": [user("a"), answer("b"), user("c"), answer("d")]}, [user("a")], ["c"]),
    ({"messages": [user("a"), CALL, TOOL, answer("d")]}, [user("a"), CALL, TOOL], []),
    ({"messages": [user("a"), CALL, TOOL]}, [user("a"), CALL, TOOL], []),
]


@pytest.mark.parametrize(("row", "messages", "turns"), FORMS)
def test_forms(row, messages, turns):
    prompt = make_prompt({"id": 3, **row}, "x line 1")
    assert (prompt.id, prompt.messages, prompt.turns, prompt.tools) == ("3", messages, turns, None)


def test_rows_without_an_id_are_named_by_their_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "tools": [{"name": "f"}]}\n{"prompt": "c"}\n')
    prompts = read_prompts(path, limit=2)
    assert [prompt.id for prompt in prompts] == ["p.jsonl line 1", "p.jsonl line 3"]
    assert prompts[1].tools == [{"name": "f"}]


UNUSABLE = [
    ("{", "line 1 is not JSON"),
    ("[3]", r"\[3\]"),
    ('{"text": "a"}', "prompt.*turns.*messages"),
    ('{"turns": []}', "turns"),
    ('{"turns": ["a", 3]}', "turns"),
    ('{"prompt": " "}', "prompt"),
    ('{"messages": "a"}', "messages must be a list"),
    ('{"messages": [{"content": "a"}]}', "messages must be a list"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "nothing is asked"),
    ('{"messages": []}', "nothing is asked"),
    ("", "no line with a prompt"),
]


@pytest.mark.parametrize(("line", "message"), UNUSABLE)
def test_rows_that_cannot_be_used(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_tokens_of_messages():
    tokenizer = word_tokenizer()
    assert encode_messages(tokenizer, [user("w5"), answer("w6"), user("w7")]).tolist() == [[1, 5, 2, 1, 6, 2, 1, 7, 2]]
    tokenizer.chat_template = "{% if enable_thinking %}w9 {% endif %}{{ tools[0]['name'] }}"
    ids = encode_messages(tokenizer, [user("w5")], tools=[{"name": "w8"}], enable_thinking=True)
    assert ids.tolist() == [[9, 8]]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        encode_messages(tokenizer, [user("w5")])
