"""Greedy replies over HTTP are mlx_lm's, token by token: alone, together, joining and leaving."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import mlx_lm
import numpy as np
import pytest

from tests.serving import Server, serving
from tests.ties import Reference, Tally, greedy_reference

FAMILIES = ["llama", "qwen3", "qwen3_5", "gemma3_text", "gpt_oss", "glm4_moe_lite"]
REPLY = 95
LONGEST_REPLY = 130
RAGGED = [3, 90, 150, 201]
BEYOND_THE_WINDOW = [131, 150, 190, 260]
"""Prompt lengths; gemma3_text here has a window of 128, and all of its prompts are longer."""


@dataclass
class Heard:
    """A client's view of one streamed reply so far."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    began: float = 0.0
    ended: float = 0.0

    def read(self, data: bytes) -> None:
        self.ended = time.monotonic()
        if not self.ids:
            self.began = self.ended
        (choice,) = json.loads(data)["choices"]
        self.ids += choice.get("token_ids", [])
        self.text += choice["text"]
        self.finish = choice["finish_reason"]


@dataclass
class Conversations:
    """A server with a family's model, prompts for it, and what mlx_lm says to them."""

    server: Server
    decode: Callable[[list[int]], str]
    prompts: list[list[int]]
    references: list[Reference]

    def body(self, which: int, max_tokens: int, **more: Any) -> dict[str, Any]:
        return {
            "prompt": self.prompts[which],
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **more,
        }

    def ask(self, which: int, max_tokens: int) -> Heard:
        """The whole reply in one body."""
        (choice,) = self.server.post("/v1/completions", self.body(which, max_tokens))["choices"]
        return Heard(choice["token_ids"], choice["text"], choice["finish_reason"])

    def stream(self, which: int, max_tokens: int) -> Iterator[Heard]:
        """The reply so far, again and again; closing this leaves in the middle of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            body = json.dumps(self.body(which, max_tokens, stream=True))
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            heard = Heard()
            for line in connection.getresponse():
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    heard.read(data)
                    yield heard
        finally:
            connection.close()

    def check(self, heard: Heard, which: int, tally: Tally) -> None:
        """Its tokens are the reference's, and its text is what the tokenizer makes of them."""
        tally.compare(heard.ids, self.references[which])
        assert heard.text == self.decode(heard.ids)

    def check_whole(self, heard: Heard, which: int, length: int, tally: Tally) -> None:
        assert (len(heard.ids), heard.finish) == (length, "length")
        self.check(heard, which, tally)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.fixture(scope="module", params=FAMILIES)
def talk(request: pytest.FixtureRequest, tiny_model: Any) -> Iterator[Conversations]:
    folder = tiny_model(request.param, hidden=128, layers=2)
    network, tokenizer, *_ = mlx_lm.load(str(folder))
    random = np.random.default_rng(len(request.param))
    lengths = BEYOND_THE_WINDOW if request.param == "gemma3_text" else RAGGED
    prompts = [random.integers(0, 2000, length).tolist() for length in lengths]
    references = [greedy_reference(network, prompt, LONGEST_REPLY) for prompt in prompts]
    with serving(folder, batch=4) as server:
        yield Conversations(server, tokenizer.decode, prompts, references)


def some_overlap(replies: list[Heard]) -> bool:
    """True if any two of them were spoken at the same time."""
    return any(max(a.began, b.began) < min(a.ended, b.ended) for a, b in itertools.combinations(replies, 2))


def last(stream: Iterator[Heard]) -> Heard:
    *_, heard = stream
    return heard


@pytest.mark.thorough
def test_alone(talk, tally):
    talk.check_whole(talk.ask(1, REPLY), 1, REPLY, tally)
    talk.check_whole(last(talk.stream(3, REPLY)), 3, REPLY, tally)


@pytest.mark.sample(6)
def test_four_at_once_with_ragged_prompts(talk, tally):
    with ThreadPoolExecutor(4) as clients:
        replies = list(clients.map(lambda which: last(talk.stream(which, REPLY)), range(4)))
    assert some_overlap(replies)
    for which, heard in enumerate(replies):
        talk.check_whole(heard, which, REPLY, tally)


@pytest.mark.thorough
def test_joining_and_leaving(talk, tally):
    """Each begins when the one before has spoken; the first and the third leave in the middle."""
    spoken = [threading.Event() for _ in range(4)]

    def converse(which: int, max_tokens: int, leaves_at: int | None) -> Heard:
        if which:
            assert spoken[which - 1].wait(60)
        heard = Heard()
        stream = talk.stream(which, max_tokens)
        for heard in stream:
            if len(heard.ids) >= 5:
                spoken[which].set()
            if leaves_at is not None and len(heard.ids) >= leaves_at:
                stream.close()
        return heard

    plans = [(0, LONGEST_REPLY, 70), (1, LONGEST_REPLY, None), (2, 90, 20), (3, 70, None)]
    with ThreadPoolExecutor(4) as clients:
        first, second, third, fourth = clients.map(lambda plan: converse(*plan), plans)
    assert some_overlap([first, second, third, fourth])
    assert 70 <= len(first.ids) <= LONGEST_REPLY
    assert 20 <= len(third.ids) <= 90
    talk.check(first, 0, tally)
    talk.check_whole(second, 1, LONGEST_REPLY, tally)
    talk.check(third, 2, tally)
    talk.check_whole(fourth, 3, 70, tally)


def test_near_ties_are_rare_over_all(tally):
    tally.assert_ties_are_rare()
    print(f"{tally.ties} near-ties in {tally.tokens} tokens")
