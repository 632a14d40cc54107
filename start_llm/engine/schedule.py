"""Whose turn comes next.

Everybody is due once the engine could have done their work, counted from their arrival. So a short prompt
goes in front of a long one that came a little earlier, and in front of nobody who has waited long enough. A
session's requests are due one after the other: many at once from one session do not hold up another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from start_llm.core.job import Job
from start_llm.engine.generation import Generation
from start_llm.engine.row import Row

_BACKGROUND = 2.0
"""Requests that nobody looks at are taken for so many times as long."""
_WORTH_STOPPING = 4
"""A prompt is stopped half way for those that need a part of what it still needs."""


class Due(Protocol):
    """A request, and when it is due: seconds on the engine's clock."""

    @property
    def generation(self) -> Generation: ...

    @property
    def due(self) -> float: ...


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that waits for its turn, or for its next one.

    Attributes:
        due: seconds on the engine's clock; the earliest is next.
        row: what it has so far, if it was interrupted.
    """

    generation: Generation
    due: float
    row: Row | None = None

    @property
    def tokens(self) -> int:
        """Of its prompt, and of its reply so far."""
        return len(self.row.tokens) if self.row else len(self.generation.job.prompt)


class Schedule:
    """All who wait.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def interrupted(self) -> list[Row]:
        return [one.row for one in self._waiting if one.row]

    def add(self, generation: Generation, speed: float, computing: Due | None = None) -> None:
        """A new request.

        Args:
            speed: tokens of a prompt that the engine computes in a second.
            computing: whose prompt is being computed.
        """
        job = generation.job
        prompts = [*self._prompts, *([computing] if computing else [])]
        wanted = [one for one in prompts if not one.generation.cancelled]
        owed = [one.due for one in wanted if _is_one_session(one.generation.job, job)]
        begins = max([self._clock(), *owed])
        self._waiting.append(Waiting(generation, begins + _seconds(job, len(job.prompt) - job.known, speed)))

    @property
    def _prompts(self) -> list[Waiting]:
        """Those whose prompts are still to be computed."""
        return [one for one in self._waiting if one.row is None or not one.row.has_begun]

    def put_back(self, row: Row, due: float | None = None) -> None:
        """A row that was interrupted; it is due now, if it is not said when."""
        due = self._clock() if due is None else due
        self._waiting.append(Waiting(row.generation, due, row))

    @property
    def first(self) -> Waiting | None:
        return min(self._waiting, key=lambda one: one.due, default=None)

    def take(self, waiting: Waiting) -> None:
        self._waiting.remove(waiting)

    def take_cancelled(self) -> list[Waiting]:
        """Those who have given up."""
        gone = [one for one in self._waiting if one.generation.cancelled]
        self._waiting = [one for one in self._waiting if not one.generation.cancelled]
        return gone

    def take_all(self) -> list[Generation]:
        generations = [one.generation for one in self._waiting]
        self._waiting = []
        return generations


def _seconds(job: Job, tokens: int, speed: float) -> float:
    """What so many tokens of a prompt are taken to last."""
    return max(tokens, 1) / speed * (_BACKGROUND if job.is_background else 1)


def due_with(waiting: Waiting, restored: int, speed: float) -> float:
    """When it is due, now that so many of its tokens are found: what was known may be kept no longer.

    Args:
        speed: tokens of a prompt that the engine computes in a second.
    """
    job = waiting.generation.job
    lost = job.known - restored
    return waiting.due + _seconds(job, lost, speed) if lost > 0 else waiting.due


def _is_one_session(one: Job, other: Job) -> bool:
    return bool(one.session) and (one.salt, one.session) == (other.salt, other.session)


def goes_first(waiting: Waiting, row: Row, done: int) -> bool:
    """Whether a prompt that is being computed should be stopped for one that waits.

    If both begin alike, the one that goes first computes that for the other too.

    Args:
        row, done: the prompt that is being computed: `done` of its tokens are.
    """
    job = waiting.generation.job
    to_do = 1 if waiting.row else len(job.prompt) - job.known
    return waiting.due < row.due and to_do * _WORTH_STOPPING <= len(row.tokens) - done
