"""Keep the metrics of a prompt cache true: what prompts find, what is computed, and how much is held.

Owned by the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.eviction import Evictor
    from start_llm.cache.page_store import PageStore
    from start_llm.cache.pages import SequenceCache
    from start_llm.core.events import Restored
    from start_llm.telemetry.metrics import CacheMetrics


@owned_by(ENGINE)
class CacheCounts:
    """Writes the metrics of one prompt cache.

    Args:
        supports_reuse: see `PromptCache`.
    """

    def __init__(
        self, metrics: CacheMetrics, store: PageStore, evictor: Evictor, *, supports_reuse: bool
    ) -> None:
        self._metrics = metrics
        self._store = store
        self._evictor = evictor
        self._supports_reuse = supports_reuse

    def note_lookup(self, restored: Restored, *, is_in_place: bool) -> None:
        """Count a prompt that was looked up, and what was restored of it.

        Args:
            is_in_place: without a copy.
        """
        metrics = self._metrics
        metrics.lookups += 1
        metrics.hits += 1 if restored.tokens else 0
        metrics.reused_tokens += restored.tokens
        metrics.reused_in_place += is_in_place
        metrics.rejected_keys = self._store.tree.rejected_keys
        if restored.miss:
            metrics.misses[restored.miss] += 1

    def note_cut_image(self) -> None:
        """Count a restore that went back to the start of an image."""
        self._metrics.cut_images += 1

    def note_computed(self, seq_cache: SequenceCache, start: int, end: int, *, decodes: bool) -> None:
        """Count computed prompt tokens, with the last one if a decode step computes it.

        A sequence that was preempted counts that one once.
        """
        is_complete = decodes and end == seq_cache.prompt_length - 1
        if is_complete and not seq_cache.is_prompt_counted:
            end += 1
            seq_cache.is_prompt_counted = True
        self._metrics.computed_tokens += end - start
        if self._supports_reuse:
            self._metrics.unavoidable_tokens += end - min(max(start, seq_cache.repeated_tokens), end)

    def note_sizes(self) -> None:
        """Note how much memory is held, and by what."""
        metrics, store = self._metrics, self._store
        metrics.evictions = self._evictor.evicted
        metrics.page_bytes = store.tree.runs_usage.nbytes
        metrics.seq_cache_bytes = store.idle_usage.nbytes
        metrics.checkpoint_bytes = store.checkpoints.usage.nbytes
        active = store.active_usage
        metrics.live_bytes = active.nbytes + self._evictor.batched_bytes
        metrics.arrays = (store.usage + active).arrays
        metrics.pages = store.tree.count
        metrics.checkpoints = len(store.checkpoints)
        metrics.seq_caches = len(store.seq_caches)
