"""The end of the server: who is in may finish, and nobody new comes in."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from start_llm.core.errors import Overloaded
from start_llm.server.drain import RequestDrain
from start_llm.server.status import Status
from tests.server.client import CHAT, TEXT, Client, ask, wait_until
from tests.serving import Server, serving

STREAM = {"prompt": [1, 2, 3], "max_tokens": 100_000, "stream": True}
SHORT = {"prompt": "Hi", "max_tokens": 1}


def test_who_is_in_is_waited_for_and_nobody_new_comes_in():
    drain, inside, is_evictable = RequestDrain(), threading.Event(), threading.Event()

    def stay() -> None:
        with drain.admit_request():
            inside.set()
            is_evictable.wait(10)

    guest = threading.Thread(target=stay)
    guest.start()
    assert inside.wait(10)
    assert not drain.has_begun
    drain.begin(20)
    assert (drain.has_begun, drain.inside) == (True, 1)
    with pytest.raises(Overloaded, match="is stopping") as refused, drain.admit_request():
        pass
    assert 18 <= int(refused.value.headers["Retry-After"]) <= 20
    assert not drain.wait(0.05)
    is_evictable.set()
    assert drain.wait(10)
    assert drain.inside == 0
    guest.join()


def test_who_fails_is_gone_too():
    drain = RequestDrain()
    with pytest.raises(ValueError, match="x"), drain.admit_request():
        raise ValueError("x")
    drain.begin(0)
    assert drain.wait(0)
    with pytest.raises(Overloaded) as refused, drain.admit_request():
        pass
    assert refused.value.headers["Retry-After"] == "1"


def test_health_says_that_the_server_stops():
    drain = RequestDrain()
    status: Any = SimpleNamespace(
        engine_is_alive=lambda: True,
        drain=drain,
        card=SimpleNamespace(id="m"),
        engine=SimpleNamespace(step_began=None),
        stuck_reason=lambda: "",
    )
    assert Status.health(status) == (200, {"status": "ok", "model": "m"})
    drain.begin(1)
    code, body = Status.health(status)
    assert (code, body["status"]) == (503, "draining")


# ------------------------------------------------------------------------------------------- over the wire


@pytest.fixture
def patient(endless_model: Path) -> Iterator[Server]:
    with serving(endless_model, drain_s=30) as server:
        yield server


def closing(server: Server) -> threading.Thread:
    thread = threading.Thread(target=server.app.close)
    thread.start()
    wait_until(lambda: ask(server.port, "GET", "/health").status == 503, within_s=20)
    return thread


@pytest.mark.thorough
def test_a_running_stream_is_finished_while_new_requests_are_sent_away(patient: Server):
    with Client(patient.port) as talking, Client(patient.port) as kept:
        assert kept.ask("GET", "/health").json["status"] == "ok"
        talking.request("POST", TEXT, STREAM | {"max_tokens": 300})
        assert talking.head()[0] == 200
        ending = closing(patient)
        health = kept.ask("GET", "/health").json
        assert health == {"status": "draining", "reason": "the server is stopping", "in_flight": 1}
        for path, body in (
            (TEXT, SHORT),
            (CHAT, {}),
            ("/v1/messages", {}),
            ("/v1/responses/input_tokens", {}),
        ):
            reply = ask(patient.port, "POST", path, body)
            assert reply.status == 503
            assert 1 <= int(reply.headers["retry-after"]) <= 30
            assert "stopping" in reply.json["error"]["message"]
        assert kept.ask("POST", TEXT, SHORT).status == 503, "on a connection that was there too"
        assert ask(patient.port, "GET", "/v1/models").status == 200
        text = b"".join(talking.chunks())
        assert text.endswith(b"data: [DONE]\n\n")
        ending.join(20)
        assert not ending.is_alive()
    assert "Waiting up to 30 s for 1 running requests. Ctrl-C again ends at once.\n" in patient.printed()


@pytest.mark.long
def test_a_reply_in_one_piece_is_finished_too(patient: Server):
    with Client(patient.port) as asking:
        asking.request("POST", TEXT, {"prompt": [1, 2, 3], "max_tokens": 300})
        wait_until(lambda: patient.get("/stats")["requests"]["in_flight"] == 1, within_s=20)
        ending = closing(patient)
        reply = asking.reply()
        assert (reply.status, reply.json["usage"]["completion_tokens"]) == (200, 300)
        ending.join(20)


@pytest.mark.thorough
def test_when_the_time_is_over_what_still_runs_is_cut(endless_model: Path):
    with serving(endless_model, drain_s=0.5) as server, Client(server.port) as talking:
        talking.request("POST", TEXT, STREAM)
        assert talking.head()[0] == 200
        began = time.monotonic()
        assert server.app.close()
        assert 0.5 <= time.monotonic() - began < 5
        with pytest.raises(Exception, match=r"no last chunk|closed|reset"):
            json.dumps([chunk.decode() for chunk in talking.chunks()])
    assert server.app._drain.inside == 0


def test_an_end_without_guests_waits_for_nobody(endless_model: Path):
    with serving(endless_model, drain_s=30) as server, Client(server.port) as idle:
        assert idle.ask("GET", "/health").status == 200
        began = time.monotonic()
        assert server.app.close()
        assert time.monotonic() - began < 3
        assert idle.is_closed()
