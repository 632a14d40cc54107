"""What a step of the engine does, as plain values: `engine.planner` decides it, `engine.executor` does it.

A step is a series of parts. Each is decided when the one before it is done, because what one keeps is what
the next may restore. Whoever has the same requests, under the same numbers, and executes the same parts at
the same times of the plan computes, keeps and evicts the same. What the disk tier gives and takes, trimming
of arrays and budgets that other models change are no parts (ADR 21).
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EndRequest:
    """A request leaves: it was cancelled, its time is over, or it is idle work for which there is no room.

    The cache keeps what it computed.

    Attributes:
        number: of the request, in the order in which the engine received them.
        is_given_up: it was cancelled before its reply was complete; says nothing of one that waits.
        is_cut: it has run for as long as it may; its reply ends here.
    """

    number: int
    is_given_up: bool = False
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class PreemptRequest:
    """A running request makes way for others. The cache keeps what it computed.

    Attributes:
        due: when it is to go on, in seconds on the clock of whoever planned this.
    """

    number: int
    due: float


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A waiting request starts, or goes on after it was preempted.

    Attributes:
        restored: the most tokens of its prompt, and of its reply so far, that the cache gives.
        due: see `engine.schedule`. A request that goes on keeps its own.
        disk_tokens, disk_s: what the disk has given of it, and the seconds that it waited for that.
        uses_earlier: its drafts may come from earlier conversations of its tenant, and what is new in it is
            added to them.
    """

    number: int
    restored: int
    due: float
    disk_tokens: int = 0
    disk_s: float = 0.0
    uses_earlier: bool = False


@dataclass(frozen=True, slots=True)
class LookAtImage:
    """The vision tower looks at the next image of a prompt that is being prefilled."""

    number: int


@dataclass(frozen=True, slots=True)
class ComputeChunk:
    """The next `tokens` tokens of a prompt that is being prefilled are computed; 0 if all were restored."""

    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ComputeChunks:
    """Several prompts that are being prefilled share a pass, each up to its next checkpoint or its end."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JoinBatch:
    """Prefilled requests begin to decode.

    Attributes:
        numbers: of the requests, in the order in which they were prefilled.
        beside: a request whose group they join together; None: each is a group of its own.
    """

    numbers: tuple[int, ...]
    beside: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeToken:
    """Each of these groups of requests computes a token, or, if it is a single request, several.

    Attributes:
        groups: the numbers of their requests.
        draft_lengths: tokens to draft for a single request, by class of match (`engine.draft_index`); () for
            none.
    """

    groups: tuple[tuple[int, ...], ...]
    draft_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The prompt cache is brought within its limits.

    Attributes:
        shortage: bytes that are freed beyond them.
    """

    shortage: int = 0


type PrefillPart = StartRequest | LookAtImage | ComputeChunk | ComputeChunks
type StepPart = EndRequest | PreemptRequest | PrefillPart | JoinBatch | DecodeToken | FreeMemory


class PlanClock:
    """The engine's time, in seconds, which the prompt cache shares. While a part is executed it stands still.

    Attributes:
        real: returns seconds, and does not stand still: what is measured is measured by it.
    """

    def __init__(self, real: Callable[[], float] = time.monotonic) -> None:
        self.real = real
        self._at: float | None = None

    def __call__(self) -> float:
        return self.real() if self._at is None else self._at

    @contextmanager
    def stopped(self, at: float) -> Generator[None]:
        """Let it be `at` in the block. Blocks do not nest."""
        self._at = at
        try:
            yield
        finally:
            self._at = None
