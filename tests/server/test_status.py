"""The server's reports about itself, at any time; and its answers when it has no room."""

from __future__ import annotations

import select
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.server.breakable import breakable
from tests.server.client import CHAT, TEXT, Client, ask, engine_is_free, stats, wait_until
from tests.server.conftest import LONG_PROMPT
from tests.serving import Server, serving

HELLO = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
PAGES = ("/", "/health", "/stats", "/v1/models", "/models")
QUEUE = 2


# --------------------------------------------------------------------------------------------------- pages


def test_health_names_the_model(scripted: Server, scripted_model: Path):
    reply = ask(scripted.port, "GET", "/health")
    assert (reply.status, reply.json) == (200, {"status": "ok", "model": scripted_model.name})


def test_health_is_503_and_requests_are_500_once_the_engine_has_ended(endless_model: Path):
    with breakable(endless_model) as server:
        assert server.engine.stop(5)
        health = ask(server.port, "GET", "/health")
        assert (health.status, health.json["status"]) == (503, "failed")
        for stream in (True, False):
            reply = ask(server.port, "POST", CHAT, HELLO | {"stream": stream})
            assert (reply.status, reply.error["type"]) == (500, "server_error")
        assert ask(server.port, "GET", "/stats").status == 200


SECTIONS = {
    "server": {"owner", "model", "started_at"},
    "prompt_cache": {"entries", "bytes", "max_bytes", "hits", "misses", "checkpoints", "sequence_caches"}
    | {"computed_tokens", "reused_tokens", "unavoidable_tokens", "efficiency", "reused_in_place", "evictions"}
    | {"bytes_by_kind", "arrays", "lookups", "misses_by_reason", "vlm_retreat", "hybrid_trim_miss"}
    | {"exact_key_rejected_by_model_lcp"},
    "images": {"tower_runs", "tower_seconds", "kept_bytes", "input_bytes"},
    "response_store": {"entries", "bytes", "max_bytes", "ttl_ms"},
    "kv_quant": {"mode", "layers", "attention"},
    "admission": {"max_safe_context", "memory_budget_bytes", "usable_bytes", "weights_bytes"},
    "batch": {"configured", "batched", "unbatched_reason", "active_rows"},
}


def test_stats_has_every_key_that_clients_know(scripted: Server, scripted_model: Path):
    answer = stats(scripted.port)
    assert {name: set(answer[name]) for name in SECTIONS} == SECTIONS
    assert answer["server"]["model"] == scripted_model.name
    assert 0 <= time.time() - answer["server"]["started_at"] < 600
    (listed,) = ask(scripted.port, "GET", "/v1/models").json["data"]
    assert listed["created"] == answer["server"]["started_at"]
    assert (answer["batch"]["configured"], answer["batch"]["batched"]) == (4, True)
    assert answer["admission"]["weights_bytes"] > 0


def test_stats_tells_how_kv_is_kept_also_if_it_is_not_quantised(scripted: Server):
    kv = stats(scripted.port)["kv_quant"]
    assert kv == {"mode": "f32", "layers": {"f32": 1}, "attention": {"global": 1}}


def test_stats_counts_requests_and_tokens(scripted: Server):
    with Client(scripted.port) as client:  # one connection: the next request sees the end of the one before
        before = client.ask("GET", "/stats").json
        usage = client.ask("POST", CHAT, HELLO).json["usage"]
        again = client.ask("POST", CHAT, HELLO | {"max_tokens": 2}).json["usage"]
        after = client.ask("GET", "/stats").json
    endings = Counter(after["requests"]["endings"]) - Counter(before["requests"]["endings"])
    assert endings == {"stop": 1, "length": 1}
    grown = {
        name: after["requests"][name] - before["requests"][name]
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "in_flight")
    }
    assert grown == {
        "prompt_tokens": 2 * usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"] + 2,
        "cached_tokens": cached_tokens(usage) + cached_tokens(again),
        "in_flight": 0,
    }
    assert cached_tokens(again) == again["prompt_tokens"] - 1, "all but the token that a reply begins with"


def cached_tokens(usage: dict[str, Any]) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


def stats_after(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Once the row has given back what it computed, a moment after its reply."""
    server.post(TEXT, body)
    wait_until(lambda: engine_is_free(server.port), within_s=10)
    return stats(server.port)


def counted(section: dict[str, Any]) -> dict[str, Any]:
    """Return the counters that are neither 0 nor null, nor made of nothing but zeros."""
    return {
        name: value
        for name, value in section.items()
        if (any(value.values()) if isinstance(value, dict) else value)
    }


@pytest.mark.thorough
def test_stats_counts_what_is_kept_and_used_again(endless_model: Path):
    prompt = {"prompt": list(range(600)), "max_tokens": 2}
    with serving(endless_model) as server:
        empty = stats(server.port)["prompt_cache"]
        once, twice = (stats_after(server, prompt)["prompt_cache"] for _ in range(2))
    assert empty["max_bytes"] > 10**6
    assert (once["efficiency"], twice["efficiency"]) == (1, 1)
    assert counted(empty) == {"max_bytes": empty["max_bytes"]}
    assert (once["entries"], once["sequence_caches"], once["misses"], once["hits"]) == (2, 1, 1, 0)
    assert 600 * 1000 < once["bytes"] < once["max_bytes"]
    assert (once["computed_tokens"], once["unavoidable_tokens"], once["reused_tokens"]) == (600, 600, 0)
    assert once["bytes_by_kind"] == {
        "pages": 0,
        "sequence_caches": once["bytes"],
        "checkpoints": 0,
        "live": 0,
    }
    assert once["misses_by_reason"] == {"new": 1, "evicted": 0, "no_state": 0, "drift": 0, "off": 0}
    assert (twice["misses"], twice["hits"], twice["reused_in_place"]) == (1, 1, 1)
    assert (twice["computed_tokens"], twice["unavoidable_tokens"], twice["reused_tokens"]) == (601, 601, 599)
    assert twice["bytes"] == once["bytes"]


def test_stats_without_a_cache_counts_none(endless_model: Path):
    with serving(endless_model, cache_is_on=False) as server:
        for _ in range(2):
            server.post(TEXT, {"prompt": list(range(100)), "max_tokens": 2})
        cache = stats(server.port)["prompt_cache"]
    assert counted(cache) == {
        "computed_tokens": 200,
        "lookups": 2,
        "misses": 2,
        "misses_by_reason": {"new": 0, "evicted": 0, "no_state": 0, "drift": 0, "off": 2},
    }


def test_refused_requests_are_in_no_count(scripted: Server):
    wait_until(lambda: engine_is_free(scripted.port), within_s=10)
    before = stats(scripted.port)["requests"]
    assert ask(scripted.port, "POST", CHAT, {}).status == 400
    assert stats(scripted.port)["requests"] == before


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_models_lists_the_loaded_model(scripted: Server, scripted_model: Path, path: str):
    listed = ask(scripted.port, "GET", path).json
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["vision"]) == (scripted_model.name, "model", False)
    assert model["reasoning"] is True
    names = ("context_window", "max_output_tokens", "max_input_tokens", "max_model_len")
    assert {model[name] for name in names} == {131_072}
    assert ask(scripted.port, "GET", f"/v1/models/{model['id']}").json == model


@pytest.mark.parametrize("name", ["other", "owner%2Fname", "owner/name", "%F0%9F%90%9F", "%ff", "%"])
def test_a_model_that_is_not_loaded_is_404(scripted: Server, name: str):
    reply = ask(scripted.port, "GET", f"/v1/models/{name}")
    assert (reply.status, reply.error["param"]) == (404, "model")


def test_a_reply_echoes_the_name_that_was_asked_for(scripted: Server, scripted_model: Path):
    for asked, echoed in (("gpt-x", "gpt-x"), (None, scripted_model.name), ("", scripted_model.name)):
        answer = ask(scripted.port, "POST", CHAT, HELLO | {"model": asked}).json
        assert (answer["model"], answer["system_fingerprint"]) == (echoed, scripted_model.name)


# ---------------------------------------------------------------------------------------------- under load


@pytest.fixture(scope="module")
def small_queue(endless_model: Path) -> Iterator[Server]:
    """Nothing is kept, so a prompt that is being read is not stopped for shorter ones."""
    with serving(endless_model, max_waiting=QUEUE, batch=1, cache_is_on=False) as server:
        yield server


@pytest.fixture
def reading(small_queue: Server) -> Iterator[Server]:
    """The server in the middle of a long prefill."""
    with Client(small_queue.port) as client:
        client.request("POST", TEXT, {"prompt": LONG_PROMPT, "stream": True})
        wait_until(lambda: stats(small_queue.port)["engine"]["prefill"] is not None, within_s=5)
        yield small_queue
    wait_until(lambda: engine_is_free(small_queue.port), within_s=10)


def seconds_for(port: int, path: str) -> float:
    began = time.perf_counter()
    assert ask(port, "GET", path).status == 200
    return time.perf_counter() - began


@pytest.mark.long
def test_pages_answer_in_milliseconds_during_a_long_prefill(reading: Server):
    seconds = {path: statistics.median(seconds_for(reading.port, path) for _ in range(20)) for path in PAGES}
    assert max(seconds.values()) < 0.05, seconds
    progress = stats(reading.port)["engine"]["prefill"]
    assert progress["done"] < progress["total"]


def test_a_bad_request_is_refused_in_milliseconds_during_a_long_prefill(reading: Server):
    began = time.perf_counter()
    assert ask(reading.port, "POST", CHAT, {}).status == 400
    assert time.perf_counter() - began < 0.5


def wait_in_line(server: Server, stack: ExitStack, stream: bool) -> Client:
    client = stack.enter_context(Client(server.port))
    waiting = stats(server.port)["engine"]["waiting"]
    client.request("POST", TEXT, {"prompt": [1, 2], "max_tokens": 1, "stream": stream})
    wait_until(
        lambda: stats(server.port)["engine"]["waiting"] == waiting + 1, within_s=10
    )  # a chunk may last 4 s
    return client


@pytest.mark.thorough
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_full_queue_is_503_with_retry_after(reading: Server, stream: bool):
    with ExitStack() as stack:
        for _ in range(QUEUE):
            wait_in_line(reading, stack, stream)
        refused = ask(reading.port, "POST", TEXT, {"prompt": [1, 2], "stream": stream})
        assert (refused.status, refused.error["type"]) == (503, "overloaded_error")
        assert int(refused.headers["retry-after"]) > 0
        assert not any(word in refused.error["message"].lower() for word in ("context", "shorten", "long"))


@pytest.mark.thorough
def test_a_rush_makes_no_more_wait_than_may(reading: Server):
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(reading.port)) for _ in range(12)]
        for client in clients:
            client.request("POST", TEXT, {"prompt": [1, 2], "max_tokens": 1})
        wait_until(lambda: len(answered(clients)) + in_flight(reading) == 12 + 1, within_s=10)
        refused = answered(clients)
        assert {client.reply().status for client in refused} == {503}
        # Two that are admitted in the same microsecond may make it one more.
        assert 12 - QUEUE - 1 <= len(refused) <= 12 - QUEUE


def answered(clients: list[Client]) -> list[Client]:
    """Those to whom a reply has come."""
    ready, _, _ = select.select([client.socket for client in clients], [], [], 0)
    return [client for client in clients if client.socket in ready]


def in_flight(server: Server) -> int:
    return stats(server.port)["requests"]["in_flight"]


@pytest.mark.long
def test_who_waited_is_served_when_there_is_room_again(small_queue: Server):
    with ExitStack() as stack:
        occupant = stack.enter_context(Client(small_queue.port))
        occupant.request("POST", TEXT, {"prompt": LONG_PROMPT})
        wait_until(lambda: stats(small_queue.port)["engine"]["prefill"] is not None, within_s=5)
        waiting = [wait_in_line(small_queue, stack, stream=False) for _ in range(QUEUE)]
        occupant.close()
        assert [client.reply().status for client in waiting] == [200] * QUEUE


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_compaction_is_not_taken_for_a_stored_response(scripted: Server, method: str):
    reply = ask(scripted.port, method, "/v1/responses/compact", {"input": "Hi"} if method == "POST" else None)
    assert reply.status == 404
    assert "set model_providers.ID.name" in reply.error["message"]


def test_clients_of_anthropics_protocol_get_models_in_its_form(scripted: Server, scripted_model: Path):
    asked = {"anthropic-version": "2023-06-01"}
    listed = ask(scripted.port, "GET", "/v1/models?limit=1000", headers=asked).json
    (entry,) = listed["data"]
    assert (entry["type"], entry["id"], entry["display_name"]) == ("model", *[scripted_model.name] * 2)
    assert entry["created_at"].endswith("Z")
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, entry["id"], entry["id"])
    assert ask(scripted.port, "GET", f"/v1/models/{entry['id']}", headers=asked).json == entry
    assert ask(scripted.port, "GET", "/v1/models/other", headers=asked).status == 404


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/message", "/v1/messages"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/metric", "/metrics"),
        ("/v1/model", "/v1/models"),
        ("/favicon.ico", ""),
        ("/" + "a" * 5000, ""),
    ],
    ids=lambda text: text[:30],
)
def test_a_wrong_path_gets_the_one_that_was_meant(scripted: Server, path: str, meant: str):
    reply = ask(scripted.port, "GET", path)
    message = reply.error["message"]
    assert reply.status == 404
    assert message.endswith(
        f" Did you mean {meant}?" if meant else "docs/api.md lists the endpoints; most begin with /v1."
    )
    assert len(message) < len(path) + 100
