"""The server beside a bare engine: one stream, eight, prefill, `/health` under load, each family's decoding.

Over HTTP: a random model whose decode step takes at least 10 ms on this machine is served in a process of its
own, and the bare loops of mlx_lm run on the same weights here. The figures are medians of the rounds' ratios.
`families` does the same without HTTP, behind prompts of each length.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.generate import BatchGenerator, generate_step

from benchmarks import engine_eyes, engine_families, engine_sampling, engine_streams, servers
from benchmarks.harness import Part, alternate, medians, ratio, row, table
from scripts import tiny_models

STREAMS = 8
REPLY_TOKENS, LONG_REPLY_TOKENS = 128, 256
PREFILL_TOKENS, LONG_PROMPT_TOKENS = 2048, 20_000
LEAST_STEP_S = 0.010


@dataclass(frozen=True)
class Bare:
    """The model in this process, driven by mlx_lm alone."""

    folder: Path
    network: Any
    tokenizer: Any

    def decode(self) -> float:
        """Tokens per second of one reply, from its first token on."""
        replies = stream_generate(self.network, self.tokenizer, prompt(64), max_tokens=REPLY_TOKENS)
        times = [time.perf_counter() for _ in replies]
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
        began, ids = time.perf_counter(), mx.array(prompt(PREFILL_TOKENS))
        next(generate_step(ids, self.network, max_tokens=1, prefill_step_size=512))
        return PREFILL_TOKENS / (time.perf_counter() - began)


@dataclass(frozen=True)
class Served:
    """The same model behind the server."""

    port: int

    def decode(self) -> float:
        times = list(self.stream(prompt(64), REPLY_TOKENS))
        return (REPLY_TOKENS - 1) / (times[-1] - times[0])

    def batch(self) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(STREAMS) as pool:
            replies = pool.map(
                lambda seed: list(self.stream(prompt(8, seed), LONG_REPLY_TOKENS)), range(STREAMS)
            )
            last = max(times[-1] for times in replies)
        return STREAMS * LONG_REPLY_TOKENS / (last - began)

    def prefill(self) -> float:
        began = time.perf_counter()
        first, *_ = self.stream(prompt(PREFILL_TOKENS), 1)
        return PREFILL_TOKENS / (first - began)

    def stream(self, tokens: list[int], most: int) -> Iterator[float]:
        """The moments at which text arrived, read from a bare socket: the client is not what is measured."""
        body = json.dumps({"prompt": tokens, "max_tokens": most, "temperature": 0, "stream": True})
        with servers.bare_socket(self.port, "/v1/completions", body.encode()) as connection:
            while data := connection.recv(65536):
                if data.count(b'"text":"') > data.count(b'"text":""'):
                    yield time.perf_counter()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that are the same in every run."""
    return [(7919 * (index + 1) * (seed + 3)) % 1500 + 100 for index in range(length)]


@cache
def _model() -> Bare:
    """A random model, the smallest of a few whose bare decode step takes at least 10 ms, or else the largest.

    Beside steps that are much shorter than those of models in use the server's own time weighs more.
    """
    _FOLDERS.append(tempfile.TemporaryDirectory())
    folder = Path(_FOLDERS[-1].name)
    for layers in (4, 8, 12, 16, 24, 32):
        tiny_models.build("qwen3", folder, hidden=768, layers=layers, vocab=8192)
        bare = Bare(folder, *load(str(folder))[:2])
        bare.decode()
        step_s = 1 / bare.decode()
        if step_s >= LEAST_STEP_S:
            break
    print(f"A bare step takes {1000 * step_s:.1f} ms, with {layers} layers.\n")
    return bare


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Of the model that all parts share: it goes when this process ends."""


def _compared(name: str, rounds: int, side: Callable[[Bare | Served], float]) -> None:
    """Print a row: one warm-up of each, then rounds in turn."""
    bare = _model()
    with servers.served("--model", bare.folder, "--batch", STREAMS) as server:
        served = Served(server.port)
        rates = alternate(rounds, lambda _: side(served), lambda _: side(bare), warm_up=1)
    table(f" | bare mlx_lm | served | served / bare, median of {rounds}")
    ours, theirs = medians(rates)
    row(name, f"{theirs:.1f} tok/s", f"{ours:.1f} tok/s", f"{ratio(rates):.3f}")


def decode(_: Path, *, rounds: int = 9) -> None:
    """One stream."""
    _compared(f"one stream, {REPLY_TOKENS} tokens", rounds, lambda side: side.decode())


def batch(_: Path, *, rounds: int = 9) -> None:
    """Eight streams."""
    _compared(f"{STREAMS} streams of {LONG_REPLY_TOKENS} tokens", rounds, lambda side: side.batch())


def prefill(_: Path, *, rounds: int = 9) -> None:
    """Reading a prompt."""
    _compared(f"prefill of {PREFILL_TOKENS} tokens", rounds, lambda side: side.prefill())


def health(_: Path) -> None:
    """How long `GET /health` takes while a long prompt is computed."""
    seconds: list[float] = []
    with servers.served("--model", _model().folder) as server:
        long = threading.Thread(
            target=lambda: list(Served(server.port).stream(prompt(LONG_PROMPT_TOKENS), 1))
        )
        long.start()
        while long.is_alive():
            seconds.append(servers.health_seconds(server.port))
            time.sleep(0.1)
    print(
        f"/health during a prefill of {LONG_PROMPT_TOKENS:,} tokens: median "
        f"{1000 * statistics.median(seconds):.1f} ms, slowest {1000 * max(seconds):.0f} ms, "
        f"{len(seconds)} requests"
    )


PARTS: Mapping[str, Part] = {
    "decode": decode,
    "batch": batch,
    "prefill": prefill,
    "health": health,
    "families": engine_families.families,
    "streams": engine_streams.streams,
    "first-token": engine_streams.first_token,
    "eyes": engine_eyes.eyes,
    "sampling": engine_sampling.sampling,
}
