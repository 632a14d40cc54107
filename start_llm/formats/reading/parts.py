"""The parts of a call that readers find, and what a reader is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Started:
    """A call of an offered tool. From here on the text is a call, whatever follows."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A fragment of the JSON object of the arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The arguments are complete."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A call that is none, because of its tool or its form: text of the answer, byte for byte."""

    text: str


type CallPart = Started | Arguments | Ended
type Part = CallPart | Plain
type State = Literal["reading", "failed", "done"]


class Reader(Protocol):
    """Reads one block of calls, from behind its opener. A state machine without I/O.

    Attributes:
        state: `failed` if this is no block of calls, which is known before any part is given; `done` at the
            end of the block.
        rest: text behind the block, once it is done.
    """

    state: State
    rest: str

    def feed(self, text: str) -> list[Part]: ...

    def close(self, complete: bool) -> list[Part]:
        """The reply is over; `complete` if the model ended it. A block without end fails or stays open."""
        ...
