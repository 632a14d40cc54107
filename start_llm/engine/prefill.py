"""Computing a prompt, chunk by chunk."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from start_llm.core.events import Prefilling
from start_llm.engine.row import Row

CHUNK_S = 0.23
"""Streams then seem to flow while a prompt is computed."""
LONGEST_CHUNK = 2048
_FIRST = 64
_SHORTEST = 4


class ChunkPacer:
    """Chooses chunk lengths so that a chunk lasts about as long as it may, from the speed measured last.

    A chunk is the time for which running replies stall and a cancelled prompt keeps the engine.

    Args:
        target_s: seconds.
    """

    def __init__(self, target_s: float = CHUNK_S) -> None:
        self._target_s = target_s
        self.length = _FIRST

    @property
    def speed(self) -> float:
        """Tokens of a prompt that are computed in a second, as far as is known."""
        return self.length / self._target_s

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk. A short last chunk says little about speed, unless it was slow."""
        if tokens < self.length // 2 and seconds < self._target_s:
            return
        affordable = int(tokens * self._target_s / max(seconds, 1e-6))
        self.length = max(_SHORTEST, min(_round(affordable), 2 * self.length, LONGEST_CHUNK))


def _round(length: int) -> int:
    """Few distinct lengths, so that kernels and buffers are used again."""
    step = 16 if length >= 64 else 4
    return length // step * step


class Prefill:
    """The prompt of one row on its way into the cache; the last token is left for the first decode step.

    So there is always a token to compute: an empty remainder has nothing to sample from (lesson 3).

    Args:
        stops: positions at which a chunk has to end.
    """

    def __init__(self, network: Any, row: Row, pacer: ChunkPacer, stops: tuple[int, ...] = ()) -> None:
        self._network = network
        self._pacer = pacer
        self._stops = stops
        self.row = row
        self.done = len(row.strand.tokens)

    @property
    def total(self) -> int:
        return len(self.row.tokens)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the first decode step."""
        return self.total - 1 - self.done

    @property
    def is_complete(self) -> bool:
        return self.remaining == 0

    @property
    def is_at_stop(self) -> bool:
        return self.done in self._stops

    def step(self, most: int) -> int:
        """Compute one chunk of at most `most` tokens and report progress. Returns its length."""
        next_stop = next((stop for stop in self._stops if stop > self.done), self.total)
        end = min(self.done + most, self.total - 1, next_stop)
        if end == self.done:
            return 0
        chunk = mx.array([self.row.tokens[self.done : end]])
        began = time.perf_counter()
        self._network(chunk, cache=self.row.cache)
        mx.eval([layer.state for layer in self.row.cache])
        mx.clear_cache()
        computed = end - self.done
        self._pacer.record(computed, time.perf_counter() - began)
        self.done = end
        if not self.row.has_begun:
            self.row.generation.emit(Prefilling(self.done, self.total))
        return computed
