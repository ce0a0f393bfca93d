"""Conversations in tokens, and which of the tokens the target wrote.

The tokens of a document are never a guess: its mask is that of the chat template itself, or follows from rendering the
conversation turn by turn, or there is an error.
"""

import re

import torch

from dflash.training.documents import Document

_ANSWER = "assistant"


class UnstableTemplateError(ValueError):
    """A chat template renders a conversation's beginning differently once the conversation goes on."""


def render_conversation(
    tokenizer, id: str, messages: list[dict], stop_ids=(), tools=None, **template
) -> list[Document]:
    """Documents in which every assistant message of a conversation is supervised once.

    Where the template marks its answers (`{% generation %}`) that is the mask. Otherwise an answer is what comes after
    the text up to its generation prompt; if the conversation changes what it says of earlier turns, as templates do
    that drop their thinking, each answer is a document of its own, `id/0`, `id/1`, ...

    Args:
        messages: as the chat template takes them; a message says `"truncated": true` if its answer was cut short.
        stop_ids: tokens that end an answer of the target. What a template puts after one is not the target's.
        tools, template: arguments of the chat template.

    Raises:
        UnstableTemplateError: an answer does not begin where its generation prompt ends.
        ValueError: there is no answer, or nothing of one to supervise.
    """
    render = _Renderer(tokenizer, tools, template)
    answers = [i for i, message in enumerate(messages) if message["role"] == _ANSWER]
    if not answers:
        raise ValueError("no message of the assistant, so there is nothing to learn")
    if any(message.get("truncated") for message in messages[:-1]):
        raise ValueError("an answer that was cut short is not the last message, so what follows it was not an answer")
    if re.search(r"{%-?\s*generation\b", str(tokenizer.chat_template)) and not messages[-1].get("truncated"):
        return [_checked(id, *render.with_mask(messages))]
    spans = [render.answer(messages, i, stop_ids) for i in answers]
    whole = render(messages)
    if messages[-1]["role"] == _ANSWER:
        whole = spans[-1][0]
    if all(whole[: len(ids)] == ids for ids, _, _ in spans):
        mask = torch.zeros(len(whole), dtype=torch.bool)
        for _, begin, end in spans:
            mask[begin:end] = True
        return [_checked(id, whole, mask)]
    documents = []
    for number, (ids, begin, end) in enumerate(spans):
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[begin:end] = True
        documents.append(_checked(f"{id}/{number}", ids, mask))
    return documents


def _checked(id: str, ids: list[int], mask) -> Document:
    mask = torch.as_tensor(mask, dtype=torch.bool)
    if not mask.any():
        raise ValueError("no token of the conversation is an answer's, so there is nothing to learn")
    return Document(id, torch.tensor(ids), mask)


class _Renderer:
    """A chat template with its arguments."""

    def __init__(self, tokenizer, tools, template: dict):
        if not tokenizer.chat_template:
            raise ValueError("this tokenizer has no chat template, so conversations cannot be rendered")
        self.tokenizer, self.arguments = tokenizer, {"tools": tools, "return_dict": True, **template}

    def __call__(self, messages: list[dict], prompt: bool = False) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, **self.arguments)["input_ids"]

    def with_mask(self, messages: list[dict]) -> tuple[list[int], list[int]]:
        encoded = self.tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, **self.arguments)
        return encoded["input_ids"], encoded["assistant_masks"]

    def answer(self, messages: list[dict], i: int, stop_ids) -> tuple[list[int], int, int]:
        """Tokens up to and with answer `i`, as far as the target wrote them, and where it begins and ends."""
        prompt, message = self(messages[:i], prompt=True), messages[i]
        if message.get("truncated"):
            return self._truncated(prompt, message)
        ids = self(messages[: i + 1])
        begin = len(prompt)
        if ids[:begin] != prompt:
            raise UnstableTemplateError(
                f"the chat template does not begin answer {i} with the generation prompt: it has "
                f"{self._around(ids, prompt)!r} where the prompt has {self._around(prompt, ids)!r}; generate the "
                "answers again instead of rendering them"
            )
        end = next((k + 1 for k in range(begin, len(ids)) if ids[k] in stop_ids), len(ids))
        return ids, begin, end

    def _truncated(self, prompt: list[int], message: dict) -> tuple[list[int], int, int]:
        """An answer that the target did not end: its text after the prompt, without what the template would add."""
        if message.get("tool_calls") or message.get("reasoning_content"):
            raise ValueError("an answer that was cut short has tool calls or reasoning_content; its text is not known")
        text = self.tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        return prompt + text, len(prompt), len(prompt) + len(text)

    def _around(self, ids: list[int], others: list[int]) -> str:
        """The text where ids first differ from others."""
        at = next((k for k, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))
        return self.tokenizer.decode(ids[max(0, at - 5) : at + 5])
