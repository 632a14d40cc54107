"""Remembers the last computed request of each conversation, to explain how the next one differs.

In memory only: after a restart nothing is explained until a conversation was computed once more.
"""

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.canonical import CanonicalMessage, Conversation
from start_llm.core.prompt import Boundary
from start_llm.transcripts.recorded_details import Claims

_MAX_OF_A_SESSION = 4
_MOST = 32
_MAX_BYTES = 32 * 2**20
_TOKEN_BYTES = 4
_MESSAGE_BYTES = 300
"""Approximate size of a message without its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedRequest:
    """A request as it was computed, with its reply if there is one.

    Attributes:
        ids: tokens of the prompt and the reply.
        boundaries: ends of messages in the prompt.
        reasoning_digests: digest of the reasoning in the tokens of each message, the reply last.
        note_tokens: for each message the number of tokens of its notes.
        reply: the forms in which clients may send the reply back; empty if there is none.
        claims: evidence of who received the reply.
    """

    conversation: Conversation
    ids: array[int]
    boundaries: Sequence[Boundary]
    reasoning_digests: Sequence[bytes | None]
    note_tokens: Sequence[int]
    reply: Sequence[CanonicalMessage] = ()
    claims: Claims | None = None

    def is_of(self, conversation: Conversation, name: str | None) -> bool:
        """Return whether this was computed for the given conversation.

        It was if both have the same name and that name proves something, if the conversation contains it byte
        for byte, its reply included, and their names do not differ, or if the conversation proves that it
        received the reply.

        Args:
            name: name of the conversation, if it proves anything.
        """
        if name is not None and name == self.conversation.name:
            return True
        names = (conversation.name, self.conversation.name)
        from_other_names = None not in names and len({*names}) > 1
        if not from_other_names and self._is_contained_in(conversation):
            return True
        if self.claims is None:
            return False
        sent = [message.ids for message in conversation.messages if message.canonical in self.reply]
        return any(
            self.claims.proves_receipt(name, ids, sends_reasoning=False, asked_as=conversation.name)
            for ids in sent
        )

    def _is_contained_in(self, conversation: Conversation) -> bool:
        """Return whether the conversation says all of this byte for byte, transient messages included."""
        last = len(self.conversation.messages) - 1
        return (
            last < len(conversation.messages)
            and conversation.messages[last].exact == self.conversation.messages[last].exact
            and self.conversation.transient in ((), conversation.transient)
            and self.is_answered_in(conversation)
        )

    def is_answered_in(self, conversation: Conversation) -> bool:
        """Return whether this reply is what a conversation has after these messages, if it has anything."""
        following = conversation.messages[len(self.conversation.messages) :][:1]
        return not self.reply or all(
            message.canonical in self.reply and message.echoed in (None, *self.reasoning_digests[-1:])
            for message in following
        )

    @property
    def messages(self) -> int:
        return len(self.conversation.messages) + bool(self.reply)

    @property
    def nbytes(self) -> int:
        message_bytes = sum(_MESSAGE_BYTES + len(message.data) for message in self.conversation.canonical)
        return _TOKEN_BYTES * len(self.ids) + message_bytes


class RecentConversations:
    """The requests computed last: up to 4 of a session (titles, sub-agents), 32 and 32 MiB in all.

    Safe to use from any thread.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._computed: list[ComputedRequest] = []
        self._lock = threading.Lock()

    def note(self, computed: ComputedRequest, instead_of: ComputedRequest | None = None) -> None:
        """Add a request. It replaces `instead_of` and the requests that it continues."""
        with self._lock:
            self._computed = [
                old for old in self._computed if old is not instead_of and not _goes_on(computed, old)
            ]
            self._computed.append(computed)
            self._forget_some(computed)

    def _forget_some(self, newest: ComputedRequest) -> None:
        of_session = [old for old in self._computed if _is_one_session(old, newest.conversation)]
        for old in of_session[:-_MAX_OF_A_SESSION]:
            self._computed.remove(old)
        total = sum(request.nbytes for request in self._computed)
        while len(self._computed) > 1 and (len(self._computed) > _MOST or total > self._max_bytes):
            total -= self._computed.pop(0).nbytes

    def nearest(self, conversation: Conversation, name: str | None) -> ComputedRequest | None:
        """Return the request of this conversation that shares most messages with it, or None.

        Requests of the same session are preferred; of equal ones the newest is returned.

        Args:
            name: name of the conversation, if it proves anything.
        """
        with self._lock:
            of_tenant = [old for old in self._computed if old.conversation.tenant == conversation.tenant]
        mine = [old for old in of_tenant if old.is_of(conversation, name)]
        same = [old for old in mine if _is_one_session(old, conversation)]
        ranked = [(_alike(old, conversation), place, old) for place, old in enumerate(same or mine)]
        alike, _, best = max(ranked, default=(0, 0, None), key=lambda candidate: candidate[:2])
        return best if alike or same else None


def _goes_on(newer: ComputedRequest, older: ComputedRequest) -> bool:
    """Return whether `newer` continues `older`, its reply included, or repeats it, in the same session."""
    length = len(older.conversation.messages)
    if not _is_one_session(older, newer.conversation):
        return False
    if newer.conversation.keys[:length] != older.conversation.keys:
        return False
    if len(newer.conversation.messages) > length:
        return older.is_answered_in(newer.conversation)
    return not older.reply or any(reply in older.reply for reply in newer.reply)


def _is_one_session(request: ComputedRequest, conversation: Conversation) -> bool:
    """Return whether both have the same session id from the same tenant."""
    mine = request.conversation
    return (mine.tenant, mine.session) == (conversation.tenant, conversation.session)


def _alike(request: ComputedRequest, conversation: Conversation) -> int:
    """Return the number of messages that are equal at the same index, the reply included."""
    pairs = zip(request.conversation.canonical, conversation.canonical, strict=False)
    answered = conversation.canonical[len(request.conversation.messages) :][:1]
    return sum(old == new for old, new in pairs) + any(reply in request.reply for reply in answered)
