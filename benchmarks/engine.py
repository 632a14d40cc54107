"""Compare the server with a bare engine: decode, eight streams, prefill, `/health` under load, families.

    python benchmarks/engine.py [--rounds N] [--only decode batch prefill health families]
                                [--families qwen3 ...] [--lengths 2048 8192 32768]

Over HTTP: builds a random model whose decode step takes at least 10 ms on this machine, starts the real
server on it in a process of its own, and runs the bare loops of mlx_lm on the same weights here. Bare and
served rounds alternate, so that a machine whose speed drifts favours neither; the figures are medians of the
rounds' ratios.

In process: *families* does the same for each family after prompts of each length, without HTTP, and demands
0.97 of the bare speed of prefill and 0.98 of decoding, at one row and at eight; the exit status is 1 if one
does not hold. With 9 rounds a family after 2,048 tokens takes about a minute on two idle cores, and the time
grows with the square of the length: 32,768 tokens have to be asked for.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.generate import BatchGenerator, generate_step

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import engine_families, servers  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402

STREAMS = 8
REPLY_TOKENS = 128
LONG_REPLY_TOKENS = 256
PREFILL_TOKENS = 2048
LONG_PROMPT_TOKENS = 20_000
LEAST_STEP_S = 0.010
HTTP_PARTS = ["decode", "batch", "prefill", "health"]
PARTS = [*HTTP_PARTS, "families"]


@dataclass(frozen=True)
class Bare:
    """The model in this process, driven by mlx_lm alone."""

    network: Any
    tokenizer: Any

    def decode(self) -> float:
        """Tokens per second of one reply, from its first token on."""
        times = [
            time.perf_counter()
            for _ in stream_generate(self.network, self.tokenizer, prompt(64), max_tokens=REPLY_TOKENS)
        ]
        return (len(times) - 1) / (times[-1] - times[0])

    def batch(self) -> float:
        """Tokens per second of eight replies, their short prompts included."""
        generator = BatchGenerator(self.network, max_tokens=LONG_REPLY_TOKENS, completion_batch_size=STREAMS)
        generator.insert([prompt(8, seed) for seed in range(STREAMS)])
        began, made = time.perf_counter(), 0
        while made < STREAMS * LONG_REPLY_TOKENS:
            made += len(generator.next_generated())
        generator.close()
        return made / (time.perf_counter() - began)

    def prefill(self) -> float:
        """Prompt tokens per second, until the first token is known."""
        began = time.perf_counter()
        next(
            generate_step(mx.array(prompt(PREFILL_TOKENS)), self.network, max_tokens=1, prefill_step_size=512)
        )
        return PREFILL_TOKENS / (time.perf_counter() - began)


@dataclass(frozen=True)
class Served:
    """The same model after the server."""

    port: int

    def decode(self) -> float:
        times = list(self._stream(prompt(64), REPLY_TOKENS))
        return (REPLY_TOKENS - 1) / (times[-1] - times[0])

    def batch(self) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(STREAMS) as pool:
            ends = pool.map(
                lambda seed: list(self._stream(prompt(8, seed), LONG_REPLY_TOKENS))[-1], range(STREAMS)
            )
            last = max(ends)
        return STREAMS * LONG_REPLY_TOKENS / (last - began)

    def prefill(self) -> float:
        began = time.perf_counter()
        first, *_ = self._stream(prompt(PREFILL_TOKENS), 1)
        return PREFILL_TOKENS / (first - began)

    def health_during_prefill(self) -> list[float]:
        """Seconds that each `GET /health` took while a long prompt was computed."""
        seconds: list[float] = []
        done = threading.Event()

        def compute() -> None:
            list(self._stream(prompt(LONG_PROMPT_TOKENS), 1))
            done.set()

        worker = threading.Thread(target=compute)
        worker.start()
        while not done.wait(0.1):
            seconds.append(servers.health_seconds(self.port))
        worker.join()
        return seconds

    def _stream(self, tokens: list[int], most: int) -> Iterator[float]:
        """The moments at which text arrived, read from a bare socket: the client is not what is measured."""
        body = json.dumps({"prompt": tokens, "max_tokens": most, "temperature": 0, "stream": True})
        head = (
            "POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=600) as connection:
            connection.sendall((head + body).encode())
            while data := connection.recv(65536):
                if data.count(b'"text":"') > data.count(b'"text":""'):
                    yield time.perf_counter()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that are the same in every run."""
    return [(7919 * (index + 1) * (seed + 3)) % 1500 + 100 for index in range(length)]


def build_model(folder: Path) -> Bare:
    """A random model, the smallest of a few whose bare decode step takes at least 10 ms, or else the largest.

    Beside steps that are much shorter than those of models in use the server's own time weighs more.
    """
    step_s = 0.0
    for layers in (4, 8, 12, 16, 24, 32):
        tiny_models.build("qwen3", folder, hidden=768, layers=layers, vocab=8192)
        network, tokenizer = load(str(folder))[:2]
        bare = Bare(network, tokenizer)
        bare.decode()
        step_s = 1 / bare.decode()
        if step_s >= LEAST_STEP_S:
            return bare
    print(f"The largest model that is built here has steps of {1000 * step_s:.1f} ms; few in use have such.")
    return bare


@contextmanager
def server(folder: Path) -> Generator[Served]:
    """The real server, in a process of its own."""
    port = servers.free_port()
    options = ["--no-proxy", "--model", str(folder), "--mlx-port", str(port), "--batch", str(STREAMS)]
    with servers.running(servers.start_llm(*options), lambda: servers.health_seconds(port)):
        yield Served(port)


@dataclass(frozen=True)
class Comparison:
    """Rates of alternating rounds."""

    name: str
    bare: list[float]
    served: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(served / bare for bare, served in zip(self.bare, self.served, strict=True))

    def row(self) -> str:
        bare, served = statistics.median(self.bare), statistics.median(self.served)
        return f"| {self.name} | {bare:.1f} tok/s | {served:.1f} tok/s | {self.ratio:.3f} |"


def compare(name: str, bare: Callable[[], float], served: Callable[[], float], rounds: int) -> Comparison:
    """One warm-up of each, then rounds in turn."""
    bare()
    served()
    pairs = [(bare(), served()) for _ in range(rounds)]
    return Comparison(name, [pair[0] for pair in pairs], [pair[1] for pair in pairs])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    families = engine_families.FAMILIES
    parser.add_argument("--families", nargs="+", choices=families, default=list(families))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(engine_families.LENGTHS))
    options = parser.parse_args()
    if http_parts := [part for part in HTTP_PARTS if part in options.only]:
        compare_over_http(options.rounds, http_parts)
    if "families" not in options.only:
        return 0
    return 0 if engine_families.report(options.families, options.lengths, options.rounds) else 1


def compare_over_http(rounds: int, parts: list[str]) -> None:
    """Start the server on a model of its own, and print what it costs."""
    with tempfile.TemporaryDirectory() as name:
        bare = build_model(Path(name))
        machine = servers.machine("mlx", "mlx-lm")
        print(f"{machine}; bare step {1000 / bare.decode():.1f} ms; medians of {rounds} rounds\n")
        with server(Path(name)) as served:
            report(bare, served, rounds, parts)


def report(bare: Bare, served: Served, rounds: int, parts: list[str]) -> None:
    """Print a row for each part that was asked for."""
    comparisons = {
        "decode": (f"one stream, {REPLY_TOKENS} tokens", bare.decode, served.decode),
        "batch": (f"{STREAMS} streams of {LONG_REPLY_TOKENS} tokens", bare.batch, served.batch),
        "prefill": (f"prefill of {PREFILL_TOKENS} tokens", bare.prefill, served.prefill),
    }
    print("| | bare mlx_lm | served | served / bare |\n|---|---|---|---|")
    for part, (name, run_bare, run_served) in comparisons.items():
        if part in parts:
            print(compare(name, run_bare, run_served, rounds).row(), flush=True)
    if "health" in parts:
        print(health_line(served.health_during_prefill()))


def health_line(seconds: list[float]) -> str:
    median, slowest = 1000 * statistics.median(seconds), 1000 * max(seconds)
    return (
        f"\n/health during a prefill of {LONG_PROMPT_TOKENS:,} tokens: median {median:.1f} ms, "
        f"slowest {slowest:.0f} ms, {len(seconds)} requests"
    )


if __name__ == "__main__":
    run_with_openblas()
    sys.exit(main())
