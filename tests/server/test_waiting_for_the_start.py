"""Nobody fills a server that downloads its first model, for half an hour perhaps, by coming and going."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from start_llm.access.access_policy import AccessPolicy
from start_llm.config.server_variables import HttpSettings
from start_llm.server.handler import Handler
from start_llm.server.listener import _BUSY, Listener
from tests.server.client import CHAT, Client, ask, message, wait_until

BODY = {"messages": [{"role": "user", "content": "Fish?"}]}


@pytest.fixture
def starting() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", 0, Handler, HttpSettings(max_connections=2))
    listener.begin(AccessPolicy())
    try:
        yield listener
    finally:
        listener.stop_accepting()
        listener.connections.close_all()


@pytest.mark.parametrize("pieces", [1, 2], ids=["in one piece", "with its body behind"])
def test_who_hangs_up_during_a_long_start_leaves_room(pieces: int, starting: Listener):
    request = message("POST", CHAT, BODY)
    head, end, body = request.partition(b"\r\n\r\n")
    for _ in range(4):
        with Client(starting.port) as client:
            for piece in (request,) if pieces == 1 else (head + end, body):
                client.send(piece)
                wait_until(lambda: _BUSY in starting.connections._waiting_since.values(), within_s=10)
        wait_until(lambda: not starting.connections._waiting_since, within_s=10)
    assert ask(starting.port, "GET", "/health").json["status"] == "starting"


def test_what_no_start_makes_right_is_refused_at_once(starting: Listener):
    assert ask(starting.port, "GET", "/v1/nothing").status == 404
    assert ask(starting.port, "POST", "/v1/models", {}).status == 405
