"""What stands where a prompt cache would, if nothing is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from start_llm.cache.layers import Layers
from start_llm.cache.pages import PageTree, Strand
from start_llm.cache.prompt_cache import Opened
from start_llm.core.events import Restored
from start_llm.telemetry.metrics import CacheMetrics


class NoReuse:
    """In place of a cache: every prompt is computed."""

    keeps = False
    room_bytes = 0

    def __init__(self, layers: Layers, metrics: CacheMetrics | None = None) -> None:
        self.beside_bytes = 0
        self._layers = layers
        self._metrics = metrics or CacheMetrics()
        self._root = PageTree(1).root(b"")

    def open(
        self,
        ids: tuple[int, ...],  # noqa: ARG002
        salt: bytes,  # noqa: ARG002
        boundaries: Sequence[int],  # noqa: ARG002
        told: int = 0,  # noqa: ARG002
        room: int = 0,
    ) -> Opened:
        self._metrics.lookups += 1
        self._metrics.misses["off"] += 1
        self._metrics.computed_tokens += 1  # the last one, which no chunk computes
        return Opened(Strand(self._layers.fresh(room), self._root), (), Restored(0, "off"))

    def reopen(
        self,
        ids: tuple[int, ...],  # noqa: ARG002
        salt: bytes,  # noqa: ARG002
        boundaries: Sequence[int],  # noqa: ARG002
        told: int,  # noqa: ARG002
        prompt_length: int,  # noqa: ARG002
        room: int = 0,
    ) -> Opened:
        return Opened(Strand(self._layers.fresh(room), self._root), (), Restored(0, "off"))

    def peek(
        self,
        ids: tuple[int, ...],  # noqa: ARG002
        salt: bytes,  # noqa: ARG002
        boundaries: Sequence[int],  # noqa: ARG002
        told: int = 0,  # noqa: ARG002
    ) -> Restored:
        return Restored(0, "off")

    def grew(self, strand: Strand, tokens: Sequence[int], *, keep_state: bool) -> None:  # noqa: ARG002
        self._layers.grow_little(strand.caches)
        self._metrics.computed_tokens += len(tokens)

    def close(self, strand: Strand, caches: list[Any], tokens: Sequence[int]) -> None:  # noqa: ARG002
        strand.take_back([])

    def discard(self, strand: Strand) -> None:
        strand.take_back([])

    def shrink(self, shortage: int = 0) -> None:
        pass

    def tidy(self, budget_s: float) -> None:
        pass
