"""Reports on a prompt for a client that asks: where its tokens came from, and why not more were known."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from start_llm.core.prompt import KeptPrefix

type Source = Literal["restored", "read", "told", "unread"]


class PromptRange(NamedTuple):
    """Consecutive tokens of a prompt that came from one place.

    Attributes:
        source: `restored` from memory or disk, or one of the other parts of a `Receipt`.
        start, end: positions of the first token, and behind the last one.
        digest: of the tokens; equal tokens have an equal one.
    """

    source: Source
    start: int
    end: int
    digest: str


def _digest(ids: Sequence[int]) -> str:
    return hashlib.blake2b(array("I", ids).tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Where the tokens of a prompt have come from. Each is counted once.

    Attributes:
        from_memory, from_disk: tokens that were restored from there.
        read_ahead: those of them that were read before this request came.
        read: computed tokens of what the request says.
        note_tokens: computed tokens of a note that tells the model what has changed.
        unread: tokens that were not computed: the last one of a prewarm, and those that a deadline cut off.
        drafted: tokens of the reply, not of the prompt, that a draft had guessed.
        is_kept: the cache keeps what was computed.
        kept: the beginnings that the client asks to keep.
        ids: the tokens of the prompt.
        note: where in the prompt the note is that tells what has changed.
    """

    from_memory: int = 0
    from_disk: int = 0
    read_ahead: int = 0
    read: int = 0
    note_tokens: int = 0
    unread: int = 0
    drafted: int = 0
    is_kept: bool = True
    kept: tuple[KeptPrefix, ...] = ()
    ids: Sequence[int] = field(default=(), repr=False, compare=False)
    note: range = range(0)

    @property
    def ranges(self) -> Iterator[PromptRange]:
        """The stretches of the prompt, each from one place. There is none without tokens."""
        cached, done = self.from_memory + self.from_disk, self.prompt - self.unread
        note = range(max(self.note.start, cached), min(self.note.stop, done))
        ends = [cached, *((note.start, note.stop) if note else ()), done]
        sources: list[Source] = ["restored", *(["read", "told"] if note else []), "read", "unread"]
        for source, (start, end) in zip(sources, pairwise([0, *ends, self.prompt]), strict=True):
            if start < end:
                yield PromptRange(source, start, end, _digest(self.ids[start:end]))

    @property
    def prompt(self) -> int:
        """All tokens of the prompt."""
        return self.from_memory + self.from_disk + self.read + self.note_tokens + self.unread

    @property
    def written(self) -> int:
        """Tokens of the prompt that were added to the cache."""
        return self.read + self.note_tokens if self.is_kept else 0


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a request leaves the earlier one that its client names, so that tokens are read again.

    Attributes:
        place: what differs first, in this order; `other`: options, or what the template makes of earlier
            messages; `unknown`: nothing is known of the earlier request.
        missed: tokens that are computed and would not be if nothing differed.
    """

    place: Literal["model", "system", "tools", "messages", "other", "unknown"]
    missed: int = 0
