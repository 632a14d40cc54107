"""What the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from start_llm.core.canonical import Conversation


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The exact token ids given to the model, generation tail included.

    A type of its own, so that no other integer sequence is taken for it. Never empty: an engine that is
    given nothing to compute has nothing to sample from.
    """

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a prompt has at least one token")

    def __len__(self) -> int:
        return len(self.ids)


class Boundary(NamedTuple):
    """Where a message ends: its closer begins at token `tokens`.

    Attributes:
        message: index into the request's messages.
        tokens: number of prompt tokens before the closer.
    """

    message: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request as the model reads it.

    Attributes:
        boundaries: in ascending order; a message whose end cannot be told exactly has none.
        conversation: how it is compared with others; None for texts.
        has_transient: it ends with messages that the next request will not have; they are no part of the
            conversation and have no boundaries.
        lasting_end: the tokens that would stand behind the last boundary without them, if that is known.
        left_out: characters of its messages that do not count when it is compared.
        thought_is_open: the prompt ends inside a thought.
        thinking: the model is asked to think, or nobody said that it should not.
    """

    tokens: ModelTokens
    boundaries: tuple[Boundary, ...] = ()
    conversation: Conversation | None = None
    has_transient: bool = False
    lasting_end: tuple[int, ...] | None = None
    left_out: int = 0
    thought_is_open: bool = False
    thinking: bool = True
