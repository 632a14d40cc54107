"""Tells where a request leaves the one that its client compares it with, and what that costs."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.canonical import Conversation, MessageRecord
from start_llm.core.common_beginning import common_length
from start_llm.core.prompt import Boundary
from start_llm.core.prompt_report import Divergence
from start_llm.transcripts.recent import ComputedRequest

_MOST = 256
_MAX_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request that was answered.

    Attributes:
        model: which model and which adapters have answered it.
    """

    model: str
    computed: ComputedRequest


class AnsweredRequests:
    """The requests that were answered last, by whose they were and the random names of their replies.

    Of all models of a server: up to 256 and 32 MiB. Safe to use from any thread.
    """

    def __init__(self, most: int = _MOST, max_bytes: int = _MAX_BYTES) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._answered: OrderedDict[tuple[bytes, str], AnsweredRequest] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def note(self, tenant: bytes, reply_name: str, answered: AnsweredRequest) -> None:
        """Remember a request, in place of what was known of it. The oldest ones are forgotten for it."""
        with self._lock:
            before = self._answered.pop((tenant, reply_name), None)
            self._answered[tenant, reply_name] = answered
            self._nbytes += answered.computed.nbytes - (before.computed.nbytes if before else 0)
            while len(self._answered) > 1 and (
                len(self._answered) > self._most or self._nbytes > self._max_bytes
            ):
                _, oldest = self._answered.popitem(last=False)
                self._nbytes -= oldest.computed.nbytes

    def find(self, tenant: bytes, reply_name: str) -> AnsweredRequest | None:
        """Return the request of this tenant that the reply answers; None if it is not known."""
        with self._lock:
            return self._answered.get((tenant, reply_name))


def diverges(
    before: AnsweredRequest, model: str, asked: Conversation, ids: Sequence[int], end: int
) -> Divergence | None:
    """Return where a request leaves an earlier one; None if it goes on from it, or begins like it.

    Args:
        model: which model and which adapters answer it.
        ids: the tokens that the model will read.
        end: how many of them an earlier request may have computed: those of messages, up to a note.
    """
    is_one_model = before.model == model
    shared = common_length(before.computed.ids, array("I", ids)) if is_one_model else 0
    missed = min(_end_of(before.computed), end) - shared
    if missed <= 0:
        return None
    return _where(before.computed, asked, missed) if is_one_model else Divergence("model", missed)


def _where(before: ComputedRequest, asked: Conversation, missed: int) -> Divergence:
    old_system, old_messages = _parted(before.conversation)
    new_system, new_messages = _parted(asked)
    if not _is_same(old_system, new_system):
        return Divergence("system", missed)
    if before.conversation.root.tools != asked.root.tools:
        return Divergence("tools", missed)
    pairs = zip(old_messages, new_messages, strict=False)
    is_appended = len(old_messages) <= len(new_messages) and all(_is_same(*pair) for pair in pairs)
    if not is_appended or before.conversation.transient != asked.transient or not _has_reply(before, asked):
        return Divergence("messages", missed)
    return Divergence("other", missed)


def _parted(conversation: Conversation) -> tuple[MessageRecord | None, Sequence[MessageRecord]]:
    """Return the system text at the beginning, if there is one, and the other messages."""
    first, *others = conversation.messages
    return (first, others) if first.role == "system" else (None, conversation.messages)


def _is_same(old: MessageRecord | None, new: MessageRecord | None) -> bool:
    if old is None or new is None:
        return old is new
    return (old.canonical, old.omitted, old.echoed) == (new.canonical, new.omitted, new.echoed)


def _has_reply(before: ComputedRequest, asked: Conversation) -> bool:
    """Return whether the earlier reply follows, if anything does."""
    following = asked.canonical[len(before.conversation.messages) :][:1]
    return not before.reply or all(message in before.reply for message in following)


def _end_of(computed: ComputedRequest) -> int:
    """Return the end of what the next request can go on from.

    A reply may end with a token that the next rendering writes otherwise (`transcripts.written_reply`). What
    follows the last message of a prompt without a reply is its generation prompt.
    """
    return len(computed.ids) - 1 if computed.reply else last_end(computed.boundaries)


def last_end(boundaries: Sequence[Boundary]) -> int:
    """Return the number of tokens up to the end of the last message whose end is known."""
    return boundaries[-1].tokens if boundaries else 0
