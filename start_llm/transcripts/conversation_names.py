"""The names that clients give their conversations, and which of them prove whose recorded tokens are."""

from __future__ import annotations

import threading
from typing import NamedTuple

from start_llm.core.canonical import CanonicalKey, Conversation, text_digest
from start_llm.storage.database import NO_TABLE, DatabaseRow, DatabaseTable
from start_llm.storage.database_file import decode_json, encode_json

_MAX_BEGINNINGS = 32_000
_NOTHING_PROVEN = -1
_OF_SEVERAL = b""
"""In the database, a beginning of several conversations."""
_ANY = CanonicalKey(b"")
"""In place of the beginnings of several conversations under a name: whatever begins so, it proves nothing."""

type _Beginning = tuple[str, CanonicalKey]
"""A name, and the key of what a conversation begins with."""


class _UnprovenPart(NamedTuple):
    """The part of a conversation after its last proven message.

    Attributes:
        proven: index of the last message that is proven to be its own.
        digests: depth and digest of each omitted text after it, without clocks and white space; where nothing
            is proven, of the transient messages too, with depth 0: the next request will not have them, but
            nothing else may tell two conversations apart that begin with the same words.
    """

    proven: int
    digests: frozenset[tuple[int, bytes]]

    @classmethod
    def of(cls, conversation: Conversation, proven: int) -> _UnprovenPart:
        digests = {
            (depth, text_digest(repr(text)))
            for depth, message in enumerate(conversation.messages[proven + 1 :], proven + 1)
            for text in message.omitted
            if text.kind != "space" and not text.is_clock
        }
        if proven == _NOTHING_PROVEN:
            digests |= {(0, message.digest) for message in conversation.transient}
        return cls(proven, frozenset(digests))

    @classmethod
    def decode(cls, data: bytes) -> _UnprovenPart:
        """Read what `encode` has written."""
        proven, digests = decode_json(data)
        return cls(proven, frozenset((depth, bytes.fromhex(digest)) for depth, digest in digests))

    def encode(self) -> bytes:
        """Return it as a value of a database row."""
        return encode_json((self.proven, sorted(self.digests)))

    def is_one_with(self, other: _UnprovenPart) -> bool:
        """Return whether both say the same in the messages that neither has proven."""
        proven = max(self.proven, other.proven)
        mine, others = (
            {(depth, digest) for depth, digest in part.digests if depth > proven} for part in (self, other)
        )
        return mine == others


class ConversationNames:
    """Knows which conversation names stand for a single conversation. Safe to use from any thread.

    A client may give all its conversations the same name. This shows when two conversations of one name have
    equal keys, but differ in what the keys leave out. From then on the name proves nothing for conversations
    with that beginning. That is never forgotten: where there is no more room for it, the name proves nothing
    at all; where so many names mean several, none does.

    Args:
        most: number of beginnings that are remembered, and of those of several conversations beside them.
        table: keeps them for the next process.
    """

    def __init__(self, most: int = _MAX_BEGINNINGS, *, table: DatabaseTable = NO_TABLE) -> None:
        self._most = most
        self._table = table
        self._begun: dict[_Beginning, _UnprovenPart] = {}
        self._of_several: dict[str, set[CanonicalKey]] = {}
        self._lock = threading.Lock()
        for _, ((name, key), begun) in table.read(_decoded):
            if begun is None:
                self._of_several.setdefault(name, set()).add(key)
            else:
                self._begun[name, key] = begun
        self._forget_beginnings()
        self._merge_marks()

    def note(self, conversation: Conversation, proven: int) -> None:
        """Note an answered conversation whose messages up to index `proven` are proven to be its own."""
        if conversation.name is None:
            return
        beginning = conversation.name, conversation.messages[-1].key
        begun = _UnprovenPart.of(conversation, proven)
        with self._lock:
            if self._is_of_several(*beginning):
                return
            known = self._begun.pop(beginning, begun)
            if known.is_one_with(begun):
                self._begun[beginning] = known
                self._table.put(_row_key(beginning), known.encode())
                self._forget_beginnings()
            else:
                self._mark(beginning)
                self._merge_marks()

    def _is_of_several(self, name: str, *keys: CanonicalKey) -> bool:
        """Return whether a name is known to mean several conversations that begin with one of these keys."""
        if len(self._of_several) > self._most:
            return True
        return not self._of_several.get(name, frozenset()).isdisjoint((*keys, _ANY))

    def _mark(self, beginning: _Beginning) -> None:
        """Remember that several conversations of one name begin so."""
        name, key = beginning
        self._of_several.setdefault(name, set()).add(key)
        self._table.put(_row_key(beginning), _OF_SEVERAL)

    def _forget_beginnings(self) -> None:
        while len(self._begun) > self._most:
            oldest = next(iter(self._begun))
            del self._begun[oldest]
            self._table.delete(_row_key(oldest))

    def _merge_marks(self) -> None:
        """Where there are too many beginnings of several conversations, have names prove nothing at all."""
        while sum(map(len, self._of_several.values())) > max(self._most, len(self._of_several)):
            name = max(self._of_several, key=lambda name: len(self._of_several[name]))
            for key in self._of_several.pop(name):
                self._table.delete(_row_key((name, key)))
            self._mark((name, _ANY))

    def proving(self, conversation: Conversation) -> str | None:
        """Return the conversation's name if, as far as is known, it stands for this conversation alone."""
        name = conversation.name
        if name is None:
            return None
        with self._lock:
            return None if self._is_of_several(name, *conversation.keys) else name


def _decoded(row: DatabaseRow) -> tuple[_Beginning, _UnprovenPart | None]:
    name, digest = decode_json(row.key)
    if not isinstance(name, str):
        raise TypeError("a name is a text")
    begun = None if row.value == _OF_SEVERAL else _UnprovenPart.decode(row.value)
    return (name, CanonicalKey(bytes.fromhex(digest))), begun


def _row_key(beginning: _Beginning) -> bytes:
    name, key = beginning
    return encode_json((name, key.digest))
