"""A target's own answers to prompts, from an OpenAI-compatible server such as vLLM or SGLang.

Prompts go as token ids to `/completions`, and the text comes back as it was written, special tokens included: neither
the server's chat template nor its parsers of thinking and tool calls take part.
"""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from dflash.training.answers import Answer, AnswerSettings

ATTEMPTS = 3
TIMEOUT = 1800


class ServerAnswerer:
    """Answers prompts by a server's completions endpoint, `concurrency` at a time.

    vLLM gives the tokens of an answer (`return_token_ids`). Of a server that gives text only, the text is tokenised,
    and a stop token put after it if the server says that the answer ended by itself.

    Args:
        url: with the version, as in http://localhost:8000/v1. The environment's OPENAI_API_KEY is sent if there is one.
        model: the name by which the server knows the target; default: the only one that it serves.
        tokenizer: the target's.
        stop_ids: tokens that end an answer; the first stands for an end that the server does not name.

    Raises:
        ValueError: the server gives what this does not understand.
        RuntimeError: it cannot be reached, or refuses.
    """

    def __init__(self, url: str, model: str | None, tokenizer, settings: AnswerSettings, stop_ids, concurrency=64):
        self.url, self.tokenizer, self.settings = url.rstrip("/"), tokenizer, settings
        self.stop_ids, self.concurrency = list(stop_ids), concurrency
        self.model = model or self._only_model()

    def __call__(self, prompts: list[list[int]]) -> Iterator[tuple[int, Answer]]:
        """Answers prompts, in the order in which the server is done with them."""
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            waiting = {pool.submit(self._answer, prompt): i for i, prompt in enumerate(prompts)}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _only_model(self) -> str:
        names = [model["id"] for model in self._request("/models")["data"]]
        if len(names) != 1:
            raise ValueError(f"{self.url} serves {', '.join(names) or 'nothing'}; say which is the target")
        return names[0]

    def _answer(self, prompt: list[int]) -> Answer:
        sampling = {key: value for key, value in self.settings.sampling.items() if value is not None}
        reply = self._request(
            "/completions",
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": self.settings.max_new_tokens,
                "seed": self.settings.seed,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "return_token_ids": True,
                **sampling,
            },
        )
        try:
            choice = reply["choices"][0]
            return self._tokens(choice, choice["finish_reason"], choice.get("token_ids"))
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.url} gave no completion but {json.dumps(reply)[:500]}") from error

    def _tokens(self, choice: dict, reason: str, tokens: list[int] | None) -> Answer:
        if reason not in ("stop", "length"):
            raise ValueError(f"{self.url} ended an answer by {reason!r}; stop and length are understood")
        finished = reason == "stop"
        if tokens is None:
            tokens = self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        if finished and (not tokens or tokens[-1] not in self.stop_ids):
            named = choice.get("stop_reason", choice.get("matched_stop"))
            tokens = [*tokens, named if isinstance(named, int) else self.stop_ids[0]]
        return Answer(list(tokens), finished)

    def _request(self, path: str, body: dict | None = None) -> dict:
        """Asks the server; an attempt that fails for a reason that may pass is made again."""
        headers = {"Content-Type": "application/json"}
        if "OPENAI_API_KEY" in os.environ:
            headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(2**attempt)
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {error.read(500).decode(errors='replace')}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError) as error:
                problem = str(error)
        raise RuntimeError(f"{self.url}{path} failed: {problem}")
