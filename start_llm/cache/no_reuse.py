"""A stand-in for `PromptCache` that keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from start_llm.cache.layers import Layers
from start_llm.cache.pages import PageTree, SequenceCache
from start_llm.cache.prompt_cache import OpenedSequence
from start_llm.core.events import Restored
from start_llm.telemetry.metrics import CacheMetrics


class NoReuse:
    """Has `PromptCache`'s methods; every prompt is computed in full."""

    supports_reuse = False
    budget_bytes = 0

    def __init__(self, layers: Layers, metrics: CacheMetrics | None = None) -> None:
        self.batched_bytes = 0
        self._layers = layers
        self._metrics = metrics or CacheMetrics()
        self._root = PageTree(1).root(b"")

    def open(
        self,
        _ids: tuple[int, ...],
        _salt: bytes,
        _boundaries: Sequence[int],
        _repeated_tokens: int = 0,
        room: int = 0,
        **_options: int,
    ) -> OpenedSequence:
        self._metrics.lookups += 1
        self._metrics.misses["off"] += 1
        self._metrics.computed_tokens += 1  # the last one, which the first decode step computes
        return OpenedSequence(SequenceCache(self._layers.fresh(room), self._root), (), Restored(0, "off"))

    def reopen(
        self,
        _ids: tuple[int, ...],
        _salt: bytes,
        _boundaries: Sequence[int],
        _before: SequenceCache,
        room: int = 0,
        **_options: int,
    ) -> OpenedSequence:
        return OpenedSequence(SequenceCache(self._layers.fresh(room), self._root), (), Restored(0, "off"))

    def restorable(self, _ids: tuple[int, ...], _salt: bytes) -> int:
        return 0

    def peek(
        self,
        _ids: tuple[int, ...],
        _salt: bytes,
        _boundaries: Sequence[int],
        _repeated_tokens: int = 0,
    ) -> Restored:
        return Restored(0, "off")

    def record_chunk(self, seq_cache: SequenceCache, tokens: Sequence[int], **_options: bool) -> None:
        self._layers.grow_in_small_steps(seq_cache.caches)
        self._metrics.computed_tokens += len(tokens)

    def close(
        self,
        seq_cache: SequenceCache,
        _caches: list[Any],
        _tokens: Sequence[int],
        **_options: bool,
    ) -> None:
        seq_cache.set_caches([])

    def discard(self, seq_cache: SequenceCache) -> None:
        seq_cache.set_caches([])

    def wait_for_disk(
        self, ids: tuple[int, ...], salt: bytes, capacity: int, *, speed: float, may_look: bool = True
    ) -> None:
        pass

    def leave_disk(self, wait: object) -> None:
        pass

    def collect_from_disk(self) -> None:
        pass

    def write_to_disk(self, *, is_busy: bool) -> None:
        pass

    def flush_to_disk(self, patience_s: float) -> None:
        pass

    def seconds_until_disk(self) -> None:
        pass

    def shrink(self, shortage: int = 0) -> None:
        pass

    def resize(self, budget_bytes: int) -> None:
        pass

    def tidy(self, budget_s: float) -> None:
        pass
