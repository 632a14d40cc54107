"""Which sequences there is memory for: now, later, or never."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from start_llm.core.job import Job
from start_llm.engine.cost import RowCost
from start_llm.engine.row import Row

_REPLY = 1024
"""Tokens of a reply for which there has to be memory before it begins: its limit is no plan."""
_ANY = 2**62


@dataclass(frozen=True, slots=True)
class Admission:
    """Memory for running rows.

    Attributes:
        usable_bytes: what weights and computing leave.
        cost: of a row.
    """

    usable_bytes: int = _ANY
    cost: RowCost = field(default_factory=RowCost)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that there is memory for, if it is alone."""
        return self.cost.tokens_in(self.usable_bytes)

    def has_room(self, rows: Sequence[Row], job: Job, tokens: int) -> bool:
        """Whether a sequence of so many tokens can run beside these rows.

        One alone always can: `longest` has let it in.
        """
        if not rows:
            return True
        planned = [max(planned_tokens(row.generation.job, len(row.tokens)), row.width) for row in rows]
        return self.holds([*planned, planned_tokens(job, tokens)])

    def holds(self, lengths: Iterable[int]) -> bool:
        """Whether there is memory for sequences of these lengths, in tokens."""
        return self.held(lengths) <= self.usable_bytes

    def held(self, lengths: Iterable[int]) -> int:
        """Bytes of what sequences of these lengths, in tokens, have computed."""
        return sum(self.cost.bytes_of(tokens) for tokens in lengths)


def planned_tokens(job: Job, tokens: int) -> int:
    """Tokens for which a sequence that has so many needs memory before it begins."""
    return min(len(job.prompt) + job.max_tokens, tokens + _REPLY)
