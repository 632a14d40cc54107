"""Builds the status replies of a model: `/health`, `/stats`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from start_llm.core.chat import Json
from start_llm.core.limits import TimeLimits
from start_llm.protocols.response_store import ResponseStore
from start_llm.server.drain import RequestDrain
from start_llm.server.page_request import members
from start_llm.telemetry.metrics import (
    CacheMetrics,
    DiskMetrics,
    EngineMetrics,
    IdleMetrics,
    ModelMetrics,
    RequestMetrics,
    TranscriptMetrics,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(ModelMetrics):
    """Builds status replies from a model's counters. Never waits for the engine.

    Attributes:
        batch: maximum number of replies generated at once.
        engine_is_alive: returns True while requests can be served.
        image_input_bytes: returns the memory of the images that are kept as the vision tower takes them.
        drain: shows if new requests are accepted.
    """

    batch: int
    requests: RequestMetrics
    disk: DiskMetrics
    responses: ResponseStore
    limits: TimeLimits
    engine_is_alive: Callable[[], bool]
    image_input_bytes: Callable[[], int] = lambda: 0
    drain: RequestDrain = field(default_factory=RequestDrain)

    def unloaded(self) -> Status:
        """Return the status to show once the model is gone. It refers to nothing of the model."""
        return replace(
            self,
            card=replace(self.card, weights_bytes=0),
            engine=EngineMetrics(),
            cache=CacheMetrics(),
            transcripts=TranscriptMetrics(),
            idle=IdleMetrics(),
            engine_is_alive=lambda: True,
            image_input_bytes=lambda: 0,
        )

    def stuck_reason(self) -> str:
        """Return why the engine is stuck; empty if it is not, or has ended in the middle of a step."""
        began = self.engine.step_began if self.engine_is_alive() else None
        stuck_s = time.monotonic() - began if began is not None else 0.0
        if stuck_s <= self.limits.stall_s:
            return ""
        return f"the engine has been busy with one step for {stuck_s:.0f} s"

    def health(self) -> tuple[int, Mapping[str, Json]]:
        if not self.engine_is_alive():
            return 503, {
                "status": "failed",
                "reason": "the engine of this model has ended",
                "model": self.card.id,
            }
        if self.drain.has_begun:
            return 503, {
                "status": "draining",
                "reason": "the server is stopping",
                "in_flight": self.drain.inside,
            }
        if reason := self.stuck_reason():
            return 503, {"status": "stuck", "reason": reason, "model": self.card.id}
        return 200, {"status": "ok", "model": self.card.id}

    def stats(self, started_at: int) -> tuple[int, Mapping[str, Json]]:
        """Return the sections and keys that clients of similar servers know.

        Args:
            started_at: of the server, in seconds since 1970.
        """
        return 200, {
            "server": {"owner": "serve", "model": self.card.id, "started_at": started_at},
            "prompt_cache": self._prompt_cache(),
            "ssd": self._disk(),
            "transcripts": self._transcripts(),
            "response_store": self.responses.counts(),
            "kv_quant": {
                "mode": self.card.kv.mode,
                "layers": dict(self.card.kv.layers),
                "attention": dict(self.card.kv.attention),
            },
            "admission": members(
                self.card,
                "max_safe_context=context_window memory_budget_bytes=budget_bytes usable_bytes weights_bytes",
            ),
            "batch": {
                "configured": self.batch,
                "batched": not self.card.unbatched_reason,
                "unbatched_reason": self.card.unbatched_reason,
                "active_rows": self.engine.active_sequences,
            },
            "images": {
                "tower_runs": self.engine.tower_runs,
                "tower_seconds": round(self.engine.tower_s, 3),
                "kept_bytes": self.engine.image_bytes,
                "input_bytes": self.image_input_bytes(),
            },
            "requests": self._requests(),
            "engine": self._engine(),
            "speculation": self._speculation(),
            "idle_work": members(self.idle, "works read_tokens restored_tokens used_tokens is_paused"),
        }

    def _prompt_cache(self) -> dict[str, Json]:
        cache = self.cache
        computed, unavoidable = cache.computed_tokens, cache.unavoidable_tokens
        reasons = ("new", "evicted", "no_state", "drift", "off")
        misses: dict[str, Json] = {reason: cache.misses[reason] for reason in reasons}
        return {
            **members(cache, "entries=pages bytes=stored_bytes max_bytes=budget_bytes"),
            "bytes_by_kind": members(
                cache,
                "pages=page_bytes sequence_caches=seq_cache_bytes checkpoints=checkpoint_bytes "
                "live=live_bytes",
            ),
            **members(cache, "arrays checkpoints sequence_caches=seq_caches lookups hits"),
            "misses": cache.lookups - cache.hits,
            "misses_by_reason": misses,
            **members(cache, "computed_tokens reused_tokens unavoidable_tokens"),
            "efficiency": round(unavoidable / computed, 4) if unavoidable else None,
            **members(cache, "reused_in_place evictions"),
            **cache.correctness,
        }

    def _disk(self) -> dict[str, Json]:
        """Return counters of the disk tier."""
        disk = self.disk
        return {
            **members(disk, "state files bytes=nbytes max_bytes hits restored_tokens restored_bytes"),
            "restored_seconds": round(disk.restored_s, 3),
            **members(disk, "late computed_instead"),
            "rejected_files": {reason: disk.rejected[reason] for reason in sorted(disk.rejected)},
            **members(disk, "queue written_files written_bytes written_today_bytes evictions lost errors"),
            "conversations": members(
                self.database,
                "kept=is_on bytes=nbytes loaded_rows=loaded rejected_rows=rejected written_rows=written "
                "resets errors=failures",
            ),
        }

    def _transcripts(self) -> dict[str, Json]:
        """Return counters of the transcript store."""
        counts = self.transcripts
        return {
            **members(counts.stored, "nodes variants bytes=nbytes forgotten"),
            **members(counts, "bound bound_tokens fresh kept_tokens"),
            "refused": {reason: counts.refused[reason] for reason in ("too_long", "costly")},
            **members(counts, "notes note_tokens restored_reasoning"),
        }

    def _requests(self) -> dict[str, Json]:
        counts = self.requests
        return {
            "in_flight": counts.in_flight,
            "endings": dict(counts.endings),
            **members(counts, "repetitions prompt_tokens cached_tokens completion_tokens"),
        }

    def _engine(self) -> dict[str, Json]:
        prefill = self.engine.prefill
        return {
            "waiting": self.engine.waiting,
            "prefill": {"done": prefill[0], "total": prefill[1]} if prefill else None,
            **members(self.engine, "prefilled_tokens generated_tokens failures preemptions"),
            "decode_stall": self._decode_stall(),
        }

    def _speculation(self) -> dict[str, Json]:
        """Return counters of drafted tokens. Each accepted one saved a forward pass."""
        drafts = self.engine.drafts
        return {
            **members(drafts, "pays drafts drafted_tokens accepted_tokens"),
            "saved_s": round(drafts.saved_s, 3),
            "rejected_s": round(drafts.rejected_s, 3),
        }

    def _decode_stall(self) -> dict[str, Json]:
        """Return seconds between two tokens of running replies."""
        last = sorted(self.engine.stalls.copy())
        return {
            "target_s": self.limits.chunk_s,
            "median_s": round(last[len(last) // 2], 4) if last else None,
            "p95_s": round(last[len(last) * 95 // 100], 4) if last else None,
            "worst_s": round(self.engine.worst_stall, 4),
        }
