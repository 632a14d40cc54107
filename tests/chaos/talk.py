"""Clients that behave: conversations that grow, in each protocol, on both ports."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.faults import ON_PURPOSE
from tests.grammar import completions, messages, responses, wire

PATIENCE_S = 120
_LONGEST = 40
_WORDS = "harbour lantern quarry thimble orchard beacon saddle glacier pepper anvil meadow cobalt".split()

type Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Endpoints:
    """The ports that clients use.

    Attributes:
        proxy_port: 0 if there is no proxy.
        proxy_is_up: whether it answers, and how often it was killed.
    """

    port: int
    proxy_port: int = 0
    proxy_is_up: Callable[[], tuple[bool, int]] = lambda: (False, 0)


@dataclass(frozen=True)
class Heard:
    """A reply as its client got it: `tokens` where the protocol tells them."""

    mark: str
    text: str
    tokens: tuple[int, ...] | None


@dataclass
class Account:
    """Everything that all clients have met. Safe to use from any thread."""

    counts: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    heard: list[Heard] = field(default_factory=list[Heard])
    failed: list[str] = field(default_factory=list[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def complain(self, problem: str) -> None:
        with self._lock:
            self.problems.append(problem)

    def note(self, heard: Heard) -> None:
        with self._lock:
            self.heard.append(heard)

    def note_failure(self, mark: str) -> None:
        """The client with this mark learned that its request failed."""
        with self._lock:
            self.failed.append(mark)


# -------------------------------------------------------------------------------------------- the protocols


@dataclass(frozen=True)
class Protocol:
    """How a conversation is asked for, and what its reply says.

    Attributes:
        request: the body for these messages and this length.
        read: the reply of a stream, as if it had not been one; held to the grammar.
        said: its text, and its tokens if it tells them.
        delta: the text of one event.
    """

    path: str
    request: Callable[[Messages, int], dict[str, Any]]
    read: Callable[[bytes], Any]
    reply_of: Callable[[Any], tuple[str, list[int] | None]]
    delta: Callable[[Any], str]


def _chat(talk: Messages, length: int) -> dict[str, Any]:
    return {"messages": talk, "max_tokens": length, "return_token_ids": True}


def _text(talk: Messages, length: int) -> dict[str, Any]:
    prompt = "\n".join(f"{message['role']}: {message['content']}" for message in talk)
    return {"prompt": prompt, "max_tokens": length, "return_token_ids": True}


def _messages(talk: Messages, length: int) -> dict[str, Any]:
    return {"system": talk[0]["content"], "messages": talk[1:], "max_tokens": length}


def _responses(talk: Messages, length: int) -> dict[str, Any]:
    return {"instructions": talk[0]["content"], "input": talk[1:], "max_output_tokens": length}


def _chat_reply(body: Any) -> tuple[str, list[int] | None]:
    choice = body["choices"][0]
    return choice["message"]["content"] or "", choice.get("token_ids")


def _text_reply(body: Any) -> tuple[str, list[int] | None]:
    return body["choices"][0]["text"], body["choices"][0].get("token_ids")


def _message_reply(body: Any) -> tuple[str, list[int] | None]:
    return "".join(block.get("text", "") for block in body["content"]), None


def _response_reply(body: Any) -> tuple[str, list[int] | None]:
    parts = (part for item in body["output"] for part in item.get("content") or [])
    return "".join(part.get("text", "") for part in parts), None


def _first_choice(event: Any) -> Any:
    return event["choices"][0] if event.get("choices") else {}


PROTOCOLS = (
    Protocol(
        "/v1/chat/completions", _chat, lambda raw: completions.read(list(wire.events_in(raw))).body,
        _chat_reply, lambda event: _first_choice(event).get("delta", {}).get("content") or "",
    ),
    Protocol(
        "/v1/completions", _text, lambda raw: completions.read(list(wire.events_in(raw))).body,
        _text_reply, lambda event: _first_choice(event).get("text") or "",
    ),
    Protocol(
        "/v1/messages", _messages, lambda raw: messages.read(messages.named_events(raw)).body,
        _message_reply, lambda event: event.get("delta", {}).get("text") or "",
    ),
    Protocol(
        "/v1/responses", _responses, lambda raw: responses.read(list(responses.named_events(raw))).body,
        _response_reply,
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------- a conversation


class Talker:
    """One polite client: it waits for every reply, and says more."""

    def __init__(self, endpoints: Endpoints, account: Account, rng: random.Random, name: str) -> None:
        self._endpoints = endpoints
        self._account = account
        self._rng = rng
        self._name = name
        self._turns = 0
        self._talk: Messages = []

    def run(self, done: threading.Event) -> None:
        while not done.is_set():
            protocol, at_proxy = self._rng.choice(PROTOCOLS), self._rng.random() < 0.4
            key = self._rng.choice(["", "sk-one", "sk-two"])
            self._begin()
            for _ in range(self._rng.randint(1, 8)):
                if done.is_set() or not self._turn(protocol, key, at_proxy=at_proxy):
                    break
                done.wait(self._rng.choice([0, 0, 0.1, 0.5]))

    def _begin(self) -> None:
        """Half of them begin alike."""
        start = f"You are agent {self._rng.randrange(3)}. {' '.join(_WORDS * self._rng.randint(1, 12))}"
        self._talk = [{"role": "system", "content": start}]

    def _turn(self, protocol: Protocol, key: str, *, at_proxy: bool) -> bool:
        """Ask once. False if this conversation is over."""
        self._turns += 1
        mark = f"[{self._name}-{self._turns}]"
        words = " ".join(self._rng.choices(_WORDS, k=self._rng.randint(2, 60)))
        self._talk.append({"role": "user", "content": f"{words} {mark}"})
        body = protocol.request(self._talk, self._rng.choice([4, 16, 40, 120]))
        stream = self._rng.random() < 0.6
        body |= {"model": "tiny", "stream": stream, "temperature": self._rng.choice([0, 0, 0, 0.9])}
        text = self._ask(protocol, body, mark, key, at_proxy=at_proxy)
        self._talk.append({"role": "assistant", "content": text or ""})
        return bool(text) and len(self._talk) < _LONGEST

    def _ask(
        self, protocol: Protocol, body: dict[str, Any], mark: str, key: str, *, at_proxy: bool
    ) -> str | None:
        is_up, kills = self._endpoints.proxy_is_up()
        at_proxy = at_proxy and is_up
        if at_proxy:
            body.pop("return_token_ids", None)
        port = self._endpoints.proxy_port if at_proxy else self._endpoints.port
        where = f"{'proxy' if at_proxy else 'server'} {protocol.path}"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        began = time.monotonic()
        try:
            status, reply_headers, raw = _post(port, protocol.path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            if at_proxy and self._endpoints.proxy_is_up() != (True, kills):
                self._account.count("lost with the proxy")
            else:
                self._account.complain(f"{where}: {error!r} after {time.monotonic() - began:.1f} s")
            return None
        try:
            return self._read(protocol, body, mark, (status, reply_headers, raw), where)
        except wire.COMPLAINTS as error:
            if at_proxy and self._endpoints.proxy_is_up() != (True, kills):
                self._account.count("lost with the proxy")
            else:
                self._account.complain(f"{where}, {status}: {error!r} in {raw[-300:]!r}")
            return None

    def _read(
        self,
        protocol: Protocol,
        body: dict[str, Any],
        mark: str,
        reply: tuple[int, Mapping[str, str], bytes],
        where: str,
    ) -> str | None:
        status, headers, raw = reply
        if ON_PURPOSE.encode() in raw:
            self._account.count("got a fault")
            self._account.note_failure(mark)
            return None
        if status == 503:
            assert "proxy" in where or int(headers["retry-after"]) > 0
            self._account.count("asked to come back")
            return None
        if status == 400 and (b"context" in raw or b"too long" in raw or b"memory" in raw):
            self._account.count("refused as too long")
            return None
        assert status == 200
        if body["stream"] and "proxy" in where:
            text, tokens = _joined(protocol, raw), None
        else:
            text, tokens = protocol.reply_of(protocol.read(raw) if body["stream"] else json.loads(raw))
        self._account.count(f"answered: {where}")
        self._account.note(Heard(mark, text, None if tokens is None else tuple(tokens)))
        return text


def _joined(protocol: Protocol, raw: bytes) -> str:
    """The text of a stream in the proxy's own framing. It has to have an end."""
    datas = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(data) for data in datas if data != wire.DONE]
    assert any(
        end in raw for end in (b"[DONE]", b'"message_stop"', b'"response.completed"', b'"response.inc')
    )
    assert not any("error" in event and event["error"] for event in events)
    return "".join(protocol.delta(event) for event in events)


def _post(
    port: int, path: str, body: object, headers: Mapping[str, str]
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers in lower case, and all of the body; what came of it, if it was cut off by a failure."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), dict(headers))
        reply = connection.getresponse()
        reply_headers = {name.lower(): value for name, value in reply.getheaders()}
        try:
            return reply.status, reply_headers, reply.read()
        except http.client.IncompleteRead as error:
            if ON_PURPOSE.encode() in error.partial:
                return reply.status, reply_headers, error.partial
            raise
    finally:
        connection.close()
