"""Conversations: documents hold what the target read and wrote, and supervise each answer once."""

from dflash.prompts import Prompt
from dflash.training.answers import Answer
from dflash.training.conversations import Conversation, converse
from tiny import word_tokenizer

STOP = 3
# Prompts end with w8; answers before the last turn lose what stands before w9, as thinking does.
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}w8 {{ m.content.split('w9')[-1] }} w3 {% else %}w1 "
    "{{ m.content }} w2 {% endif %}{% endfor %}{% if add_generation_prompt %}w8{% endif %}"
)
PLAIN = THINKING.replace(".split('w9')[-1]", "")


def tokenizer(template=PLAIN):
    made = word_tokenizer()
    made.add_special_tokens({"eos_token": "w3"})
    made.chat_template = template
    return made


def user(text):
    return {"role": "user", "content": text}


def have(prompt, answers, **options):
    """The conversation, and the prompts that were answered."""
    conversation, asked = Conversation(prompt, options.pop("tokenizer", tokenizer()), **options), []
    for tokens in answers:
        assert not conversation.done
        asked.append(conversation.input_ids)
        conversation.add(Answer(tokens, tokens[-1] == STOP))
    return conversation, asked


def shown(conversation):
    return [(d.id, d.input_ids.tolist(), d.loss_mask.int().tolist()) for d in conversation.documents()]


def test_one_turn():
    conversation, asked = have(Prompt("p", [user("w5 w6")]), [[7, 7, STOP]])
    assert conversation.done and asked == [[1, 5, 6, 2, 8]]
    assert shown(conversation) == [("p", [1, 5, 6, 2, 8, 7, 7, STOP], [0] * 5 + [1] * 3)]


def test_turns_that_go_on_are_one_document():
    conversation, asked = have(Prompt("p", [user("w5")], ["w6"]), [[7, STOP], [9, STOP]])
    assert asked[1] == [1, 5, 2, 8, 7, STOP, 1, 6, 2, 8] and conversation.done
    assert shown(conversation) == [
        ("p", [1, 5, 2, 8, 7, STOP, 1, 6, 2, 8, 9, STOP], [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1])
    ]


def test_a_template_that_drops_thinking_makes_documents_of_their_own():
    prompt = Prompt("p", [user("w5")], ["w6"])
    conversation, asked = have(prompt, [[20, 9, 7, STOP], [21, 9, STOP]], tokenizer=tokenizer(THINKING))
    assert asked[1] == [1, 5, 2, 8, 7, STOP, 1, 6, 2, 8]
    assert shown(conversation) == [
        ("p/0", [1, 5, 2, 8, 20, 9, 7, STOP], [0, 0, 0, 0, 1, 1, 1, 1]),
        ("p/1", [1, 5, 2, 8, 7, STOP, 1, 6, 2, 8, 21, 9, STOP], [0] * 10 + [1] * 3),
    ]


def test_an_answer_that_was_cut_short_ends_the_conversation():
    conversation, _ = have(Prompt("p", [user("w5")], ["w6"]), [[7, 7]])
    assert conversation.done and shown(conversation) == [("p", [1, 5, 2, 8, 7, 7], [0] * 4 + [1] * 2)]


def test_an_empty_answer():
    conversation, _ = have(Prompt("p", [user("w5")]), [[STOP]])
    assert shown(conversation) == [("p", [1, 5, 2, 8, STOP], [0, 0, 0, 0, 1])]


def test_system_tools_and_arguments_of_the_template():
    template = "{{ tools[0]['name'] if tools }} {{ 'w40' if enable_thinking }} " + PLAIN
    prompt = Prompt("p", [user("w5")], ["w6"], tools=[{"name": "w41"}])
    options = {"system": "w11", "template": {"enable_thinking": True}}
    conversation, asked = have(prompt, [[7, STOP]], tokenizer=tokenizer(template), **options)
    assert asked == [[41, 40, 1, 11, 2, 1, 5, 2, 8]]
    assert conversation.done  # what follows a call of a tool is not known
    _, asked = have(Prompt("p", [{"role": "system", "content": "w12"}, user("w5")]), [[STOP]], system="w11")
    assert asked == [[1, 12, 2, 1, 5, 2, 8]]


def test_all_conversations_are_had():
    prompts = [Prompt(str(i), [user(f"w{10 + i}")], ["w6"] * (i % 3)) for i in range(7)]
    rounds = []

    def answerer(inputs):
        rounds.append(len(inputs))
        yield from ((i, Answer([inputs[i][-4] % 40 + 20, STOP], True)) for i in reversed(range(len(inputs))))

    done = list(converse(answerer, [Conversation(prompt, tokenizer()) for prompt in prompts]))
    assert sorted(c.prompt.id for c in done) == [str(i) for i in range(7)] and rounds == [7, 4, 2]
    assert all(len(c.answers) == len(c.prompt.turns) + 1 for c in done)
