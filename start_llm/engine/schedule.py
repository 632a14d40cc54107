"""Order waiting requests: earliest deadline first.

A request is due once the engine could have prefilled its prompt, counted from its arrival. So a short prompt
overtakes a long one that came a little earlier, but no request that has waited long enough. Requests of one
session are due one after the other, so many at once from one session do not hold up other clients.

A background request, for which nobody waits, makes way for all others: its prompt is read while no other one
waits or is read, its prefill is preempted between two chunks, and its reply pauses meanwhile. So does a
prewarm, after which nothing is generated; it does not start beside replies either. After
`BACKGROUND_PATIENCE_S` either is a request like any other. Idle work, which nobody asked for, always
makes way, and is given up for whatever arrives.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from start_llm.cache.disk.disk_reads import DiskWait
from start_llm.cache.disk.running_restore import FromDisk
from start_llm.core.engine_request import EngineRequest
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.generation import Generation
from start_llm.engine.sequence import EngineSequence

BACKGROUND_PATIENCE_S = 30.0
"""Seconds from its arrival for which a background request or a prewarm makes way for others."""
_WORTH_STOPPING = 4
"""Preempt a prefill only for a request that needs at most 1/4 of the tokens that it still needs."""


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits to start, or to continue after it was preempted.

    Attributes:
        due: seconds on the engine's clock; the earliest is next.
        sequence: its sequence, if it was preempted.
        wait: what it waits for before it can start.
        waits: how often the disk was asked for it.
        waits_until: seconds on the engine's clock at which it waits no longer.
        from_disk: what the disk has given it.
    """

    generation: Generation
    due: float
    sequence: EngineSequence | None = None
    wait: DiskWait | None = None
    waits: int = 0
    waits_until: float = 0.0
    from_disk: FromDisk = field(default_factory=FromDisk)

    @property
    def tokens(self) -> int:
        """Tokens of its prompt and of its reply so far."""
        return len(self.sequence.tokens) if self.sequence else len(self.generation.request.prompt)

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens that its caches have to hold, and the one after them."""
        return tuple(self.sequence.tokens) if self.sequence else self.generation.request.prompt.ids

    @property
    def is_restoring(self) -> bool:
        """True if it waits for the disk."""
        return self.wait is not None and not self.wait.is_over


@owned_by(ENGINE)
class Schedule:
    """All waiting requests.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: list[QueuedRequest] = []
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def preempted(self) -> list[EngineSequence]:
        return [queued.sequence for queued in self._waiting if queued.sequence]

    def add(self, generation: Generation, speed: float, computing: Sequence[EngineSequence] = ()) -> None:
        """Queue a new request, and give it its number.

        Args:
            speed: prefill speed in tokens per second.
            computing: the sequences that are being prefilled.
        """
        request, generation.number = generation.request, next(self._numbers)
        prompts = [*self._prompts, *computing]
        if patience_s := _patience_s(request):
            generation.yields_until = self._clock() + patience_s
        ahead = [
            earlier
            for earlier in prompts
            if not earlier.generation.cancelled and not self.yields(earlier.generation, generation)
        ]
        owed = [earlier.due for earlier in ahead if _is_one_session(earlier.generation.request, request)]
        begins = max([self._clock(), *owed])
        to_read = len(request.prompt) - request.repeated_tokens
        self._waiting.append(QueuedRequest(generation, begins + _seconds(to_read, speed)))

    @property
    def _prompts(self) -> list[QueuedRequest]:
        """Waiting requests whose prompts are not computed yet."""
        return [
            queued for queued in self._waiting if queued.sequence is None or not queued.sequence.has_begun
        ]

    def requeue(self, sequence: EngineSequence, due: float | None = None) -> None:
        """Let a sequence that runs wait, due at `due`; None: now."""
        now = self._clock()
        sequence.pause(now)
        self._waiting.append(QueuedRequest(sequence.generation, now if due is None else due, sequence))

    @property
    def first(self) -> QueuedRequest | None:
        """The next request; those that wait for the disk are passed over."""
        ready = (queued for queued in self._waiting if not queued.is_restoring)
        return min(ready, key=lambda queued: (self.yields(queued.generation), queued.due), default=None)

    def yields(self, generation: Generation, other: Generation | None = None) -> bool:
        """Return whether a request makes way for another one, or for any that somebody waits for."""
        return self._is_patient(generation) and not (other and self._is_patient(other))

    def _is_patient(self, generation: Generation) -> bool:
        return generation.yields_until > 0 and self._clock() < generation.yields_until

    @property
    def generations(self) -> list[Generation]:
        """All requests that wait."""
        return [queued.generation for queued in self._waiting]

    def should_preempt(self, waiting: QueuedRequest, sequence: EngineSequence, done: int) -> bool:
        """Return whether a waiting request should preempt the prompt that is being prefilled: one that makes
        way for it, or of its kind one that is due later, and needs so much more that preempting pays.

        If both share a prefix, the one that runs first computes it for the other too.

        Args:
            sequence, done: the sequence that is being prefilled, and the number of its tokens that are
                computed.
        """
        waits, runs, before = waiting.generation, sequence.generation, waiting.sequence
        if self.yields(waits, runs) or self.yields(runs, waits):
            return self.yields(runs, waits)
        known = len(before.seq_cache.tokens) if before else waits.request.repeated_tokens
        to_do = waiting.tokens - known
        return waiting.due < sequence.due and to_do * _WORTH_STOPPING <= len(sequence.tokens) - done

    @property
    def restoring(self) -> list[QueuedRequest]:
        """The requests that wait for the disk."""
        return [queued for queued in self._waiting if queued.is_restoring]

    def take(self, number: int) -> QueuedRequest:
        """Remove a request, and return it.

        Raises:
            ValueError: no request of this number waits.
        """
        waiting = next((queued for queued in self._waiting if queued.generation.number == number), None)
        if waiting is None:
            raise ValueError(f"request {number} does not wait")
        self._waiting.remove(waiting)
        return waiting

    def drop(self, number: int) -> QueuedRequest:
        """Remove a request that will not go on, and return it. Nothing is read from the disk for it any more.

        Raises:
            ValueError: no request of this number waits.
        """
        waiting = self.take(number)
        _give_up_disk(waiting)
        return waiting

    def take_all(self) -> list[Generation]:
        for queued in self._waiting:
            _give_up_disk(queued)
        generations, self._waiting = self.generations, []
        return generations


def _give_up_disk(waiting: QueuedRequest) -> None:
    if waiting.wait:
        waiting.wait.give_up()


def _patience_s(request: EngineRequest) -> float:
    """Return for how many seconds a request makes way for others."""
    if request.is_idle_work:
        return math.inf
    return BACKGROUND_PATIENCE_S if request.is_background or request.is_prewarm else 0.0


def _seconds(tokens: int, speed: float) -> float:
    """Return the estimated seconds to prefill `tokens` tokens."""
    return max(tokens, 1) / speed


def deadline_after_restore(waiting: QueuedRequest, restored: int, speed: float) -> float:
    """Return when a request is due once it is known how many of its tokens were restored.

    If fewer were restored than `repeated_tokens` promised, it is due later, because more has to be computed.

    Args:
        speed: prefill speed in tokens per second.
    """
    lost = waiting.generation.request.repeated_tokens - restored
    return waiting.due + _seconds(lost, speed) if lost > 0 else waiting.due


def _is_one_session(request: EngineRequest, other: EngineRequest) -> bool:
    return bool(request.session) and (request.salt, request.session) == (other.salt, other.session)
