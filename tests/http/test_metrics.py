"""/metrics as Prometheus reads it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser

from tests.conftest import TinyModel
from tests.server.client import CHAT, ask, wait_until
from tests.serving import Server, serving, tried_once

DOCS = Path(__file__).resolve().parents[2] / "docs"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
type Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(server: Server, accept: str = "") -> tuple[str, str]:
    """Content type and text."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return reply.headers["content-type"], reply.read().decode()


def families(server: Server) -> list[Metric]:
    return list(parser.text_string_to_metric_families(scraped(server)[1]))


def values(server: Server, kind: str = "") -> Values:
    """Every sample, or those of a kind."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families(server)
        if not kind or family.type == kind
        for sample in family.samples
    }


def value(server: Server, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    wanted = frozenset(labels.items())
    return sum(value for (metric, has), value in values(server).items() if metric == name and wanted <= has)


def say(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0, **fields}
    return server.post(CHAT, body)["usage"]


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel) -> Iterator[Server]:
    with serving(tiny_model("qwen3", hidden=128, layers=2), max_kv_size=4096) as server:
        say(server, "Fish?")
        yield server


def test_both_formats_are_read_by_prometheus_own_parsers(server: Server):
    kind, text = scraped(server)
    assert kind.startswith("text/plain; version=")
    plain = {sample.name for family in families(server) for sample in family.samples}
    kind, text = scraped(server, OPENMETRICS)
    assert kind.startswith("application/openmetrics-text")
    strict = openmetrics_parser.text_string_to_metric_families(text)
    assert {sample.name for family in strict for sample in family.samples} == plain


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool, a part of Prometheus, is not installed"
)
def test_promtool_has_nothing_to_say(server: Server):
    result = subprocess.run(
        ["promtool", "check", "metrics"],
        input=scraped(server)[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def documented() -> dict[str, str]:
    """Each metric of `docs/metrics.md`, with its kind."""
    rows = re.findall(r"^\| `(start_llm_\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    return dict(rows)


def test_the_document_has_every_metric_and_no_other(server: Server):
    metrics = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in families(server)
        if not family.name.startswith("process_")
    }
    assert documented() == metrics


def test_the_dashboard_asks_for_metrics_that_exist():
    board = json.loads((DOCS / "grafana.json").read_text())
    texts = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"start_llm_\w+", " ".join(texts)))
    known = {name for name, kind in documented().items() if kind != "histogram"}
    for name, kind in documented().items():
        known |= {f"{name}_{end}" for end in ("bucket", "sum", "count")} if kind == "histogram" else set()
    assert len(asked) > 10
    assert asked <= known


def test_a_request_is_counted_as_it_was_reported_to_its_client(server: Server):
    names = {
        "prompt_tokens": "start_llm_request_prompt_tokens_sum",
        "completion_tokens": "start_llm_request_generation_tokens_sum",
    }
    before, ended = values(server), value(server, "start_llm_request_success_total")
    usage = [say(server, "Boats on the sea, " * 10), say(server, "Boats on the sea, " * 10)]
    wait_until(lambda: value(server, "start_llm_request_success_total") == ended + 2, within_s=10)
    after = values(server)

    def grew(name: str, **labels: str) -> float:
        wanted = frozenset(labels.items())
        return sum(
            now - before.get(key, 0) for key, now in after.items() if key[0] == name and wanted <= key[1]
        )

    for field, name in names.items():
        assert grew(name) == sum(entry[field] for entry in usage)
    cached = sum(entry["prompt_tokens_details"]["cached_tokens"] for entry in usage)
    prompt = sum(entry["prompt_tokens"] for entry in usage)
    assert cached > 0
    assert grew("start_llm_request_prefill_tokens_sum", source="cached") == cached
    assert grew("start_llm_request_prefill_tokens_sum", source="computed") == prompt - cached
    assert grew("start_llm_prefix_cache_hits_total") == cached
    assert grew("start_llm_prefix_cache_queries_total") == prompt
    assert grew("start_llm_generation_tokens_total") == sum(entry["completion_tokens"] for entry in usage)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grew(f"start_llm_{name}_seconds_count") == 2
        assert 0 < grew(f"start_llm_{name}_seconds_sum") < 60
    assert grew("start_llm_request_success_total") == 2
    replies = sum(entry["completion_tokens"] for entry in usage)
    assert grew("start_llm_inter_token_latency_seconds_count") <= replies - 2
    assert grew("start_llm_time_to_first_token_seconds_sum") < grew(
        "start_llm_e2e_request_latency_seconds_sum"
    )
    assert value(server, "start_llm_http_requests_total", handler=CHAT, method="POST", status="200") >= 2


def test_who_leaves_counts_as_cancelled(server: Server):
    body = {
        "messages": [{"role": "user", "content": "Sea"}],
        "max_tokens": 3000,
        "stream": True,
        "ignore_eos": True,
    }
    before = value(server, "start_llm_request_success_total", finished_reason="cancelled")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        sent = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(
        lambda: value(server, "start_llm_request_success_total", finished_reason="cancelled") == before + 1,
        within_s=10,
    )


def test_refused_requests_are_counted_under_few_names(server: Server):
    for path in (*(f"/nothing/{number}" for number in range(30)), "/v1/models/a", "/v1/models/b"):
        assert ask(server.port, "GET", path).status == 404
    assert ask(server.port, "POST", CHAT, {"messages": 5}).status == 400
    assert ask(server.port, "BREW", "/").status in (400, 405, 501)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.recv(10_000)
        client.sendall(b"nonsense\r\n\r\n")
        client.recv(10_000)

    def counted(handler: str, status: str) -> float:
        return value(server, "start_llm_http_requests_total", handler=handler, status=status)

    assert counted("other", "404") == 30
    assert counted("/v1/models/{id}", "404") == 2
    assert counted(CHAT, "400") == 1
    assert counted("other", "400") == 1, "what was on the connection before is not what was refused"
    assert value(server, "start_llm_http_requests_total", method="other") == 2
    assert sum(name == "start_llm_http_requests_total" for name, _ in values(server)) < 15


def test_the_key_is_asked_for(tiny_model: TinyModel):
    with serving(tiny_model("qwen3", hidden=128, layers=2), access_keys=("sesame",)) as server:
        assert ask(server.port, "GET", "/metrics").status == 401
        assert ask(server.port, "GET", "/metrics", None, {"Authorization": "Bearer sesame"}).status == 200


@pytest.mark.long
def test_a_counter_never_goes_down_while_models_come_and_go(tiny_model: TinyModel, tmp_path: Path):
    """Prometheus takes a counter that went down for a new one, and the difference for new requests."""
    for family in ("qwen3", "llama"):
        shutil.copytree(tiny_model(family, hidden=128, layers=2), tmp_path / family)
    is_over, problems, rounds = threading.Event(), list[str](), 0

    def watch() -> None:
        nonlocal rounds
        last: Values = {}
        while not is_over.is_set():
            now = values(server, "counter")
            problems.extend(str(key) for key, was in last.items() if now.get(key, 0) < was)
            last, rounds = last | now, rounds + 1

    settings: dict[str, Any] = {"model_dir": str(tmp_path), "max_kv_size": 4096, "max_loaded": 1}
    with tried_once(), serving(Path("qwen3"), **settings) as server:
        with ThreadPoolExecutor() as threads:
            watching = threads.submit(watch)
            for number in range(4):
                for family in ("qwen3", "llama"):
                    say(server, f"Fish {number}?", model=family)
            is_over.set()
            watching.result(30)
        assert not problems
        assert rounds > 5
        assert value(server, "start_llm_generation_tokens_total") == 8 * 6
        assert value(server, "start_llm_prompt_cache_lookups_total", model_name="qwen3") == 4
        loaded = {model["id"] for model in server.get("/v1/models")["data"] if model["state"] == "loaded"}
        gauges = {
            dict(labels)["model_name"]
            for name, labels in values(server)
            if name == "start_llm_model_weights_bytes"
        }
        assert gauges == loaded == {"llama"}


@pytest.mark.thorough
def test_what_comes_from_the_disk_counts_as_restored(tiny_model: TinyModel, tmp_path: Path):
    folder, body = tiny_model("qwen3", hidden=128, layers=2), {"prompt": "Fish " * 300, "max_tokens": 2}
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        server.post("/v1/completions", body)
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        usage = server.post("/v1/completions", body)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 250
        wait_until(lambda: value(server, "start_llm_request_success_total") == 1, within_s=10)
        assert value(server, "start_llm_request_prefill_tokens_sum", source="restored") == cached
        assert value(server, "start_llm_request_prefill_tokens_sum", source="cached") == 0
        assert value(server, "start_llm_ssd_cache_restored_tokens_total") == cached
