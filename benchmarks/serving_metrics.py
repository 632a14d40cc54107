"""A real Prometheus that scrapes the server under load: a part of `serving.py`."""

from __future__ import annotations

import os
import random
import re
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks import servers
from scripts import tiny_models

FAMILIES = ("qwen3", "llama")
_COUNTER = re.compile(r"start_llm_\w+_(total|bucket|count|sum)")
_LEAVING = 0.1
"""Share of the clients' requests that are given up."""


@dataclass
class ClientCounts:
    """What clients and the watcher of /stats have seen.

    Attributes:
        stats_s: seconds that each GET /stats took.
    """

    replies: int = 0
    left: int = 0
    completion_tokens: int = 0
    stats_s: list[float] = field(default_factory=list[float])
    lock: threading.Lock = field(default_factory=threading.Lock)


def talk(port: int, seed: int, counts: ClientCounts, is_over: threading.Event) -> None:
    """A client that goes on with a few conversations and begins new ones."""
    rng, prompts = random.Random(seed), ["" for _ in range(4)]
    while not is_over.is_set():
        place, model = rng.randrange(len(prompts)), rng.choice(FAMILIES[:1] * 20 + FAMILIES[1:])
        prompts[place] = (prompts[place] + f" {rng.random()} fish in the sea" * 5)[-4000:]
        body = {"model": model, "prompt": prompts[place], "max_tokens": rng.randint(2, 30)}
        if rng.random() < _LEAVING:
            leave(port, body)
            with counts.lock:
                counts.left += 1
            continue
        usage = servers.ask(port, "/v1/completions", body)["usage"]
        with counts.lock:
            counts.replies += 1
            counts.completion_tokens += usage["completion_tokens"]


def leave(port: int, body: dict[str, Any]) -> None:
    """Send a request, and close the connection at its first byte."""
    body = {**body, "stream": True, "max_tokens": 2000}
    with closing(servers.send(port, "/v1/completions", body)) as connection:
        connection.getresponse().read(1)


def watch(port: int, counts: ClientCounts, is_over: threading.Event) -> None:
    while not is_over.wait(0.1):
        began = time.perf_counter()
        servers.ask(port, "/stats")
        counts.stats_s.append(time.perf_counter() - began)


def prometheus(folder: Path, target: int, port: int) -> list[str]:
    """The command of a Prometheus that scrapes the server once a second."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: start_llm, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
    )
    places = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    return ["prometheus", *places, f"--web.listen-address=127.0.0.1:{port}"]


def query(port: int, text: str) -> list[tuple[dict[str, str], float]]:
    """The result of a PromQL expression: labels and value of each series."""
    reply = servers.ask(port, f"/api/v1/query?query={quote(text)}")
    return [(sample["metric"], float(sample["value"][1])) for sample in reply["data"]["result"]]


def total(port: int, text: str) -> float:
    return sum(value for _, value in query(port, text))


def problems(port: int, counts: ClientCounts, seconds: int) -> Iterator[str]:
    """What Prometheus has seen that must not be. Prints what it has seen."""
    window = f"[{seconds + 60}s]"
    scrapes = total(port, f'count_over_time(up{{job="start_llm"}}{window})')
    failed = scrapes - total(port, f'sum_over_time(up{{job="start_llm"}}{window})')
    names = [
        name
        for name in servers.ask(port, "/api/v1/label/__name__/values")["data"]
        if _COUNTER.fullmatch(name)
    ]
    series = sum(total(port, f"count({name})") for name in names)
    went_down = [(name, labels) for name in names for labels, _ in query(port, f"resets({name}{window}) > 0")]
    ended = {
        reason: total(port, f'start_llm_request_success_total{{finished_reason=~"{reason}"}}')
        for reason in ("stop|length", "cancelled")
    }
    replied = total(port, "start_llm_request_generation_tokens_sum")
    durations = query(port, f"quantile_over_time(0.5, scrape_duration_seconds{window})")
    took = min(value for _, value in durations)
    print(f"{scrapes:.0f} scrapes, {failed:.0f} failed; {series:.0f} counters, {len(went_down)} went down")
    stats_ms = statistics.median(counts.stats_s) * 1000
    print(f"scrape: median {took * 1000:.1f} ms; /stats: median {stats_ms:.2f} ms")
    print(f"told to clients: {counts.replies} replies, {counts.left} given up")
    print(f"by Prometheus: {ended['stop|length']:.0f} replies, {ended['cancelled']:.0f} given up")
    yield from (f"{name} {labels} went down" for name, labels in went_down)
    if failed or scrapes < seconds * 0.9:
        yield "a scrape failed"
    if sum(ended.values()) != counts.replies + counts.left:
        yield "replies differ"
    if replied < counts.completion_tokens:
        yield "tokens are missing"


def metrics(folder: Path, *, seconds: int = 600, clients: int = 6) -> Iterator[str]:
    """Let a real Prometheus scrape the server under load, and ask it what it has seen.

    The server has two tiny models and room for one; clients talk to both and often leave, and `prometheus`,
    which has to be installed, asks once a second. Checked: no scrape failed, no counter ever went down
    (PromQL's `resets`), and what Prometheus has counted is what the clients were told. `/stats` is asked ten
    times a second beside it.
    """
    if shutil.which("prometheus") is None:
        raise SystemExit("Prometheus is not installed.")
    counts, is_over, own = ClientCounts(), threading.Event(), servers.free_port()
    for family in FAMILIES:
        tiny_models.build(family, folder / "models" / family, hidden=128, layers=2)
    os.environ["MAX_LOADED_MODELS"] = "1"
    options = ["--model", FAMILIES[0], "--model-dir", folder / "models", "--max-kv-size", 8192]
    with (
        servers.served(*options) as server,
        servers.running(
            prometheus(folder, server.port, own), lambda: query(own, "up"), log=folder / "prometheus.log"
        ),
    ):
        with ThreadPoolExecutor(clients + 1) as threads:
            jobs = [threads.submit(talk, server.port, seed, counts, is_over) for seed in range(clients)]
            jobs.append(threads.submit(watch, server.port, counts, is_over))
            time.sleep(seconds)
            is_over.set()
            for job in jobs:
                job.result()
        time.sleep(5)  # the last requests end, and are scraped
        yield from problems(own, counts, seconds)
