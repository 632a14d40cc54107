"""What was computed last of each conversation, so that it can be said where the next request differs."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.canonical import CanonicalMessage, Conversation
from start_llm.core.prompt import Boundary
from start_llm.transcripts.guard import Claims

_MOST_OF_A_SESSION = 4
_MOST = 32
_MOST_BYTES = 32 * 2**20
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A request as it was computed, and its reply if there is one.

    Attributes:
        ids: of the prompt and the reply.
        boundaries: of the prompt.
        thoughts: digests of those that the tokens hold, for each message, that of the reply last.
        noted: tokens of notes in each message.
        reply: it as clients may send it back; empty: there is none.
        claims: of the reply.
    """

    conversation: Conversation
    ids: array[int]
    boundaries: Sequence[Boundary]
    thoughts: Sequence[bytes | None]
    noted: Sequence[int]
    reply: Sequence[CanonicalMessage] = ()
    claims: Claims | None = None

    def is_of(self, conversation: Conversation, name: str | None) -> bool:
        """Whether a conversation whose name proves so much was told this, or says all of it itself."""
        if name is not None and name == self.conversation.name:
            return True
        last, names = len(self.conversation.keys) - 1, (conversation.name, self.conversation.name)
        is_elsewhere = None not in names and len({*names}) > 1
        if (
            not is_elsewhere
            and last < len(conversation.exact)
            and conversation.exact[last] == self.conversation.exact[last]
        ):
            return True
        if self.claims is None:
            return False
        sent = [
            ids
            for ids, message in zip(conversation.ids, conversation.messages, strict=True)
            if message in self.reply
        ]
        return any(
            self.claims.are_shown(name, ids, sends_thought=False, asked_as=conversation.name) for ids in sent
        )

    @property
    def messages(self) -> int:
        return len(self.conversation.messages) + bool(self.reply)

    @property
    def nbytes(self) -> int:
        said = sum(len(message.data) for message in self.conversation.messages)
        return _TOKEN_BYTES * len(self.ids) + said


class RecentConversations:
    """Safe to use from any thread. Several conversations may share a session: titles, sub-agents."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._computed: list[Computed] = []
        self._lock = threading.Lock()

    def note(self, computed: Computed, instead_of: Computed | None = None) -> None:
        """The newest; it takes the place of what it goes on from."""
        with self._lock:
            self._computed = [
                one for one in self._computed if one is not instead_of and not _goes_on(computed, one)
            ]
            self._computed.append(computed)
            self._forget_some(computed)

    def _forget_some(self, newest: Computed) -> None:
        of_session = [one for one in self._computed if _is_one_session(one, newest.conversation)]
        for one in of_session[:-_MOST_OF_A_SESSION]:
            self._computed.remove(one)
        total = sum(one.nbytes for one in self._computed)
        while len(self._computed) > 1 and (len(self._computed) > _MOST or total > self._most_bytes):
            total -= self._computed.pop(0).nbytes

    def nearest(self, conversation: Conversation, name: str | None) -> Computed | None:
        """Of those that are known to be this conversation's the one that has most of its messages.

        Args:
            name: of the conversation, if that proves anything.
        """
        with self._lock:
            of_tenant = [one for one in self._computed if one.conversation.tenant == conversation.tenant]
        mine = [one for one in of_tenant if one.is_of(conversation, name)]
        same = [one for one in mine if _is_one_session(one, conversation)]
        ranked = [(_alike(one, conversation), place, one) for place, one in enumerate(same or mine)]
        alike, _, best = max(ranked, default=(0, 0, None), key=lambda found: found[:2])
        return best if alike or same else None


def _goes_on(newer: Computed, older: Computed) -> bool:
    """The newer one has all messages of the older one, and in the same words."""
    return (
        _is_one_session(older, newer.conversation)
        and newer.conversation.tenant == older.conversation.tenant
        and newer.messages >= older.messages
        and newer.conversation.keys[: len(older.conversation.keys)] == older.conversation.keys
    )


def _is_one_session(one: Computed, conversation: Conversation) -> bool:
    return one.conversation.session == conversation.session


def _alike(one: Computed, conversation: Conversation) -> int:
    """In how many places both say the same."""
    pairs = zip(one.conversation.messages, conversation.messages, strict=False)
    answered = conversation.messages[len(one.conversation.messages) :][:1]
    return sum(said == asked for said, asked in pairs) + any(said in one.reply for said in answered)
