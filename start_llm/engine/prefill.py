"""Computing a prompt, chunk by chunk."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from start_llm.core.events import Prefilling
from start_llm.engine.row import Row


class Prefill:
    """The prompt of one row on its way into the cache; the last token is left for the first decode step.

    So there is always a token to compute: an empty remainder has nothing to sample from (lesson 3).

    Args:
        stops: positions at which a chunk has to end.
    """

    def __init__(self, network: Any, row: Row, stops: tuple[int, ...] = ()) -> None:
        self._network = network
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
        self._network(chunk, cache=self.row.cache)
        mx.eval([layer.state for layer in self.row.cache])
        mx.clear_cache()
        computed = end - self.done
        self.done = end
        if not self.row.has_begun:
            self.row.generation.emit(Prefilling(self.done, self.total))
        return computed
