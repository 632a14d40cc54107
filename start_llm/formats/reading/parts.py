"""Defines the parts of a call that parsers return, and the parser interface."""

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class ParsedName:
    """The name of a tool. From here on the text is a call, whatever follows."""

    name: str


@dataclass(frozen=True, slots=True)
class ParsedArguments:
    """A fragment of the arguments' JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedEnd:
    """The end of the arguments."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A complete call of no tool or of the wrong shape: answer text, byte for byte."""

    text: str


type CallPart = ParsedName | ParsedArguments | ParsedEnd
type Part = CallPart | ParsedText
type State = Literal["reading", "failed", "done"]


class CallReader(Protocol):
    """Parses one block of calls, starting after its opener. A state machine without I/O.

    Attributes:
        state: `failed` if this is not a block of calls, always before any part is returned; `done` at the end
            of the block.
        rest: the text after the block, once it is done.
        was_repaired: a call is not what the model wrote, character by character.
    """

    state: State
    rest: str
    was_repaired: bool

    def feed(self, text: str) -> list[Part]: ...

    def close(self, complete: bool) -> list[Part]:
        """End the reply; `complete` if the model ended it. A block without an end fails or stays open."""
        ...
