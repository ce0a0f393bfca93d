"""Conversations that a target has with the user's turns of a prompt, kept in the very tokens that it read and wrote."""

from collections.abc import Iterator

import torch

from dflash.prompts import Prompt, encode_messages
from dflash.training.answers import Answer
from dflash.training.documents import Document


class Conversation:
    """A prompt and the answers to its turns so far.

    A turn whose prompt goes on from the tokens before continues their document. Where the template says something else
    of earlier turns (it drops their thinking, or a text is tokenised otherwise than it was written), a new document
    begins, whose earlier answers are not supervised a second time.
    """

    def __init__(self, prompt: Prompt, tokenizer, system: str | None = None, template: dict | None = None):
        self.prompt, self.tokenizer, self.template = prompt, tokenizer, template or {}
        self.messages = list(prompt.messages)
        if system and self.messages[0]["role"] != "system":
            self.messages.insert(0, {"role": "system", "content": system})
        self.turns = [] if prompt.tools else list(prompt.turns)  # nobody runs the tools that an answer may call
        self.answers: list[Answer] = []
        self._texts: list[tuple[list[int], list[bool]]] = []
        self.input_ids = self._encode()

    @property
    def done(self) -> bool:
        """Whether nothing is left to answer; an answer that was cut short is not followed by another turn."""
        return bool(self.answers) and (len(self.answers) > len(self.turns) or not self.answers[-1].finished)

    def add(self, answer: Answer) -> None:
        """Takes in the answer to `input_ids`, which become the prompt of the next turn."""
        self.answers.append(answer)
        if not self._texts or self.input_ids[: len(self._texts[-1][0])] != self._texts[-1][0]:
            self._texts.append(([], []))
        ids, mask = self._texts[-1]
        mask += [False] * (len(self.input_ids) - len(ids)) + [True] * len(answer.tokens)
        ids += [*self.input_ids[len(ids) :], *answer.tokens]
        if not self.done:
            said = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            self.messages.append({"role": "assistant", "content": said})
            self.messages.append({"role": "user", "content": self.turns[len(self.answers) - 1]})
            self.input_ids = self._encode()

    def documents(self) -> list[Document]:
        names = (
            [self.prompt.id] if len(self._texts) == 1 else [f"{self.prompt.id}/{i}" for i in range(len(self._texts))]
        )
        return [
            Document(name, torch.tensor(ids), torch.tensor(mask))
            for name, (ids, mask) in zip(names, self._texts, strict=True)
        ]

    def _encode(self) -> list[int]:
        return encode_messages(self.tokenizer, self.messages, self.prompt.tools, **self.template)[0].tolist()


def converse(answerer, conversations: list[Conversation]) -> Iterator[Conversation]:
    """Has the conversations, all at a time, and gives each when it is done."""
    while conversations:
        waiting = []
        for index, answer in answerer([conversation.input_ids for conversation in conversations]):
            conversation = conversations[index]
            conversation.add(answer)
            if conversation.done:
                yield conversation
            else:
                waiting.append(conversation)
        conversations = waiting
