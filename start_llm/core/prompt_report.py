"""What a client that asks is told of a prompt: where its tokens came from, and why not more were known."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Where the tokens of a prompt have come from. Each is counted once.

    Attributes:
        from_memory, from_disk: tokens that were restored from there.
        read: computed tokens of what the request says.
        note_tokens: computed tokens of a note that tells the model what has changed.
        unread: tokens that were not computed: the last one of a prewarm, and those that a deadline cut off.
        drafted: tokens of the reply, not of the prompt, that a draft had guessed.
        is_kept: the cache keeps what was computed.
    """

    from_memory: int = 0
    from_disk: int = 0
    read: int = 0
    note_tokens: int = 0
    unread: int = 0
    drafted: int = 0
    is_kept: bool = True

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
