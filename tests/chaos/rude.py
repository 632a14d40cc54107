"""Clients that misbehave: they leave at any moment, read slowly, or say nothing."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any

from tests.chaos.talk import Account, Endpoints
from tests.server.client import Client, CutOff, message

_NO_LONGER = (OSError, CutOff, ValueError)
"""Errors that a connection which is half dead may raise."""
_MARGIN_S = 10.0


class Rude:
    """One client after the other, each in a bad way.

    Args:
        poison: a token at which the network breaks.
        limit_s: after which the server hangs up on who says nothing, or reads nothing.
    """

    def __init__(
        self, endpoints: Endpoints, account: Account, rng: random.Random, *, poison: int, limit_s: float
    ) -> None:
        self._endpoints = endpoints
        self._account = account
        self._rng = rng
        self._poison = poison
        self._limit_s = limit_s

    def run(self, done: threading.Event) -> None:
        ways = (
            *(self.leave_before_the_reply, self.leave_in_the_reply, self.read_slowly, self.be_poisoned),
            *(self.say_nothing, self.send_half_a_head, self.send_half_a_body, self.never_read),
        )
        while not done.is_set():
            way = self._rng.choices(ways, (5, 5, 2, 3, 1, 1, 1, 1))[0]
            with suppress(*_NO_LONGER):
                way(done)
            self._account.count(f"rude: {way.__name__.replace('_', ' ')}")

    # --------------------------------------------------------------------------------------- those who leave

    def leave_before_the_reply(self, done: threading.Event) -> None:
        with self._client() as client:
            client.request("POST", "/v1/completions", self._body(long=True))
            done.wait(self._rng.choice([0, 0.02, 0.1, 0.4]))
            self._leave(client)

    def leave_in_the_reply(self, done: threading.Event) -> None:
        with self._client() as client:
            client.request("POST", "/v1/completions", self._body())
            client.head()
            for _ in range(self._rng.choice([0, 1, 5, 30])):
                client.some(512)
            self._leave(client)

    def _leave(self, client: Client) -> None:
        self._rng.choice([client.close, client.reset])()

    # ---------------------------------------------------------------------------------------- those who stay

    def read_slowly(self, done: threading.Event) -> None:
        until = time.monotonic() + 8
        with self._client(receive_buffer=2048) as client:
            client.request("POST", "/v1/completions", self._body() | {"logprobs": 20})
            while time.monotonic() < until and not done.wait(0.02):
                client.some(300)

    def never_read(self, done: threading.Event) -> None:
        with self._client(receive_buffer=2048) as client:
            client.request("POST", "/v1/completions", self._body() | {"logprobs": 20, "max_tokens": 400})
            done.wait(self._limit_s + 2)

    def say_nothing(self, done: threading.Event) -> None:
        self._hold(b"")

    def send_half_a_head(self, done: threading.Event) -> None:
        self._hold(b"POST /v1/completions HTTP/1.1\r\nHost: loc")

    def send_half_a_body(self, done: threading.Event) -> None:
        whole = message("POST", "/v1/completions", self._body())
        self._hold(whole[: -self._rng.randint(1, 20)])

    def _hold(self, data: bytes) -> None:
        """Send this and no more. The server has to hang up by itself."""
        with Client(self._endpoints.port, patience_s=self._limit_s + _MARGIN_S) as client:
            client.send(data)
            began = time.monotonic()
            try:
                while client.socket.recv(4096):
                    pass
            except TimeoutError:
                self._account.complain(f"half open for {time.monotonic() - began:.1f} s: {data[:40]!r}")

    def be_poisoned(self, done: threading.Event) -> None:
        """A request that breaks the network, in its prompt or in the first step of its reply."""
        with Client(self._endpoints.port, patience_s=120) as client:
            body = self._body(long=self._rng.random() < 0.3)
            body["prompt"].insert(self._rng.choice([len(body["prompt"]), 3]), self._poison)
            reply = client.ask("POST", "/v1/completions", body | {"stream": False})
            if reply.status == 500:
                self._account.count("got a fault")
            elif reply.status not in (400, 503) and not self._was_cut(reply.json):
                self._account.complain(f"the poison was answered with {reply.status}: {reply.body[-200:]!r}")

    @staticmethod
    def _was_cut(body: Any) -> bool:
        """The server's own deadline came first."""
        return body["usage"]["completion_tokens"] == 0

    # ----------------------------------------------------------------------------------------- what they say

    def _client(self, **options: Any) -> Client:
        is_up, _ = self._endpoints.proxy_is_up()
        at_proxy = is_up and self._rng.random() < 0.3
        return Client(self._endpoints.proxy_port if at_proxy else self._endpoints.port, **options)

    def _body(self, *, long: bool = False) -> dict[str, Any]:
        length = self._rng.randint(800, 3000) if long else self._rng.randint(2, 300)
        first = self._rng.randrange(4)
        return {
            "model": "tiny",
            "prompt": [(first + n * n) % 1500 for n in range(length)],
            "max_tokens": self._rng.choice([20, 100, 300]),
            "temperature": 0,
            "stream": self._rng.random() < 0.8,
        }
