"""Counters of the running server. Each field has one writer; readers may see it a moment late."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from start_llm.core.events import Usage

_STALLS = 500


@dataclass(slots=True)
class EngineMetrics:
    """Written by the engine thread alone.

    Attributes:
        prefill: tokens computed and tokens in all, of the prompt being computed; None if there is none.
        prefilled_tokens, generated_tokens: forwarded and sampled since the start.
        failures: steps that raised.
        interruptions: rows that gave their place to others, to go on later.
        step_began: on the clock of `time.monotonic`; None while there is nothing to do.
        stalls: seconds between two steps of running replies, the last ones; `worst_stall` of all.
    """

    waiting: int = 0
    active_rows: int = 0
    prefill: tuple[int, int] | None = None
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    failures: int = 0
    interruptions: int = 0
    step_began: float | None = None
    stalls: list[float] = field(default_factory=list[float])
    worst_stall: float = 0.0

    def note_stall(self, seconds: float) -> None:
        self.stalls = [*self.stalls[1 - _STALLS :], seconds]
        self.worst_stall = max(self.worst_stall, seconds)


@dataclass(slots=True)
class CacheMetrics:
    """Written by the engine thread alone.

    Attributes:
        lookups, hits: prompts, and those of which something was known.
        misses: prompts of which something had to be computed again, or nothing was known, by reason: `new`
            (never seen), `evicted` (no longer kept), `no_state` (kept, but for the state at its end), `drift`
            (computed in other words, that could not be taken up), `off`.
        rejected_keys: candidates with the right key and other tokens.
        reused_tokens: prompt tokens that were not computed.
        computed_tokens: prompt tokens that were.
        unavoidable_tokens: those of them that were never computed before.
        handed_over: prompts that went on in the caches of their last turn, without a copy.
        evictions: conversations, pages, checkpoints and strands that had to go.
        budget_bytes: for all of the following together; 0 is no cache.
        page_bytes, strand_bytes, checkpoint_bytes, live_bytes: of what lies in pages, in caches that wait for
            their next turn, in states, and in the caches of running rows.
        arrays: that all of these are in.
        pages, checkpoints, strands: how many there are.
    """

    budget_bytes: int = 0
    page_bytes: int = 0
    strand_bytes: int = 0
    checkpoint_bytes: int = 0
    live_bytes: int = 0
    arrays: int = 0
    pages: int = 0
    checkpoints: int = 0
    strands: int = 0
    lookups: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter[str])
    rejected_keys: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    unavoidable_tokens: int = 0
    handed_over: int = 0
    evictions: int = 0

    @property
    def correctness(self) -> dict[str, int]:
        """Counters that stay at 0 as long as all is well. There are no images yet that could be cut."""
        return {
            "vlm_retreat": 0,
            "hybrid_trim_miss": self.misses["no_state"],
            "exact_key_rejected_by_model_lcp": self.rejected_keys,
        }

    @property
    def stored_bytes(self) -> int:
        """Of everything that no running row holds."""
        return self.page_bytes + self.strand_bytes + self.checkpoint_bytes


@dataclass(slots=True)
class TranscriptMetrics:
    """Sizes are written under the store's lock, counts under this one's.

    Attributes:
        nodes, variants, nbytes: what is kept.
        forgotten: variants that had to go.
        bound: requests that begin with recorded tokens; `bound_tokens` so many.
        fresh: requests that do not.
        kept_tokens: recorded tokens beyond what the fresh rendering has in their place: thoughts, mostly.
        refused: bindings that were given up, by reason: `too_long` for the window, `costly` for what
            the model would have had to be told.
        notes: prompts that tell what has changed; `note_tokens` in so many.
        healed: thoughts that were given back to a message that came without.
    """

    nodes: int = 0
    variants: int = 0
    nbytes: int = 0
    forgotten: int = 0
    bound: int = 0
    bound_tokens: int = 0
    fresh: int = 0
    kept_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    notes: int = 0
    note_tokens: int = 0
    healed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_binding(
        self, recorded: int, replaced: int, refusal: str | None = None, note_tokens: int = 0
    ) -> None:
        """`recorded` tokens take the place of `replaced` fresh ones, unless there is a refusal."""
        with self._lock:
            self.notes += note_tokens > 0
            self.note_tokens += note_tokens
            if refusal is not None:
                self.refused[refusal] += 1
            if refusal is not None or not recorded:
                self.fresh += 1
                return
            self.bound += 1
            self.bound_tokens += recorded
            self.kept_tokens += recorded - replaced

    def note_healed(self, count: int) -> None:
        with self._lock:
            self.healed += count


@dataclass(slots=True)
class RequestMetrics:
    """Written by HTTP threads, under a lock."""

    in_flight: int = 0
    endings: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        with self._lock:
            self.in_flight += 1

    def end(self, ending: str, usage: Usage | None) -> None:
        """`ending` is a finish reason, or `deadline`, `failed` or `cancelled`."""
        with self._lock:
            self.in_flight -= 1
            self.endings[ending] += 1
            if usage is not None:
                self.prompt_tokens += usage.prompt
                self.cached_tokens += usage.cached
                self.completion_tokens += usage.completion
