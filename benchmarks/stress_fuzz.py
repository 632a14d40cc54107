"""Random requests over all endpoints: a part of `stress.py`."""

import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import servers
from scripts import tiny_vision_models
from tests.fuzz.bodies import SCRIPTS, STARTS, TRAIT
from tests.fuzz.play import PATIENCE_S, Failure, Fuzz, asked_for, shrunk
from tests.fuzz.requests import request, request_with_images
from tests.http.scripts import write_model

_CACHE_BYTES = 24 * 2**20
MAX_GROWTH = 1.05
_WARM = 4
"""The tenth of the run from which on nothing grows: all that is kept has reached its budget.
The tables of keys are full after some 25,000 requests."""
_SAMPLES = 400
_CALM_S = 30.0
_SHOWN = 5
_LONGEST_SHOWN = 3000
_LIMITS = {
    "HF_HUB_OFFLINE": "1",
    "PROMPT_CACHE_MAX_BYTES": str(_CACHE_BYTES),
    "RESPONSE_STORE_MAX_BYTES": str(2**20),
    "MAX_KV_SIZE": "8192",
    "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS": "20",
    "MAX_BODY_BYTES": str(8 * 2**20),
}


@dataclass(frozen=True, slots=True)
class Held:
    """The resources that a process holds."""

    threads: int
    descriptors: int
    resident_bytes: int


@dataclass
class Watched:
    """The process of the server, while it is asked."""

    server: servers.Served
    resident: list[int] = field(default_factory=list[int])

    def held(self) -> Held:
        process = Path("/proc") / str(self.server.pid)
        return Held(
            threads=len(list((process / "task").iterdir())),
            descriptors=len(list((process / "fd").iterdir())),
            resident_bytes=self.server.resident_bytes(),
        )

    def sample(self, over: Iterator[int], requests: int) -> None:
        """Resident memory at equal distances in the run."""
        for done in over:
            if done >= len(self.resident) * requests / _SAMPLES:
                self.resident.append(self.held().resident_bytes)

    @property
    def tenths(self) -> list[float]:
        """Resident memory in each tenth of the run: the median, in bytes."""
        size = max(1, len(self.resident) // 10)
        return [statistics.median(self.resident[at : at + size]) for at in range(0, 10 * size, size)]


def calm(server: Watched, port: int) -> Held:
    """Wait until no request is left and only one connection, the one that asks; return what is held then."""
    until = time.monotonic() + _CALM_S
    held = server.held()
    fewest = held
    while time.monotonic() < until:
        held = server.held()
        fewest = min(fewest, held, key=lambda reading: (reading.descriptors, reading.threads))
        if asked_for(port, "/stats")["requests"]["in_flight"] == 0 and held == fewest:
            time.sleep(0.5)
            return server.held()
        time.sleep(0.1)
    return held


def broken(fuzz: Fuzz, server: Watched, before: Held, after: Held, pages: Mapping[str, Any]) -> Iterator[str]:
    """List what is not as it has to be when all is over."""
    health, stats = pages["/health"], pages["/stats"]
    if fuzz.failures:
        yield f"{len(fuzz.failures)} requests failed"
    if fuzz.slowest_s >= PATIENCE_S:
        yield f"a request took {fuzz.slowest_s:.0f} s"
    if health["status"] != "ok" or stats["engine"]["failures"]:
        yield f"/health says {health}, and the engine failed {stats['engine']['failures']} times"
    if stats["requests"]["in_flight"] or stats["engine"]["waiting"] or stats["batch"]["active_rows"]:
        yield "a request is left in the server"
    if (after.threads, after.descriptors) != (before.threads, before.descriptors):
        yield f"before {before}, after {after}"
    yield from grown(server, stats)


def grown(server: Watched, stats: Any) -> Iterator[str]:
    """List what holds more than it may."""
    for name in ("prompt_cache", "response_store"):
        held, most = stats[name]["bytes"], stats[name]["max_bytes"]
        if held > most:
            yield f"{name} holds {held} of {most} bytes"
    tenths, images = server.tenths, stats["images"]
    # What is kept of images has limits of its own, which a run of this length does not reach.
    kept = images["kept_bytes"] + images["input_bytes"]
    if tenths[-1] - kept > MAX_GROWTH * tenths[_WARM]:
        yield f"resident memory went from {tenths[_WARM]:,.0f} to {tenths[-1]:,.0f} bytes"


def fuzz(
    folder: Path, *, requests: int = 60_000, seed: int = 1, connections: int = 8, images: bool = False
) -> Iterator[str]:
    """Random requests over all endpoints: nothing fails that need not, nothing hangs, nothing grows.

    The server runs on a tiny scripted model, with small budgets, and gets requests over several connections
    at once (`tests/fuzz`). Every tenth is right, and its reply is compared word for word; most of the others
    have something wrong with them. Ids of responses are the server's, so a request that names one is another
    one each time; all else comes out of the seed. The first requests that failed are printed.

    Args:
        images: a random model that sees; all requests have images, or what claims to be some
    """
    os.environ |= _LIMITS
    if images:
        model, make = tiny_vision_models.build("qwen3_vl", folder / "seeing"), request_with_images
    else:
        model, make = write_model(folder, TRAIT, scripts=SCRIPTS, starts=STARTS), request
    with servers.served("--model", model, "--batch", 4) as served:
        server, port = Watched(served), served.port
        # Threads and files that a server opens with its first requests and keeps.
        list(Fuzz(port, seed, connections * 100, make).play(connections))
        before = calm(server, port)
        fuzz = Fuzz(port, seed, requests, make)
        began = time.monotonic()
        server.sample(fuzz.play(connections), requests)
        took = time.monotonic() - began
        for failure in fuzz.failures[:_SHOWN]:
            show(failure, shrunk(port, failure))
        after, pages = calm(server, port), {path: asked_for(port, path) for path in ("/stats", "/health")}
    report(fuzz, server, took, (before, after), pages["/stats"])
    yield from broken(fuzz, server, before, after, pages)


def show(failure: Failure, body: Any) -> None:
    asked = failure.asked
    print(f"\nFAILED: request {failure.index}, {asked.kind}: {asked.method} {asked.target[:200]}")
    print(f"  {failure.problem}")
    text = repr(asked.sent) if body is None else json.dumps(body)
    print(f"  {text[:_LONGEST_SHOWN]}")


def report(fuzz: Fuzz, server: Watched, took: float, held: tuple[Held, Held], stats: Any) -> None:
    normal = sum(count for kind, count in fuzz.kinds.items() if kind.startswith("normal"))
    cache, store, engine, images = (
        stats[name] for name in ("prompt_cache", "response_store", "engine", "images")
    )
    print(f"\nseed {fuzz.seed}: {fuzz.done} requests in {took:.0f} s, {normal} of them normal")
    lines = {
        "kinds": dict(fuzz.kinds.most_common()),
        "replies": dict(fuzz.statuses.most_common()),
        "failed": len(fuzz.failures),
        "slowest": f"{fuzz.slowest_s:.2f} s",
        "threads, files": ", then ".join(f"{reading.threads}, {reading.descriptors}" for reading in held),
        "resident MiB": " ".join(f"{tenth / 2**20:.0f}" for tenth in server.tenths) + ", medians of tenths",
        "prompt cache": f"{cache['bytes']:,} of {cache['max_bytes']:,} bytes",
        "images": f"{images['kept_bytes']:,} bytes as seen, {images['input_bytes']:,} before that",
        "response store": f"{store['bytes']:,} of {store['max_bytes']:,} bytes",
        "session turns": f"{stats['transcripts']['bytes']:,} bytes",
        "tokens": f"{engine['prefilled_tokens']:,} read, {engine['generated_tokens']:,} written",
        "endings": stats["requests"]["endings"],
    }
    for name, figures in lines.items():
        print(f"  {name:17} {figures}")
