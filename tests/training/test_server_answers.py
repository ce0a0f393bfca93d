"""Answers of a server, on a small one that speaks what vLLM and SGLang speak."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash.training import server_answers
from dflash.training.answers import Answer, AnswerSettings
from dflash.training.server_answers import ServerAnswerer
from tiny import word_tokenizer


class Stub(ThreadingHTTPServer):
    """Answers with what `reply(body)` gives: a dictionary, or a status code; keeps what it was asked."""

    def __init__(self, reply, models=("target",)):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply, self.models, self.asked, self.headers = reply, models, [], []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1/"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._send({"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.headers.append(dict(self.headers))
        self._send(self.server.reply(body) if self.path == "/v1/completions" else 404)

    def _send(self, reply):
        self.send_response(reply if isinstance(reply, int) else 200)
        self.end_headers()
        self.wfile.write(b"problem" if isinstance(reply, int) else json.dumps(reply).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def serve(monkeypatch):
    servers = []
    monkeypatch.setattr(server_answers.time, "sleep", lambda seconds: None)

    def start(reply, **options):
        servers.append(Stub(reply, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def choice(**fields):
    return {"choices": [{"text": "w7 w9", "finish_reason": "stop", **fields}]}


def ask(server, prompts=([1, 5, 2],), settings=None, **options):
    settings = settings or AnswerSettings()
    answerer = ServerAnswerer(server.url, options.pop("model", None), word_tokenizer(), settings, [3, 4], **options)
    return [answer for _, answer in sorted(answerer(list(prompts)), key=lambda pair: pair[0])]


def test_every_prompt_gets_its_own_answer(serve):
    server = serve(lambda body: choice(token_ids=[*body["prompt"], 3]))
    prompts = [[i, i + 1] for i in range(20)]
    assert ask(server, prompts, concurrency=5) == [Answer([*prompt, 3], True) for prompt in prompts]


def test_what_is_asked(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    server = serve(lambda body: choice())
    ask(server, settings=AnswerSettings(max_new_tokens=9, temperature=0.7, top_p=0.9, seed=5))
    asked = server.asked[0]
    assert {"model": "target", "prompt": [1, 5, 2], "max_tokens": 9, "temperature": 0.7}.items() <= asked.items()
    assert asked["top_p"] == 0.9 and asked["seed"] == 5 and "top_k" not in asked
    assert asked["skip_special_tokens"] is False and server.headers[0]["Authorization"] == "Bearer key"


REPLIES = [
    (choice(token_ids=[7, 9, 4]), Answer([7, 9, 4], True)),
    (choice(token_ids=[7, 9]), Answer([7, 9, 3], True)),
    (choice(), Answer([7, 9, 3], True)),
    (choice(stop_reason=4), Answer([7, 9, 4], True)),
    (choice(stop_reason="stop"), Answer([7, 9, 3], True)),
    (choice(matched_stop=4), Answer([7, 9, 4], True)),
    (choice(text="w7 w4"), Answer([7, 4], True)),
    (choice(text=""), Answer([3], True)),
    (choice(finish_reason="length"), Answer([7, 9], False)),
    (choice(finish_reason="length", token_ids=[7]), Answer([7], False)),
]


@pytest.mark.parametrize(("reply", "answer"), REPLIES)
def test_replies(serve, reply, answer):
    assert ask(serve(lambda body: reply)) == [answer]


@pytest.mark.parametrize("reply", [{"choices": []}, {"error": "no"}, choice(finish_reason="abort")])
def test_replies_that_are_not_understood(serve, reply):
    with pytest.raises(ValueError, match=r"no completion|'abort'"):
        ask(serve(lambda body: reply))


def test_a_failure_that_passes(serve):
    server = serve(lambda body: 503 if len(server.asked) < 3 else choice())
    assert ask(server) == [Answer([7, 9, 3], True)] and len(server.asked) == 3


@pytest.mark.parametrize(("status", "attempts"), [(503, 3), (400, 1)])
def test_a_failure_that_stays(serve, status, attempts):
    server = serve(lambda body: status)
    with pytest.raises(RuntimeError, match=f"completions failed: {status} problem"):
        ask(server)
    assert len(server.asked) == attempts


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr(server_answers.time, "sleep", lambda seconds: None)
    with pytest.raises(RuntimeError, match="models failed"):
        ServerAnswerer("http://127.0.0.1:9/v1", None, word_tokenizer(), AnswerSettings(), [3])


def test_which_model(serve):
    server = serve(lambda body: choice(), models=("a", "b"))
    with pytest.raises(ValueError, match="serves a, b"):
        ask(server)
    ask(server, model="b")
    assert server.asked[0]["model"] == "b"
