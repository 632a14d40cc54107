"""Count where the tokens of one request's prompt come from."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from start_llm.core.events import Event, Prefilling, Restored, Text
from start_llm.core.prompt import KeptPrefix
from start_llm.core.prompt_report import Divergence, Receipt


@dataclass(eq=False)
class PromptAccount:
    """Follows the events of one request. Owned by its HTTP thread.

    Attributes:
        ids: the tokens of the prompt.
        added: where in the prompt the note is that this request adds; empty if it adds none.
        divergence: where it leaves the request that its client compares it with.
        kept: the beginnings that its client asks to keep.
        find_read_ahead: returns how many of so many restored tokens were read before the request came.
    """

    ids: Sequence[int]
    added: range
    divergence: Divergence | None = None
    kept: tuple[KeptPrefix, ...] = ()
    find_read_ahead: Callable[[int], int] = lambda _: 0
    _restored: Restored = field(default_factory=lambda: Restored(0))
    _done: int = 0
    _drafted: int = 0

    @cached_property
    def read_ahead(self) -> int:
        """Restored tokens that were read before the request came. Asked once, when all are restored."""
        return self.find_read_ahead(self.cached)

    @property
    def cached(self) -> int:
        """Tokens that need no computing."""
        return self._restored.tokens

    def note(self, event: Event) -> None:
        """Take the next event of the engine into account."""
        match event:
            case Restored():
                self._restored, self._done = event, event.tokens
            case Prefilling():
                self._done = max(self._done, event.done)  # what was evicted meanwhile is computed again
            case Text():
                self._done = len(self.ids)
                self._drafted += event.drafted
            case _:
                pass

    def progress(self) -> Prefilling:
        """Return how much of the prompt has been read."""
        seconds = time.perf_counter() - self._restored.at
        return Prefilling(self._done, len(self.ids), cached=self.cached, seconds=seconds)

    def receipt(self) -> Receipt:
        """Return where the tokens have come from so far."""
        cached, from_disk = self.cached, min(self._restored.disk_tokens, self.cached)
        note_tokens = max(min(self._done, self.added.stop) - max(cached, self.added.start), 0)
        return Receipt(
            from_memory=cached - from_disk,
            from_disk=from_disk,
            read_ahead=self.read_ahead,
            read=self._done - cached - note_tokens,
            note_tokens=note_tokens,
            unread=len(self.ids) - self._done,
            drafted=self._drafted,
            is_kept=self._restored.miss != "off",
            kept=self.kept,
            ids=self.ids,
            note=self.added,
        )
