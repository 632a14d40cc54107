"""Three real servers behind one proxy: nothing is computed twice, whoever of them goes and comes back."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest

from start_llm.access.backend_secret import BackendSecret
from tests.agents.agent_account import Rendering
from tests.agents.server_fleet import LEAST_EFFICIENCY, Conversations, ServerFleet
from tests.conftest import TinyModel

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

COUNT, TURNS = 12, 2
"""`benchmarks scale --only servers` has more of both."""
KEY = "sk-of-the-clients"


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", hidden=64, layers=2)


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerFleet]:
    with ServerFleet.started(model, tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture(scope="module")
def rendering(model: Path) -> Rendering:
    return Rendering(model)


@pytest.mark.parametrize(
    "is_named",
    [pytest.param(True, marks=pytest.mark.long, id="with session ids"), pytest.param(False, id="without")],
)
def test_each_conversation_is_computed_once_also_if_a_server_is_killed(
    fleet: ServerFleet, rendering: Rendering, is_named: bool
):
    conversations = Conversations(f"named: {is_named}", fleet.door, rendering, COUNT, is_named=is_named)
    assert conversations.play(TURNS).efficiency >= LEAST_EFFICIENCY
    held = fleet.holders(conversations)
    assert {*held.values()} == {*fleet.ports}
    gone = fleet.kill(1)
    moved = conversations.play(1)
    fleet.start(1)
    assert moved.paid == {name for name, port in held.items() if port == gone}
    assert not conversations.play(1).paid


@pytest.mark.long
def test_a_proxy_that_is_started_again_asks_the_servers_who_has_a_conversation(
    fleet: ServerFleet, rendering: Rendering
):
    conversations = Conversations("restarted", fleet.door, rendering, 4, is_named=False)
    conversations.play(1)
    fleet.restart_proxy()
    assert not conversations.play(1).paid


@pytest.mark.long
def test_a_response_is_gone_on_from_where_it_is(fleet: ServerFleet):
    for number in range(4):
        first = fleet.post("/v1/responses", {"input": f"Question {number}", "max_output_tokens": 16})
        more = {"input": "Go on", "previous_response_id": first["id"], "max_output_tokens": 16}
        assert fleet.post("/v1/responses", more)["previous_response_id"] == first["id"]
        assert fleet.page(f"/v1/responses/{first['id']}")["id"] == first["id"]


@pytest.mark.long
def test_any_server_each_time_computes_conversations_again(fleet: ServerFleet, rendering: Rendering):
    conversations = Conversations("by chance", fleet.by_chance, rendering, 6, is_named=True)
    assert conversations.play(TURNS).efficiency < 0.8


def test_one_list_one_page_of_counters_and_metrics_by_server(fleet: ServerFleet):
    assert len(fleet.page("/v1/models")["data"]) == 1
    stats = fleet.page("/stats")
    assert [server["url"] for server in stats["servers"]] == [
        f"http://127.0.0.1:{port}" for port in fleet.ports
    ]
    caches = [server["stats"]["prompt_cache"] for server in stats["servers"]]
    assert stats["prompt_cache"]["computed_tokens"] == sum(cache["computed_tokens"] for cache in caches) > 0
    metrics = fleet.page("/metrics")
    for port in fleet.ports:
        assert f'start_llm_backend_up{{backend="127.0.0.1:{port}"}} 1.0' in metrics
        assert f'start_llm_prefix_cache_queries_total{{backend="127.0.0.1:{port}",model_name=' in metrics


def status_of(port: int, key: str) -> int:
    url, headers = f"http://127.0.0.1:{port}/v1/models", {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_servers_behind_a_key_serve_the_proxys_clients_and_no_secret_is_written(model: Path, tmp_path: Path):
    with ServerFleet.started(model, tmp_path, key=KEY, count=2) as fleet:
        conversations = Conversations("keyed", fleet.door, Rendering(model), 3, is_named=False)
        assert conversations.play(2).efficiency > 0.9
        assert {status_of(port, KEY) for port in fleet.ports} == {401}, "the clients' key opens no server"
        assert status_of(fleet.proxy_port, fleet.server_key) == 401, "and the servers' not the proxy"
        assert {status_of(port, fleet.server_key) for port in fleet.ports} == {200}
        shown = json.dumps([fleet.page(path) for path in ("/stats", "/v1/models", "/metrics")])
        written = fleet.printed() + shown
    secret = BackendSecret(fleet.secret)
    for name in (fleet.secret, fleet.server_key, KEY, secret.api_key, secret.readiness):
        assert name not in written


def test_a_reply_has_the_servers_own_headers_and_end(fleet: ServerFleet):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
    sent = urllib.request.Request(
        f"http://127.0.0.1:{fleet.proxy_port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(sent, timeout=60) as reply:
        assert reply.headers["x-start-llm-model"]
        assert reply.read().endswith(b"data: [DONE]\n\n")
