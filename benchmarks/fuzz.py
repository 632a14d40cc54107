"""Random requests over all endpoints: nothing fails that need not, nothing hangs, nothing grows.

    python benchmarks/fuzz.py [--requests 60000] [--seed 1] [--images]

Starts the server on a tiny scripted model, in a process of its own, with small budgets, and sends it requests
over several connections at once (`tests/fuzz`). Every tenth is right, and its reply is compared word for
word; most of the others have something wrong with them. With `--images` the model is a random one that sees,
and all requests have images, or what claims to be some. Ends with 1, and tells the first requests that
failed, if anything was not as it has to be. Ids of responses are the server's, so a request that names one is
another one each time; all else comes out of the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_vision_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from tests.fuzz.bodies import SCRIPTS, STARTS, TRAIT  # noqa: E402
from tests.fuzz.play import PATIENCE_S, Failure, Fuzz, asked_for, shrunk  # noqa: E402
from tests.fuzz.requests import Request, request, request_with_images  # noqa: E402
from tests.http.scripts import write_model  # noqa: E402

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

    pid: int
    resident: list[int] = field(default_factory=list[int])

    def held(self) -> Held:
        process = Path("/proc") / str(self.pid)
        pages = int((process / "statm").read_text().split()[1])
        return Held(
            threads=len(list((process / "task").iterdir())),
            descriptors=len(list((process / "fd").iterdir())),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
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


type Make = Callable[[int, int, Sequence[str]], Request]


def run(folder: Path, seed: int, requests: int, connections: int, make: Make) -> list[str]:
    """All requests against one server. Prints a table, and returns what was not as it has to be."""
    port = servers.free_port()
    options = ["--model", str(folder), "--no-proxy", "--mlx-port", str(port), "--batch", "4"]
    with servers.running(servers.start_llm(*options), partial(servers.health_seconds, port)) as pid:
        server = Watched(pid)
        # Threads and files that a server opens with its first requests and keeps.
        list(Fuzz(port, seed, connections * 10, make).play(connections))
        before = calm(server, port)
        fuzz = Fuzz(port, seed, requests, make)
        began = time.monotonic()
        server.sample(fuzz.play(connections), requests)
        took = time.monotonic() - began
        for failure in fuzz.failures[:_SHOWN]:
            show(failure, shrunk(port, failure))
        after, pages = calm(server, port), {path: asked_for(port, path) for path in ("/stats", "/health")}
    report(fuzz, server, took, (before, after), pages["/stats"])
    return [*broken(fuzz, server, before, after, pages)]


def calm(server: Watched, port: int) -> Held:
    """Wait until no request is left and only one connection, the one that asks; return what is held then."""
    until = time.monotonic() + _CALM_S
    held = server.held()
    fewest = held
    while time.monotonic() < until:
        held = server.held()
        fewest = min(fewest, held, key=lambda one: (one.descriptors, one.threads))
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


def show(failure: Failure, body: Any) -> None:
    asked = failure.asked
    print(f"\nFAILED: request {failure.index}, {asked.kind}: {asked.method} {asked.target[:200]}")
    print(f"  {failure.problem}")
    text = repr(asked.sent) if body is None else json.dumps(body)
    print(f"  {text[:_LONGEST_SHOWN]}")


def report(fuzz: Fuzz, server: Watched, took: float, held: tuple[Held, Held], stats: Any) -> None:
    normal = sum(count for kind, count in fuzz.kinds.items() if kind.startswith("normal"))
    megabytes = " ".join(f"{tenth / 2**20:.0f}" for tenth in server.tenths)
    cache, store, engine = stats["prompt_cache"], stats["response_store"], stats["engine"]
    print(f"\nseed {fuzz.seed}: {fuzz.done} requests in {took:.0f} s, {normal} of them normal")
    print(f"  kinds             {dict(fuzz.kinds.most_common())}")
    print(f"  replies           {dict(fuzz.statuses.most_common())}")
    print(f"  failed            {len(fuzz.failures)}")
    print(f"  slowest           {fuzz.slowest_s:.2f} s")
    print(f"  threads, files    {', then '.join(f'{one.threads}, {one.descriptors}' for one in held)}")
    print(f"  resident memory   {megabytes} MiB, medians of each tenth")
    print(f"  prompt cache      {cache['bytes']:,} of {cache['max_bytes']:,} bytes")
    images = stats["images"]
    print(
        f"  images            {images['kept_bytes']:,} bytes as seen, {images['input_bytes']:,} before that"
    )
    print(f"  response store    {store['bytes']:,} of {store['max_bytes']:,} bytes")
    print(f"  session turns     {stats['transcripts']['bytes']:,} bytes")
    print(f"  tokens            {engine['prefilled_tokens']:,} read, {engine['generated_tokens']:,} written")
    print(f"  endings           {stats['requests']['endings']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--images", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        # The server of this process alone, and nothing of it in the checkout.
        # Nor does it ask the hub.
        os.environ |= {"LOG_ROOT": f"{root}/logs", "STATE_ROOT": f"{root}/state", **_LIMITS}
        os.environ["HF_HUB_OFFLINE"] = "1"
        folder, make = _seeing(Path(root)) if options.images else _scripted(Path(root))
        print(servers.machine("mlx", "mlx-lm"))
        problems = run(folder, options.seed, options.requests, options.connections, make)
    for problem in problems:
        print(f"NOT AS IT HAS TO BE: {problem}")
    return 1 if problems else 0


def _scripted(root: Path) -> tuple[Path, Make]:
    return write_model(root, TRAIT, scripts=SCRIPTS, starts=STARTS), request


def _seeing(root: Path) -> tuple[Path, Make]:
    return tiny_vision_models.build("qwen3_vl", root / "seeing"), request_with_images


if __name__ == "__main__":
    run_with_openblas()
    sys.exit(main())
