"""What `mlx_lm.server` and this server reply to the same prompts, greedily."""

from __future__ import annotations

import json
import sys
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import servers
from tests.real.prompts import CHATS, LEFT_OUT, PROMPTS
from tests.server.client import Client
from tests.serving import AS_JSON
from tests.slices import is_whole
from tests.ties import NEAR

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
LENGTH = 16
"""Tokens of a reply at most."""
STREAMS = 8
"""Replies at once. A step of eight sequences takes half more time than a step of one."""
PATIENCE_S = 600
START_S = 300
GREEDY = {"model": "default_model", "max_tokens": LENGTH, "temperature": 0}

type Body = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A request that both servers understand."""

    path: str
    body: Body


EVERY_QUESTION: Mapping[str, Question] = {
    **{name: Question(TEXT, {"prompt": text}) for name, text in PROMPTS.items()},
    **{f"chat: {name}": Question(CHAT, {"messages": messages}) for name, messages in CHATS.items()},
}
QUESTIONS = {
    name: question for name, question in EVERY_QUESTION.items() if is_whole() or name not in LEFT_OUT
}


@dataclass(frozen=True)
class Reference:
    """A reply that another one is compared with.

    Attributes:
        logprobs: of the tokens of the reply.
        tie: the first place where the two best logits are almost the same, so that either token may come;
            None: there is none.
        until_tie: the text in front of that place.
    """

    text: str
    logprobs: list[float]
    tie: int | None
    until_tie: str

    def compare(self, reply: str, what: str) -> None:
        """Assert that the same was said, up to a tie. What is behind a tie is listed at the end of the tests.

        Args:
            what: names the reply for that list.
        """
        if reply == self.text or self.tie is None:
            assert reply == self.text
            return
        assert reply.startswith(self.until_tie)
        warning = f"{what}: not compared from token {self.tie} on; {self.text!r} and {reply!r}"
        warnings.warn(warning, NearTie, stacklevel=2)


class NearTie(UserWarning):
    """Two tokens were almost equally likely, and either came."""


def post(port: int, path: str, body: Body, key: str = "") -> Any:
    """The reply to a client with this API key."""
    headers = AS_JSON | {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)


def post_scored(port: int, path: str, body: Body, key: str = "") -> Any:
    """As `post`, for a reply of this server with log-probabilities of the two likeliest tokens."""
    scored = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    return post(port, path, {**body, **scored}, key)


def streamed(port: int, path: str, body: Body) -> str:
    """The text of a reply, put together from its pieces."""
    with Client(port, patience_s=PATIENCE_S) as client:
        client.request("POST", path, {**body, "stream": True})
        status, _ = client.head()
        assert status == 200
        choices = [choice for event in client.events() if event != "[DONE]" for choice in event["choices"]]
    return "".join(
        choice["delta"].get("content") or "" if path == CHAT else choice["text"] for choice in choices
    )


def text_of(reply: Any) -> str:
    """The text of a reply that was not streamed."""
    (choice,) = reply["choices"]
    return choice["message"]["content"] or "" if "message" in choice else choice["text"]


def asked_at_once[Answer](ask: Callable[[str, Body], Answer]) -> dict[str, Answer]:
    """What a server says to each question, `STREAMS` of them at a time."""

    def answer(question: Question) -> Answer:
        return ask(question.path, {**GREEDY, **question.body})

    with ThreadPoolExecutor(STREAMS) as pool:
        return dict(zip(QUESTIONS, pool.map(answer, QUESTIONS.values()), strict=True))


def replies_of_mlx_lm(folder: Path, log: Path) -> dict[str, Reference]:
    """Ask `mlx_lm.server`, in a process of its own that has ended when this returns."""
    port = servers.free_port()
    options = ["--model", str(folder), "--port", str(port), "--decode-concurrency", str(STREAMS)]
    command = [sys.executable, "-m", "mlx_lm", "server", *options, "--log-level", "ERROR"]

    def ask(path: str, body: Body) -> Any:
        return post(port, path, {**body, "logprobs": True, "top_logprobs": 2})

    with servers.running(command, partial(servers.health_seconds, port), patience_s=START_S, log=log):
        replies = asked_at_once(ask)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {name: _mlx_lm_reference(reply, tokenizer) for name, reply in replies.items()}


def _mlx_lm_reference(reply: Any, tokenizer: Tokenizer) -> Reference:
    """mlx_lm promises no order of the likeliest tokens. The one that ends the reply is among them."""
    tops = [
        sorted(place["top_logprobs"], key=lambda candidate: -candidate["logprob"])
        for place in reply["choices"][0]["logprobs"]["content"]
    ]
    tie, ids = _first_tie(tops), [best["id"] for best, _ in tops]
    text = text_of(reply)
    until_tie = text if tie is None else tokenizer.decode(ids[:tie])
    return Reference(text, [best["logprob"] for best, _ in tops], tie, until_tie)


def chat_reference(reply: Any) -> Reference:
    """A chat's reply of this server."""
    tokens = reply["choices"][0]["logprobs"]["content"]
    tie = _first_tie([token["top_logprobs"] for token in tokens])
    until_tie = bytes(byte for token in tokens[:tie] for byte in token["bytes"])
    return Reference(
        text_of(reply), [token["logprob"] for token in tokens], tie, until_tie.decode(errors="ignore")
    )


def _first_tie(tops: list[list[dict[str, Any]]]) -> int | None:
    """The first place whose two likeliest tokens are near each other."""
    leads = (best["logprob"] - second["logprob"] for best, second in tops)
    return next((place for place, lead in enumerate(leads) if lead < NEAR), None)
