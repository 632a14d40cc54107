"""Let a real Prometheus scrape the server under load, and ask it what it has seen.

    python benchmarks/scrape.py [--seconds 600] [--clients 6]

Starts the server on two tiny random models with room for one, clients that talk to both and often leave, and
`prometheus`, which has to be installed, once a second. Checked: no scrape failed, no counter ever went down
(PromQL's `resets`), and what Prometheus has counted is what the clients were told. `/stats` is asked
ten times a second beside it. What must not be is printed, and the status is then 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402

FAMILIES = ("qwen3", "llama")
_COUNTER = re.compile(r"start_llm_\w+_(total|bucket|count|sum)")
_LEAVING = 0.1
"""Share of the clients' requests that are given up."""


@dataclass
class Told:
    """What clients and the watcher of /stats have seen.

    Attributes:
        stats_s: seconds that each GET /stats took.
    """

    replies: int = 0
    left: int = 0
    completion_tokens: int = 0
    stats_s: list[float] = field(default_factory=list[float])
    lock: threading.Lock = field(default_factory=threading.Lock)


def talk(port: int, seed: int, told: Told, is_over: threading.Event) -> None:
    """A client that goes on with a few conversations and begins new ones."""
    rng, prompts = random.Random(seed), ["" for _ in range(4)]
    while not is_over.is_set():
        place, model = rng.randrange(len(prompts)), rng.choice(FAMILIES[:1] * 20 + FAMILIES[1:])
        prompts[place] = (prompts[place] + f" {rng.random()} fish in the sea" * 5)[-4000:]
        body = {"model": model, "prompt": prompts[place], "max_tokens": rng.randint(2, 30)}
        if rng.random() < _LEAVING:
            leave(port, body)
            with told.lock:
                told.left += 1
            continue
        usage = servers.ask(port, "/v1/completions", body)["usage"]
        with told.lock:
            told.replies += 1
            told.completion_tokens += usage["completion_tokens"]


def leave(port: int, body: dict[str, Any]) -> None:
    """Send a request, and close the connection at its first byte."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request(
        "POST", "/v1/completions", json.dumps({**body, "stream": True, "max_tokens": 2000}), headers
    )
    connection.getresponse().read(1)
    connection.close()


def watch(port: int, told: Told, is_over: threading.Event) -> None:
    while not is_over.wait(0.1):
        began = time.perf_counter()
        servers.ask(port, "/stats")
        told.stats_s.append(time.perf_counter() - began)


def prometheus(folder: Path, target: int, port: int) -> list[str]:
    """The command of a Prometheus that scrapes the server once a second."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: start_llm, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
    )
    return [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]


def query(port: int, text: str) -> list[tuple[dict[str, str], float]]:
    """The result of a PromQL expression: labels and value of each series."""
    reply = servers.ask(port, f"/api/v1/query?query={quote(text)}")
    return [(one["metric"], float(one["value"][1])) for one in reply["data"]["result"]]


def metric_names(port: int) -> list[str]:
    return servers.ask(port, "/api/v1/label/__name__/values")["data"]


def total(port: int, text: str) -> float:
    return sum(value for _, value in query(port, text))


def problems(port: int, told: Told, seconds: int) -> list[str]:
    """What Prometheus has seen that must not be. Prints what it has seen."""
    window = f"[{seconds + 60}s]"
    scrapes = total(port, f'count_over_time(up{{job="start_llm"}}{window})')
    failed = scrapes - total(port, f'sum_over_time(up{{job="start_llm"}}{window})')
    names = [name for name in metric_names(port) if _COUNTER.fullmatch(name)]
    series = sum(total(port, f"count({name})") for name in names)
    went_down = [(name, labels) for name in names for labels, _ in query(port, f"resets({name}{window}) > 0")]
    ended = {
        reason: total(port, f'start_llm_request_success_total{{finished_reason=~"{reason}"}}')
        for reason in ("stop|length", "cancelled")
    }
    replied = total(port, "start_llm_request_generation_tokens_sum")
    took = sorted(
        value for _, value in query(port, f"quantile_over_time(0.5, scrape_duration_seconds{window})")
    )
    print(f"{scrapes:.0f} scrapes, {failed:.0f} failed; {series:.0f} counters, {len(went_down)} went down")
    stats_ms = statistics.median(told.stats_s) * 1000
    print(f"scrape: median {took[0] * 1000:.1f} ms; /stats: median {stats_ms:.2f} ms")
    print(f"told to clients: {told.replies} replies, {told.left} given up")
    print(f"by Prometheus: {ended['stop|length']:.0f} replies, {ended['cancelled']:.0f} given up")
    found = [f"{name} {labels} went down" for name, labels in went_down]
    found += ["a scrape failed"] if failed or scrapes < seconds * 0.9 else []
    found += (
        ["replies differ"] if ended["stop|length"] + ended["cancelled"] != told.replies + told.left else []
    )
    found += ["tokens are missing"] if replied < told.completion_tokens else []
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--clients", type=int, default=6)
    wanted = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("Prometheus is not installed.")
    told, is_over = Told(), threading.Event()
    with tempfile.TemporaryDirectory() as root:
        for family in FAMILIES:
            tiny_models.build(family, Path(root) / "models" / family, hidden=128, layers=2)
        port, own = servers.free_port(), servers.free_port()
        folder = Path(root) / "models"
        options = ["--model", FAMILIES[0], "--model-dir", str(folder)]
        options += ["--mlx-port", str(port), "--no-proxy", "--max-kv-size", "8192"]
        with (
            servers.running(
                ["env", "MAX_LOADED_MODELS=1", *servers.start_llm(*options)],
                partial(servers.health_seconds, port),
            ),
            servers.running(
                prometheus(Path(root), port, own), lambda: query(own, "up"), log=Path(root) / "prometheus.log"
            ),
            ThreadPoolExecutor(wanted.clients + 1) as threads,
        ):
            jobs = [threads.submit(talk, port, seed, told, is_over) for seed in range(wanted.clients)]
            jobs.append(threads.submit(watch, port, told, is_over))
            time.sleep(wanted.seconds)
            is_over.set()
            for job in jobs:
                job.result()
            time.sleep(5)  # the last requests end, and are scraped
            print(servers.machine("mlx", "mlx-lm", "prometheus-client"))
            found = problems(own, told, wanted.seconds)
    print("\n".join(found) or "Nothing is wrong.")
    return bool(found)


if __name__ == "__main__":
    run_with_openblas()
    raise SystemExit(main())
