"""Thoughts by the conversation that they were had in, for clients that do not send them back.

Kept beside the session turn store, since a thought is small and its tokens may be gone. A thought belongs to
the whole conversation up to its reply, byte for byte, or to who shows that it was told that reply: "Done."
was thought of in many ways.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from start_llm.core.canonical import CanonicalKey, Conversation
from start_llm.transcripts.guard import Claims

_ENTRY_BYTES = 400
"""About what an entry takes beside its text."""
_MOST_OF_A_REPLY = 8


@dataclass(frozen=True, slots=True)
class Thought:
    """A thought.

    Attributes:
        exact: names the conversation up to the reply, with all that its key leaves out.
        claims: of that reply.
    """

    text: str
    exact: bytes
    claims: Claims

    @property
    def nbytes(self) -> int:
        return _ENTRY_BYTES + len(self.text.encode(errors="surrogatepass"))

    def is_equal(self, conversation: Conversation, index: int) -> bool:
        """It was had behind the very words of this conversation, as far as these are not somebody else's."""
        return self.exact == conversation.exact[index] and not self.claims.is_elsewhere(conversation.name)

    def is_proven(self, conversation: Conversation, index: int, name: str | None) -> bool:
        """A conversation whose name proves so much shows that it was told this reply."""
        return self.claims.are_shown(
            name, conversation.ids[index], sends_thought=False, asked_as=conversation.name
        )


def _without(known: Sequence[Thought], thought: Thought) -> list[Thought]:
    """Those that are not this one, which takes over their claims."""
    same = [one for one in known if (one.text, one.exact) == (thought.text, thought.exact)]
    for one in same:
        thought.claims.add(one.claims)
    return [one for one in known if one not in same]


class ThoughtStore:
    """Safe to use from any thread.

    Args:
        most_bytes: what was used least recently is forgotten first.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._thoughts: OrderedDict[CanonicalKey, list[Thought]] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def keep(self, key: CanonicalKey, thought: Thought) -> None:
        """Remember the thought of the reply that ends this conversation."""
        with self._lock:
            known = self._thoughts.pop(key, [])
            self._nbytes -= sum(one.nbytes for one in known)
            kept = [*_without(known, thought), thought][-_MOST_OF_A_REPLY:]
            self._thoughts[key] = kept
            self._nbytes += sum(one.nbytes for one in kept)
            while self._nbytes > self._most_bytes and self._thoughts:
                _, forgotten = self._thoughts.popitem(last=False)
                self._nbytes -= sum(one.nbytes for one in forgotten)

    def get(self, conversation: Conversation, index: int, name: str | None) -> str | None:
        """The thought of this reply, of several the last; None if none is known to be this conversation's.

        Args:
            name: of the conversation, if that proves anything.
        """
        key = conversation.keys[index]
        with self._lock:
            known = self._thoughts.get(key)
            if known is None:
                return None
            self._thoughts.move_to_end(key)
            equal = (one.text for one in reversed(known) if one.is_equal(conversation, index))
            proven = (one.text for one in reversed(known) if one.is_proven(conversation, index, name))
            return next(chain(equal, proven), None)
