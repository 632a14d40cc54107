"""Stores the reasoning of replies, for clients that do not send it back.

It is separate from the transcript store: reasoning is small, and its tokens may be gone. Stored reasoning
is returned to a conversation that is equal to the original up to the reply, byte for byte, or that proves
that it received the reply. The text of the reply is not enough: many different replies say "Done."
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from start_llm.core.canonical import CanonicalKey, Conversation, reasoning_digest
from start_llm.storage.database import NO_TABLE, DatabaseRow, DatabaseTable
from start_llm.storage.database_file import decode_json, encode_json
from start_llm.transcripts.recorded_details import Claims
from start_llm.transcripts.rows import claims_json, claims_of

_ENTRY_BYTES = 400
"""Approximate size of an entry without its text."""
_MAX_OF_A_REPLY = 8


@dataclass(frozen=True, slots=True)
class RecordedReasoning:
    """The reasoning of one reply.

    Attributes:
        exact: names the conversation up to the reply, including everything that its key leaves out.
        claims: evidence of who received that reply.
    """

    text: str
    exact: bytes
    claims: Claims

    @property
    def nbytes(self) -> int:
        return _ENTRY_BYTES + len(self.text.encode(errors="surrogatepass"))

    def is_equal(self, exact: bytes, name: str | None) -> bool:
        """Return whether a conversation is equal byte for byte, and no other name claims the reply.

        Args:
            name: name that the conversation gives itself.
        """
        return self.exact == exact and not self.claims.from_other_names(name)

    def is_proven(self, conversation: Conversation, index: int, name: str | None) -> bool:
        """Return whether this conversation proves that it received the reply.

        Args:
            name: name of the conversation, if it proves anything.
        """
        return self.claims.proves_receipt(
            name, conversation.messages[index].ids, sends_reasoning=False, asked_as=conversation.name
        )


def _without(known: Sequence[RecordedReasoning], reasoning: RecordedReasoning) -> list[RecordedReasoning]:
    """Return the known entries except those equal to `reasoning`, which takes over their claims."""
    same = [entry for entry in known if (entry.text, entry.exact) == (reasoning.text, reasoning.exact)]
    for entry in same:
        reasoning.claims.add(entry.claims)
    return [entry for entry in known if entry not in same]


def _encode(known: Sequence[RecordedReasoning]) -> bytes:
    return encode_json([(entry.text, entry.exact, claims_json(entry.claims)) for entry in known])


def _decode(row: DatabaseRow) -> list[RecordedReasoning]:
    return [
        RecordedReasoning(text, bytes.fromhex(exact), claims_of(claims))
        for text, exact, claims in decode_json(row.value)
    ]


class ReasoningStore:
    """Reasoning by conversation. Safe to use from any thread.

    Args:
        max_bytes: above it, the least recently used entries are removed.
        table: keeps the entries for the next process.
    """

    def __init__(self, max_bytes: int, *, table: DatabaseTable = NO_TABLE) -> None:
        self._max_bytes = max_bytes
        self._table = table
        self._lock = threading.Lock()
        self._reasoning_texts: OrderedDict[CanonicalKey, list[RecordedReasoning]] = OrderedDict()
        self._nbytes = 0
        for row, known in table.read(_decode):
            self._reasoning_texts[CanonicalKey(row.key)] = known
            self._nbytes += sum(entry.nbytes for entry in known)
        self._forget_some()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def keep(self, key: CanonicalKey, reasoning: RecordedReasoning) -> None:
        """Store the reasoning of the reply that ends the conversation with this key."""
        reasoning = replace(reasoning, claims=reasoning.claims.copy())
        with self._lock:
            known = self._reasoning_texts.pop(key, [])
            self._nbytes -= sum(entry.nbytes for entry in known)
            kept = [*_without(known, reasoning), reasoning][-_MAX_OF_A_REPLY:]
            self._reasoning_texts[key] = kept
            self._nbytes += sum(entry.nbytes for entry in kept)
            self._table.put(key.digest, _encode(kept))
            self._forget_some()

    def _forget_some(self) -> None:
        while self._nbytes > self._max_bytes and self._reasoning_texts:
            key, forgotten = self._reasoning_texts.popitem(last=False)
            self._nbytes -= sum(entry.nbytes for entry in forgotten)
            self._table.delete(key.digest)

    def get(self, conversation: Conversation, index: int, name: str | None) -> str | None:
        """Return the newest reasoning of this reply that belongs to the conversation, or None.

        Args:
            index: index of the reply.
            name: name of the conversation, if it proves anything.
        """
        key = conversation.messages[index].key
        with self._lock:
            known = self._reasoning_texts.get(key)
            if known is None:
                return None
            exact = conversation.messages[index].exact
            equal = (entry.text for entry in reversed(known) if entry.is_equal(exact, conversation.name))
            proven = (entry.text for entry in reversed(known) if entry.is_proven(conversation, index, name))
            return next(chain(equal, proven), None)

    def use(self, keys: Iterable[CanonicalKey]) -> None:
        """Mark the reasoning of these replies as used now."""
        with self._lock:
            for key in keys:
                if key in self._reasoning_texts:
                    self._reasoning_texts.move_to_end(key)
                    self._table.touch(key.digest)

    def is_drawn_behind(
        self, key: CanonicalKey, exact: bytes, name: str | None, reasoning: bytes | None
    ) -> bool:
        """Return whether the model wrote this reasoning behind the very words of a conversation.

        Args:
            key, exact: names of the conversation up to the reply.
            name: name that the conversation gives itself.
            reasoning: its digest.
        """
        with self._lock:
            known = self._reasoning_texts.get(key, ())
            equal = [entry.text for entry in known if entry.is_equal(exact, name)]
        return reasoning in map(reasoning_digest, equal)
