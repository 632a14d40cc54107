"""Counters of the running server. Readers may see a value slightly late.

A field has one thread that writes it, or is written by methods that hold a lock
(`tests/http/test_writers.py` finds out).
"""

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from start_llm.core.events import Usage
from start_llm.core.model_card import ModelCard
from start_llm.storage.database import DatabaseMetrics

_STALLS = 500


@dataclass(slots=True)
class DraftMetrics:
    """Counters of drafts, written by the engine thread only.

    Attributes:
        pays: a draft whose tokens are all right makes replies faster.
        drafts: that were verified, each in one forward pass.
        drafted_tokens, accepted_tokens: of these drafts, and of those the ones that became the reply's. Each
            accepted one saved a forward pass.
        saved_s: seconds that passes of one token each would have taken longer, as far as they are known.
        rejected_s: seconds that rejected tokens took.
    """

    pays: bool = False
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    saved_s: float = 0.0
    rejected_s: float = 0.0

    def note(self, drafted: int, accepted: int, *, saved_s: float, rejected_s: float) -> None:
        """Count a draft that was verified."""
        self.drafts += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.saved_s += saved_s
        self.rejected_s += rejected_s


@dataclass(slots=True)
class IdleMetrics:
    """Counters of what was read while nobody waited, written under the lock of `serving.read_ahead`.

    Attributes:
        works: prompts of which something was read.
        read_tokens, restored_tokens: of these, those that were computed, and those that only the disk had.
        used_tokens: of both, those that a request then found.
        is_paused: too few were used of late, so that little is read.
    """

    works: int = 0
    read_tokens: int = 0
    restored_tokens: int = 0
    used_tokens: int = 0
    is_paused: bool = False


@dataclass(slots=True)
class EngineMetrics:
    """Engine counters, written by the engine thread only.

    Attributes:
        prefill: tokens done and total of the prompt that is being prefilled; None if there is none.
        prefilled_tokens, generated_tokens: since the start.
        failures: engine actions that raised.
        preemptions: preempted replies, to be continued later.
        tower_runs, tower_s: images that the vision tower has seen, and the seconds that this took.
        image_bytes: memory of the images that are kept as the tower has seen them.
        step_began: on the clock of `time.monotonic`; None while no step runs.
        stalls: the last 500 pauses of running replies between two steps, in seconds, of which others take a
            copy; `worst_stall` of all.
        stepped_at: seconds since 1970 of the last of them.
        drafts: of drafted tokens.
    """

    waiting: int = 0
    active_sequences: int = 0
    prefill: tuple[int, int] | None = None
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    failures: int = 0
    preemptions: int = 0
    tower_runs: int = 0
    tower_s: float = 0.0
    image_bytes: int = 0
    step_began: float | None = None
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=_STALLS))
    worst_stall: float = 0.0
    stepped_at: float = 0.0
    drafts: DraftMetrics = field(default_factory=DraftMetrics)

    @property
    def is_idle(self) -> bool:
        """True if no request waits or runs, as far as is known."""
        return not (self.waiting or self.active_sequences or self.prefill)

    def note_stall(self, seconds: float) -> None:
        self.stalls.append(seconds)
        self.worst_stall = max(self.worst_stall, seconds)
        self.stepped_at = time.time()


@dataclass(slots=True)
class CacheMetrics:
    """Prompt cache counters, written by the engine thread only.

    Attributes:
        lookups, hits: prompts, and those of which something was restored.
        misses: prompts of which nothing, or less than was ever computed, was restored, by reason: `new`
            (never seen), `evicted`, `no_state` (KV is stored, but no state at its end), `drift` (computed as
            other tokens, which could not be used), `off`.
        rejected_keys: candidates with the right key but other tokens.
        reused_tokens: prompt tokens that were restored.
        computed_tokens: prompt tokens that were computed.
        unavoidable_tokens: those of them that were never computed before.
        reused_in_place: prompts that continued in their last turn's caches without a copy.
        evictions: evicted conversations, pages and checkpoints, and sequence caches that were split, whose
            pages stay.
        cut_images: restores that went back to the start of an image, because only a part of it is stored.
        budget_bytes: for all of the following together; 0 is no cache.
        page_bytes, seq_cache_bytes, checkpoint_bytes, live_bytes: memory of pages, idle sequence caches,
            checkpoints, and the caches of running sequences.
        arrays: number of arrays in all of these.
        pages, checkpoints, seq_caches: how many there are.
    """

    budget_bytes: int = 0
    page_bytes: int = 0
    seq_cache_bytes: int = 0
    checkpoint_bytes: int = 0
    live_bytes: int = 0
    arrays: int = 0
    pages: int = 0
    checkpoints: int = 0
    seq_caches: int = 0
    lookups: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter[str])
    rejected_keys: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    unavoidable_tokens: int = 0
    reused_in_place: int = 0
    evictions: int = 0
    cut_images: int = 0

    @property
    def correctness(self) -> dict[str, int]:
        """Counters that stay 0 if all is well."""
        return {
            "vlm_retreat": self.cut_images,
            "hybrid_trim_miss": self.misses["no_state"],
            "exact_key_rejected_by_model_lcp": self.rejected_keys,
        }

    @property
    def stored_bytes(self) -> int:
        """Bytes of everything that no running sequence holds."""
        return self.page_bytes + self.seq_cache_bytes + self.checkpoint_bytes


@dataclass(slots=True)
class DiskMetrics:
    """Counters of the disk tier, written by the disk thread, and those of restores by the engine thread.

    `lost`, `queue` and `errors` are written by several threads, with the methods that note them.

    Attributes:
        state: `off`, `off: ` and the reason, `scanning`, `on` or `paused` (after an error, without room, or
            because enough was written today).
        files, nbytes, max_bytes: of the folder, whatever model they are of.
        hits: prompts of which something was restored from the disk.
        restored_tokens, restored_bytes, restored_s: tokens and bytes that were read for prompts, and the
            seconds that these prompts waited.
        late: prompts that did not wait for the disk any longer, because it took more time than computing.
        computed_instead: prompts that were computed though the disk had them, because that is faster.
        rejected: files that could not be used, by reason; see `cache.disk.page_file.RejectedFile`.
        queue: files that wait to be written.
        written_files, written_bytes: since the start; `written_today_bytes` on the day
            (UTC) of the last write, or of the start if there was none since.
        evictions: files that were removed because the folder was full.
        lost: pages and states that were evicted from memory before they could be written, or found no room.
        errors: failures to write, and to read a file that may be read at the next try.
    """

    state: str = "off"
    files: int = 0
    nbytes: int = 0
    max_bytes: int = 0
    hits: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    restored_s: float = 0.0
    late: int = 0
    computed_instead: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    queue: int = 0
    written_files: int = 0
    written_bytes: int = 0
    written_today_bytes: int = 0
    evictions: int = 0
    lost: int = 0
    errors: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_lost(self) -> None:
        with self._lock:
            self.lost += 1

    def note_error(self) -> None:
        with self._lock:
            self.errors += 1

    def note_queued(self, change: int) -> None:
        """Count files that have come to wait, or that wait no longer."""
        with self._lock:
            self.queue += change


@dataclass(slots=True)
class TranscriptSizes:
    """What a store of transcripts holds. Written under the store's lock.

    Attributes:
        forgotten: dropped variants.
    """

    nodes: int = 0
    variants: int = 0
    nbytes: int = 0
    forgotten: int = 0


@dataclass(slots=True)
class TranscriptMetrics:
    """Transcript counters of one model.

    Attributes:
        stored: of the store, which models with equal weights share.
        bound: requests that start with recorded tokens; `bound_tokens` counts these.
        fresh: requests that do not.
        kept_tokens: recorded tokens in excess of the fresh rendering that they replace: mostly reasoning.
        refused: bindings that were given up, by reason: `too_long` for the window, `costly` because of the
            notes that the model would have needed.
        notes: prompts with notes on changed values; `note_tokens` counts the notes' tokens.
        restored_reasoning: reasoning that was restored to a message that came without it.
    """

    stored: TranscriptSizes = field(default_factory=TranscriptSizes)
    bound: int = 0
    bound_tokens: int = 0
    fresh: int = 0
    kept_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    notes: int = 0
    note_tokens: int = 0
    restored_reasoning: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_binding(
        self, recorded: int, replaced: int, refusal: str | None = None, note_tokens: int = 0
    ) -> None:
        """Count a request in which `recorded` tokens replace `replaced` fresh ones, unless it was refused."""
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

    def note_restored_reasoning(self, count: int) -> None:
        with self._lock:
            self.restored_reasoning += count


@dataclass(slots=True)
class RequestMetrics:
    """Request counters, written by HTTP threads under a lock."""

    in_flight: int = 0
    endings: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    repetitions: int = 0
    """How often users were warned that a model repeats itself."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_repetition(self) -> None:
        with self._lock:
            self.repetitions += 1

    def begin(self) -> None:
        with self._lock:
            self.in_flight += 1

    def end(self, ending: str, usage: Usage) -> None:
        """Count the end of a request.

        Args:
            ending: a finish reason, `deadline`, `repetition`, `failed` or `cancelled`.
            usage: what was read and written; less than was asked for if the request was given up.
        """
        with self._lock:
            self.in_flight -= 1
            self.endings[ending] += 1
            self.prompt_tokens += usage.prompt
            self.cached_tokens += usage.cached
            self.completion_tokens += usage.completion


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """Counters of one loaded model, and its card."""

    card: ModelCard
    engine: EngineMetrics
    cache: CacheMetrics
    transcripts: TranscriptMetrics
    database: DatabaseMetrics
    idle: IdleMetrics = field(default_factory=IdleMetrics)
