"""What is recorded beside tokens: what they say that their key leaves out, and evidence of whose they are.

`transcripts.guard` judges by it who may go on from the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from start_llm.core.canonical import Field, OmittedText

type NotedValue = tuple[Field, str | None]
"""A field and the value that a note gave for it; None: the note said that the field no longer applies."""

_CERTAIN_BITS = 64.0
"""Surprisal in bits from which a reply counts as a proof: nobody else samples the same reply by accident."""
_MAX_CLAIMS = 64


class MessageDetails(NamedTuple):
    """Values of a message in recorded tokens that its key leaves out.

    Attributes:
        omitted: the omitted texts as the tokens have them.
        reasoning: digest of the reasoning in the tokens.
        is_ours: the model wrote that reasoning, behind these very tokens; if false, a client sent it, the
            model read transient messages in front of it, or a proof restored it behind other words.
        noted: values that notes after the message tell.
        note_tokens: number of tokens of those notes.
    """

    omitted: tuple[OmittedText, ...]
    reasoning: bytes | None = None
    is_ours: bool = False
    noted: tuple[NotedValue, ...] = ()
    note_tokens: int = 0


@dataclass(slots=True)
class Claims:
    """Evidence of whose tokens these are.

    Attributes:
        names: names of the conversations that computed them.
        is_delivered: they end with a reply that was generated here for a client, which may send it back. They
            are recorded once it was sent.
        ids: random names that were made for the reply and its calls.
        reply_surprisal_bits, reasoning_surprisal_bits: surprisal in bits of the visible reply and of its
            reasoning.
    """

    names: dict[str, None] = field(default_factory=dict[str, None])
    is_delivered: bool = False
    ids: dict[str, None] = field(default_factory=dict[str, None])
    reply_surprisal_bits: float = 0.0
    reasoning_surprisal_bits: float = 0.0

    def copy(self) -> Claims:
        """Return the same claims, to be changed on their own."""
        return replace(self, names=dict(self.names), ids=dict(self.ids))

    def add(self, others: Claims) -> None:
        """Add the claims of another computation of the same tokens. Keep the newest 64 names and ids."""
        self.is_delivered |= others.is_delivered
        for mine, new in ((self.names, others.names), (self.ids, others.ids)):
            mine.update(new)
            while len(mine) > _MAX_CLAIMS:
                del mine[next(iter(mine))]
        self.reply_surprisal_bits = max(self.reply_surprisal_bits, others.reply_surprisal_bits)
        self.reasoning_surprisal_bits = max(self.reasoning_surprisal_bits, others.reasoning_surprisal_bits)

    def from_other_names(self, name: str | None) -> bool:
        """Return whether only conversations of other names computed these tokens.

        A reply that is equal to theirs is then an accident.
        """
        return name is not None and bool(self.names) and name not in self.names

    def proves_receipt(
        self, name: str | None, ids: Iterable[str], *, sends_reasoning: bool, asked_as: str | None
    ) -> bool:
        """Return whether a conversation that sends this reply proves that it received it.

        Args:
            name: name of the conversation, if it proves anything.
            ids: ids that the conversation sends with the reply.
            sends_reasoning: the conversation sends the reply's reasoning too.
            asked_as: name that the conversation gives itself, whether or not it proves anything.
        """
        if (name is not None and name in self.names) or not self.ids.keys().isdisjoint(ids):
            return True
        bits = self.reply_surprisal_bits + (self.reasoning_surprisal_bits if sends_reasoning else 0)
        return bits >= _CERTAIN_BITS and not self.from_other_names(asked_as)


class RecordedDetails(Protocol):
    """Recorded tokens up to the end of a message, as a link of a chain."""

    @property
    def depth(self) -> int: ...
    @property
    def parent(self) -> RecordedDetails | None: ...
    @property
    def details(self) -> Sequence[MessageDetails]: ...
    @property
    def claims(self) -> Claims: ...
