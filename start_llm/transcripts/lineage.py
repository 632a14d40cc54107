"""Whose a reply is, where conversations differ in nothing but what tells of one project or chat."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from start_llm.core.canonical import CanonicalKey, text_digest
from start_llm.transcripts.drift import Told, blocks

_MOST_REPLIES = 16_000
_SEVERAL = b""


class Lineages:
    """For each reply the blocks that it was written behind. Safe to use from any thread.

    Two chats with the same words may get the same reply. When a client sends that back with a block that
    nobody has seen, it cannot be told whose it is.

    Args:
        most_replies: those noted least recently are forgotten first.
    """

    def __init__(self, most_replies: int = _MOST_REPLIES) -> None:
        self._most_replies = most_replies
        self._blocks: dict[CanonicalKey, bytes] = {}
        self._lock = threading.Lock()

    def note(self, reply: CanonicalKey, live: Iterable[Sequence[Told]]) -> None:
        """A reply was written behind messages that say this."""
        name = _name(live)
        with self._lock:
            known = self._blocks.pop(reply, name)
            self._blocks[reply] = name if known == name else _SEVERAL
            while len(self._blocks) > self._most_replies:
                del self._blocks[next(iter(self._blocks))]

    def is_only(self, reply: CanonicalKey, live: Iterable[Sequence[Told]]) -> bool:
        """It was written behind these, and never behind others."""
        with self._lock:
            return self._blocks.get(reply) == _name(live)


def _name(live: Iterable[Sequence[Told]]) -> bytes:
    return text_digest(repr(sorted(blocks(live).items())))
