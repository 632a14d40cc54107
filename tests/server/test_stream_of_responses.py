"""Streams of responses: signs of life, failures, and clients that leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.grammar.responses import named_events, put_together
from tests.server.breakable import breakable
from tests.server.client import Client, CutOff, ask, engine_is_free, stats, wait_until
from tests.serving import Server, serving

RESPONSES = "/v1/responses"
LONG = {"input": "\x01" * 60_000, "stream": True}


@pytest.fixture(scope="module")
def impatient(endless_model: Path) -> Iterator[Server]:
    with serving(endless_model, keep_alive_s=0.05) as server:
        yield server


@pytest.mark.thorough
def test_the_first_events_come_at_once_and_then_signs_of_life_that_are_data(impatient: Server):
    """Codex counts no comments."""
    with Client(impatient.port) as client:
        client.request("POST", RESPONSES, LONG)
        assert client.head()[0] == 200
        chunks = client.chunks()
        events = [event for _ in range(5) for event in named_events(next(chunks))]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {event["type"] for event in events[2:]} == {"response.in_progress"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["response"]["id"] for event in events}) == 1


@pytest.mark.thorough
def test_a_client_that_leaves_frees_the_engine_and_nothing_is_kept(endless: Server):
    before = stats(endless.port)["response_store"]["entries"]
    with Client(endless.port) as client:
        client.request("POST", RESPONSES, {"input": "Hi", "stream": True})
        assert client.head()[0] == 200
        next(client.chunks())
    wait_until(lambda: engine_is_free(endless.port), within_s=10)
    assert stats(endless.port)["response_store"]["entries"] == before


@pytest.mark.thorough
def test_a_connection_goes_on_after_a_stream(scripted: Server):
    with Client(scripted.port) as client:
        response: Any = None
        for _ in range(2):
            client.request("POST", RESPONSES, {"input": "Hi", "stream": True})
            assert client.head()[0] == 200
            response = put_together([event for chunk in client.chunks() for event in named_events(chunk)])
            assert response["output"][0]["content"][0]["text"] == "Hello you there."
        assert client.ask("GET", f"{RESPONSES}/{response['id']}").json == response


@pytest.mark.thorough
def test_a_failure_is_an_event_and_a_cut_stream(endless_model: Path):
    with breakable(endless_model) as server, Client(server.port) as client:
        client.request("POST", RESPONSES, {"input": "Hi", "stream": True})
        assert client.head()[0] == 200
        chunks = client.chunks()
        events: list[Any] = [*named_events(next(chunks)), *named_events(next(chunks))]
        server.network.is_broken = True
        with suppress(CutOff):
            while True:
                events += named_events(next(chunks))
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        server.network.is_broken = False
        name = events[-1]["response"]["id"]
        assert ask(server.port, "GET", f"{RESPONSES}/{name}").status == 404
        whole = ask(server.port, "POST", RESPONSES, {"input": "Hi", "max_output_tokens": 2})
        assert whole.json["usage"]["output_tokens"] == 2


@pytest.mark.thorough
def test_a_failure_of_a_whole_reply_is_a_500(endless_model: Path):
    with breakable(endless_model) as server:
        server.network.is_broken = True
        reply = ask(server.port, "POST", RESPONSES, {"input": "Hi"})
    assert (reply.status, reply.error["type"]) == (500, "server_error")
