"""Loss masks against what each template says, for templates of several styles."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash.training.rendering import UnstableTemplateError, render_conversation

CHATML = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{% endfor %}<e>|{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
MARKED = (
    "{% for m in messages %}<s>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>"
    "{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
# As Qwen3: thinking is kept in the last answer only; without thinking the prompt holds an empty block.
THINKING = (
    "{% for m in messages %}<s>{{ m.role }}:{% if m.role == 'assistant' and loop.last %}"
    "<t>{{ m.reasoning_content or '' }}</t>{% endif %}{{ m.content }}<e>|{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% if enable_thinking is defined and not enable_thinking %}<t></t>"
    "{% endif %}{% endif %}"
)
# As DeepSeek: no closing token after the user, none of its own for a turn's end but the stop token.
BARE = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}<a>{{ m.content }}<e>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
# Puts into the prompt what the answer then lacks.
UNSTABLE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:<t>{% endif %}"
)


def tokenizer(template):
    """One token a character, and the special ones."""
    special = ["<s>", "<e>", "<t>", "</t>", "<u>", "<a>", "<call>"]
    vocabulary = {token: i for i, token in enumerate([*special, "?", *map(chr, range(32, 127))])}
    vocabulary["?"] = 7
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="<e>")
    made.add_special_tokens({"additional_special_tokens": special})
    made.chat_template = template
    return made


def shown(template, messages, **options):
    """Each document's text, supervised parts in [brackets]."""
    made, texts = tokenizer(template), []
    for document in render_conversation(made, "d", messages, stop_ids=[1], **options):
        text, before = "", False
        for token, flag in zip(document.input_ids.tolist(), document.loss_mask.tolist(), strict=True):
            text += ("[" if flag else "]") * (flag != before) + made.convert_ids_to_tokens(token)
            before = flag
        texts.append(text + "]" * before)
    return texts


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = [{"type": "function", "function": {"name": "f"}}]
CASES = {
    "one turn": (CHATML, [user("ab"), answer("cd")], ["<s>user:ab<e>|<s>assistant:[cd<e>]"]),
    "two turns": (
        CHATML,
        [user("a"), answer("b"), user("c"), answer("d")],
        ["<s>user:a<e>|<s>assistant:[b<e>]|<s>user:c<e>|<s>assistant:[d<e>]"],
    ),
    "the user has the last word": (
        CHATML,
        [user("a"), answer("b"), user("c")],
        ["<s>user:a<e>|<s>assistant:[b<e>]|<s>user:c<e>|"],
    ),
    "system": (
        CHATML,
        [{"role": "system", "content": "z"}, user("a"), answer("b")],
        ["<s>system:z<e>|<s>user:a<e>|<s>assistant:[b<e>]"],
    ),
    "tool call": (
        CHATML,
        [user("a"), answer("", tool_calls=CALL), {"role": "tool", "content": "9"}, answer("b")],
        ["<s>user:a<e>|<s>assistant:[<call>f<e>]|<s>tool:9<e>|<s>assistant:[b<e>]"],
    ),
    "empty answer": (CHATML, [user("a"), answer("")], ["<s>user:a<e>|<s>assistant:[<e>]"]),
    "truncated answer": (CHATML, [user("a"), answer("bc", truncated=True)], ["<s>user:a<e>|<s>assistant:[bc]"]),
    "marked": (
        MARKED,
        [user("a"), answer("b"), user("c"), answer("d")],
        ["<s>user:a<e>|<s>assistant:[b<e>]|<s>user:c<e>|<s>assistant:[d<e>]|"],
    ),
    "marked and truncated": (MARKED, [user("a"), answer("b", truncated=True)], ["<s>user:a<e>|<s>assistant:[b]"]),
    "thinking": (
        THINKING,
        [user("a"), answer("b", reasoning_content="hm")],
        ["<s>user:a<e>|<s>assistant:[<t>hm</t>b<e>]"],
    ),
    "thinking that later turns drop": (
        THINKING,
        [user("a"), answer("b", reasoning_content="hm"), user("c"), answer("d", reasoning_content="so")],
        [
            "<s>user:a<e>|<s>assistant:[<t>hm</t>b<e>]",
            "<s>user:a<e>|<s>assistant:b<e>|<s>user:c<e>|<s>assistant:[<t>so</t>d<e>]",
        ],
    ),
    "bare": (BARE, [user("a"), answer("b"), user("c"), answer("d")], ["<u>a<a>[b<e>]<u>c<a>[d<e>]"]),
}


@pytest.mark.parametrize("name", CASES)
def test_masks(name):
    template, messages, expected = CASES[name]
    found = shown(template, messages)
    assert [text.removesuffix("|") for text in found] == [text.removesuffix("|") for text in expected]


def test_thinking_turned_off_is_part_of_the_prompt():
    messages = [user("a"), answer("b")]
    assert shown(THINKING, messages, enable_thinking=False)[0].startswith("<s>user:a<e>|<s>assistant:<t></t>[b<e>]")


def test_tools_reach_the_template():
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML
    tools = [{"type": "function", "function": {"name": "fn", "description": "x", "parameters": {}}}]
    assert shown(template, [user("a"), answer("b")], tools=tools)[0].startswith("fn<s>user:a<e>|<s>assistant:[b<e>]")


def test_documents_of_single_answers_have_ids_of_their_own():
    messages = CASES["thinking that later turns drop"][1]
    documents = render_conversation(tokenizer(THINKING), "d", messages, stop_ids=[1])
    assert [document.id for document in documents] == ["d/0", "d/1"]


def test_an_unstable_template_is_an_error():
    with pytest.raises(UnstableTemplateError, match=r"'.*: b <e>' where the prompt has '.*: <t>'"):
        shown(UNSTABLE, [user("a"), answer("b")])


WRONG = [
    (CHATML, [user("a")], "no message of the assistant"),
    (CHATML, [user("a"), answer("b", truncated=True), user("c")], "cut short"),
    (CHATML, [user("a"), answer("", tool_calls=CALL, truncated=True)], "not known"),
    (CHATML, [user("a"), answer("", truncated=True)], "nothing to learn"),
    (None, [user("a"), answer("b")], "no chat template"),
]


@pytest.mark.parametrize(("template", "messages", "message"), WRONG)
def test_what_cannot_be_masked_is_an_error(template, messages, message):
    with pytest.raises(ValueError, match=message):
        shown(template, messages)
