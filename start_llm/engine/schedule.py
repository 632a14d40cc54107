"""Whose turn comes next.

Everybody is due once the engine could have done their work, counted from their arrival. So a short prompt
goes in front of a long one that came a little earlier, and in front of nobody who has waited long enough. A
session's requests are due one after the other: many at once from one session do not hold up another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from start_llm.cache.pages import common_length
from start_llm.core.job import Job
from start_llm.engine.generation import Generation
from start_llm.engine.row import Row

_BACKGROUND = 2.0
"""Requests that nobody looks at are taken for so many times as long."""
_WORTH_STOPPING = 4
"""A prompt is stopped half way for those that need a part of what it still needs."""
_LITTLE = 256
"""Tokens. Computing so many twice is cheaper than to wait for them."""


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
        self._sessions: dict[tuple[bytes, str], float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def interrupted(self) -> list[Row]:
        return [one.row for one in self._waiting if one.row]

    def add(self, generation: Generation, speed: float) -> None:
        """A new request.

        Args:
            speed: tokens of a prompt that the engine computes in a second.
        """
        now, job = self._clock(), generation.job
        self._sessions = {session: due for session, due in self._sessions.items() if due > now}
        cost = self._cost(job, speed)
        due = self._sessions.get((job.salt, job.session), now) + cost
        if job.session:
            self._sessions[job.salt, job.session] = due
        self._waiting.append(Waiting(generation, due))

    def _cost(self, job: Job, speed: float) -> float:
        seconds = max(len(job.prompt) - job.known, 1) / speed
        return seconds * (_BACKGROUND if job.is_background else 1)

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


def goes_first(waiting: Waiting, row: Row, due: float, done: int) -> bool:
    """Whether a prompt that is being computed should be stopped for one that waits.

    Not if that one would compute what this one is about to, which it finds if it waits.

    Args:
        row, due, done: of the prompt that is being computed: `done` of its tokens are.
    """
    job = waiting.generation.job
    to_do = 1 if waiting.row else len(job.prompt) - job.known
    if waiting.due >= due or to_do * _WORTH_STOPPING > len(row.tokens) - done:
        return False
    if job.salt != row.generation.job.salt:
        return True
    return common_length(list(job.prompt.ids), row.tokens) <= done + _LITTLE
