"""What the engine is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling


class Guide(Protocol):
    """Says which tokens may come next in one reply. One thread makes it, another one uses it from then on."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the reply.

        Raises:
            GuideLost: they could not come here.
        """
        ...

    def allowed(self) -> bytes:
        """For each token id a byte: 0 if it cannot come next.

        Raises:
            GuideLost: this cannot be told.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtLimit:
    """How long the reply may think.

    Attributes:
        most_tokens: reply tokens after which an open thought is closed; at least 1.
        starts_open: the prompt has opened the thought.
        opening: text that opens a thought at the start of the reply.
        closing: text that closes it.
        closing_tokens: what the engine writes to close it.
    """

    most_tokens: int
    starts_open: bool
    opening: str
    closing: str
    closing_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to continue, all choices made.

    Attributes:
        prompt: exact token ids.
        max_tokens: at least 1; prompt and reply fit the context window.
        sampling: values that MLX accepts for this vocabulary.
        boundaries: numbers of prompt tokens at which others may go on, ascending: messages end there.
        known: prompt tokens that stand for messages which were computed before, however they were spelled.
        salt: keeps what different callers computed apart.
        session: requests of one are served one after the other; empty: it is alone.
        is_background: nobody waits in front of a screen for it, as far as its client says.
        top_logprobs: None or 0..20.
        thought: None lets the model think as long as it likes.
        trims_leading_space: the tokenizer marks the start of a text with a space that is not content.
        guide: None lets the model say what it likes.
    """

    prompt: ModelTokens
    max_tokens: int
    sampling: Sampling
    boundaries: tuple[int, ...] = ()
    known: int = 0
    salt: bytes = b""
    session: str = ""
    is_background: bool = False
    top_logprobs: int | None = None
    thought: ThoughtLimit | None = None
    trims_leading_space: bool = False
    guide: Guide | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
