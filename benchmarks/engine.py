"""The server beside a bare engine: one stream, eight, prefill; many streams beside mlx_lm.server; steps.

Over HTTP: a random model whose decode step takes at least 10 ms on this machine is served in a process of its
own, and the bare loops of mlx_lm run on the same weights here. The figures are medians of the rounds' ratios.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.generate import BatchGenerator, generate_step

from benchmarks import engine_steps, engine_streams, servers
from benchmarks.harness import Part, alternate, medians, ratio, row, table
from scripts import tiny_models

STREAMS = 8
REPLY_TOKENS, LONG_REPLY_TOKENS = 128, 256
WIDTH, LEAST_STEP_S = 768, 0.010


@dataclass(frozen=True)
class Bare:
    """The model in this process, driven by mlx_lm alone. Rates are in tokens per second."""

    folder: Path
    network: Any
    tokenizer: Any

    def decode(self, behind: int, number: int) -> float:
        """Of one reply, from its first token on."""
        asked = prompt(behind, number)
        replies = stream_generate(self.network, self.tokenizer, prompt=asked, max_tokens=REPLY_TOKENS)
        times = [time.perf_counter() for _ in replies]
        return (len(times) - 1) / (times[-1] - times[0])

    def batch(self, behind: int, number: int) -> float:
        """Of eight replies, their prompts included."""
        generator = BatchGenerator(self.network, max_tokens=LONG_REPLY_TOKENS, completion_batch_size=STREAMS)
        generator.insert(prompts(behind, number))
        began, made = time.perf_counter(), 0
        while made < STREAMS * LONG_REPLY_TOKENS:
            made += len(generator.next_generated())
        generator.close()
        return made / (time.perf_counter() - began)

    def prefill(self, behind: int, number: int) -> float:
        """Of a prompt, until the first token is known."""
        began, ids = time.perf_counter(), mx.array(prompt(behind, number))
        next(generate_step(ids, self.network, max_tokens=1, prefill_step_size=512))
        return behind / (time.perf_counter() - began)


@dataclass(frozen=True)
class Served:
    """The same model behind the server."""

    port: int

    def decode(self, behind: int, number: int) -> float:
        times = list(self._stream(prompt(behind, number), REPLY_TOKENS))
        return (REPLY_TOKENS - 1) / (times[-1] - times[0])

    def batch(self, behind: int, number: int) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(STREAMS) as pool:
            ends = pool.map(
                lambda asked: list(self._stream(asked, LONG_REPLY_TOKENS))[-1], prompts(behind, number)
            )
            return STREAMS * LONG_REPLY_TOKENS / (max(ends) - began)

    def prefill(self, behind: int, number: int) -> float:
        began = time.perf_counter()
        first, *_ = self._stream(prompt(behind, number), 1)
        return behind / (first - began)

    def _stream(self, tokens: list[int], most: int) -> Iterator[float]:
        """The moments at which text arrived, read from a bare socket: the client is not what is measured."""
        body = json.dumps({"prompt": tokens, "max_tokens": most, "temperature": 0, "stream": True})
        with servers.bare_socket(self.port, "/v1/completions", body.encode()) as connection:
            while data := connection.recv(65536):
                if data.count(b'"text":"') > data.count(b'"text":""'):
                    yield time.perf_counter()


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that are the same in every run, and that no other seed begins with: no cache has them."""
    return [(7919 * (index + 1) * (seed + 3)) % 1500 + 100 for index in range(length)]


def prompts(length: int, number: int) -> list[list[int]]:
    """Those of a round of eight streams."""
    return [prompt(length, STREAMS * number + stream) for stream in range(STREAMS)]


@cache
def _model(family: str, hidden: int) -> Bare:
    """A random model, the smallest of a few whose bare decode step takes at least 10 ms, or else the largest.

    Beside steps that are much shorter than those of models in use the server's own time weighs more.
    """
    _FOLDERS.append(tempfile.TemporaryDirectory())
    folder = Path(_FOLDERS[-1].name)
    for layers in (4, 8, 12, 16, 24, 32):
        tiny_models.build(family, folder, hidden=hidden, layers=layers, vocab=8192)
        bare = Bare(folder, *load(str(folder))[:2])
        bare.decode(64, 0)
        step_s = 1 / bare.decode(64, 0)
        if step_s >= LEAST_STEP_S:
            break
    print(f"{family}: a bare step takes {1000 * step_s:.1f} ms, with {layers} layers.\n")
    return bare


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Of the models that the parts share: they go when this process ends."""


type Rate = Callable[[Bare | Served, int, int], float]
"""Tokens per second of a side, behind a prompt of so many tokens, in a round."""


def _compared(what: str, rate: Rate, usual: int) -> Part:
    """Return a part that prints a row for each family and length of prompts."""

    def part(
        _: Path,
        *,
        families: Sequence[str] = ("qwen3",),
        behind: Sequence[int] = (usual,),
        hidden: int = WIDTH,
        rounds: int = 9,
    ) -> None:
        bares = {family: _model(family, hidden) for family in families}
        table(f"{what} | bare mlx_lm | served | served / bare, median of {rounds}")
        for family, bare in bares.items():
            with servers.served("--model", bare.folder, "--batch", STREAMS) as server:
                for length in behind:
                    sides = (partial(rate, side, length) for side in (Served(server.port), bare))
                    rates = alternate(rounds, *sides, warm_up=1)
                    cells = (f"{speed:.1f} tok/s" for speed in reversed(medians(rates)))
                    row(f"{family}, prompts of {length:,}", *cells, f"{ratio(rates):.3f}")

    part.__doc__ = f"""The speed of {what}: one warm-up of each side, then rounds in turn.

    Args:
        families: model types
        behind: tokens of prompts
        hidden: width of the models
    """
    return part


decode = _compared(f"one stream of {REPLY_TOKENS} tokens", lambda side, *asked: side.decode(*asked), 64)
batch = _compared(
    f"{STREAMS} streams of {LONG_REPLY_TOKENS} tokens", lambda side, *asked: side.batch(*asked), 8
)
prefill = _compared("reading a prompt", lambda side, *asked: side.prefill(*asked), 2048)

PARTS: Mapping[str, Part] = {
    "decode": decode,
    "batch": batch,
    "prefill": prefill,
    "streams": engine_streams.streams,
    "eyes": engine_steps.eyes,
    "sampling": engine_steps.sampling,
}
