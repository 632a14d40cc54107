"""Remembers scanned conversations, so that only the new messages of a conversation are scanned.

The scan of a message depends on earlier messages only through their calls and results, and through whether an
earlier message has its role. As long as those are the same, the scan stays valid, even if an earlier message
changes: a system text with another date.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq
from typing import NamedTuple

from start_llm.core.canonical import CanonicalKey, chain
from start_llm.core.chat import Json, Message, ToolCall
from start_llm.prompt.call_ids import Calls, concerns_calls
from start_llm.prompt.scan import MessageScan, ScanRules, names_of, scan_messages

_MAX_CONVERSATIONS = 16
_MAX_BYTES = 32 * 2**20
_MESSAGE_BYTES = 1000
"""Approximate size of what is kept of a message, without its text."""
_MAX_OTHERS = 16
"""Number of changed messages above which it is another conversation."""


type _Tools = Sequence[Mapping[str, Json]]
type _Fields = tuple[str | tuple[str, ...] | None, ...]

_FIELDS = attrgetter("content", "role", "reasoning", "tool_call_id", "tool_references", "name", "reply_name")
"""Everything in a message except its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationScan:
    """A scanned conversation or the beginning of one.

    Attributes:
        sent: its messages as the client sent them.
        names: for each message the random names in it (`scan.names_of`).
        scans: those of the messages in native form, with results in the order of their calls.
        root: key of the root, from which `keys` are chained.
    """

    sent: Sequence[Message]
    names: Sequence[frozenset[str]]
    scans: Sequence[MessageScan]
    calls: Calls
    root: CanonicalKey
    keys: Sequence[CanonicalKey]


class _Known(NamedTuple):
    """A remembered conversation, with the fields of its messages except their calls."""

    beginning: ConversationScan
    fields: Sequence[_Fields]
    nbytes: int


class RememberedConversations:
    """Scans conversations and remembers the last ones. Safe to use from any thread."""

    def __init__(self, rules: ScanRules) -> None:
        self._rules = rules
        self._nothing = ConversationScan(
            sent=(), names=(), scans=(), calls=Calls(rules.call_ids), root=CanonicalKey(b""), keys=()
        )
        self._known: list[_Known] = []
        self._lock = threading.Lock()
        self.scanned_messages = 0
        """Number of messages that were scanned, not remembered."""

    def scan(self, sent: Sequence[Message], late_tools: _Tools, root: CanonicalKey) -> ConversationScan:
        """Scan a conversation.

        Args:
            sent: its messages as the client sent them.
            root: key of the root, from which the keys are chained.
        """
        fields: list[_Fields] = list(map(_FIELDS, sent))
        known, known_fields = self._nearest(fields)
        same, others = _shared(known.sent, sent, list(map(eq, known_fields, fields)))
        calls = self._calls_of(known, same)
        scans = list(known.scans[:same])
        anew = {index: scans[index].native for index in _referring(scans)}
        anew |= {index: sent[index] for index in others}
        for index, native in anew.items():
            (scans[index],) = self._scans([native], late_tools, sent[:index])
        scans += self._scans(calls.in_native_form(sent[same:]), late_tools, sent[:same])
        scan = ConversationScan(
            sent=sent,
            names=_names(known, sent, same, others),
            scans=scans,
            calls=calls,
            root=root,
            keys=_keys(known, scans, root),
        )
        self._keep(scan, fields, instead_of=known if same == len(known.sent) else None)
        return scan

    def _nearest(self, fields: Sequence[_Fields]) -> tuple[ConversationScan, Sequence[_Fields]]:
        """Return the newest remembered conversation with the most equal messages by index."""
        with self._lock:
            known = self._known[::-1]
        nearest = max(known, key=lambda conversation: sum(map(eq, conversation.fields, fields)), default=None)
        return (nearest.beginning, nearest.fields) if nearest else (self._nothing, ())

    def _keep(
        self, scan: ConversationScan, fields: Sequence[_Fields], instead_of: ConversationScan | None
    ) -> None:
        nbytes = sum(_MESSAGE_BYTES + len(message.canonical.data) for message in scan.scans)
        with self._lock:
            self._known = [
                conversation for conversation in self._known if conversation.beginning is not instead_of
            ]
            self._known.append(_Known(scan, fields, nbytes))
            total = sum(conversation.nbytes for conversation in self._known)
            while len(self._known) > _MAX_CONVERSATIONS or total > _MAX_BYTES:
                total -= self._known.pop(0).nbytes

    def _calls_of(self, known: ConversationScan, count: int) -> Calls:
        """Return the calls of the first `count` messages."""
        if count == len(known.sent):
            return known.calls.copy()
        calls = Calls(self._rules.call_ids)
        calls.in_native_form(known.sent[:count])
        return calls

    def _scans(
        self, native: Sequence[Message], late_tools: _Tools, before: Sequence[Message]
    ) -> Sequence[MessageScan]:
        with self._lock:
            self.scanned_messages += len(native)
        return scan_messages(native, self._rules, late_tools, {message.role for message in before})


def _referring(scans: Sequence[MessageScan]) -> list[int]:
    """Return the indices of messages that refer to late tools: another request may have other schemas."""
    return [index for index, scan in enumerate(scans) if scan.native.tool_references]


def _names(
    known: ConversationScan, sent: Sequence[Message], same: int, others: Sequence[int]
) -> Sequence[frozenset[str]]:
    names = [*known.names[:same], *map(names_of, sent[same:])]
    for index in others:
        names[index] = names_of(sent[index])
    return names


def _keys(
    known: ConversationScan, scans: Sequence[MessageScan], root: CanonicalKey
) -> Sequence[CanonicalKey]:
    """Reuse the known keys up to the first message whose canonical form differs, and compute the others."""
    pairs = enumerate(zip(known.scans, scans, strict=False))
    least = min(len(known.scans), len(scans))
    same = next((at for at, (was, now) in pairs if was is not now and was.canonical != now.canonical), least)
    begun = known.keys[:same] if known.root == root else ()
    anew = (scan.canonical for scan in scans[len(begun) :])
    return [*begun, *chain(begun[-1] if begun else root, anew)]


def _shared(
    known: Sequence[Message], sent: Sequence[Message], says_same: Sequence[bool]
) -> tuple[int, list[int]]:
    """Return how long the known beginning is, and the indices of changed messages in it.

    The beginning ends with an unchanged message. Neighbouring results are in the order of their calls, so a
    run of results is reused as a whole or not at all.

    Args:
        says_same: for each message, whether both say the same beside their calls.
    """
    same, others = 0, list[int]()
    for index, is_alike in enumerate(says_same):
        was, now = known[index], sent[index]
        if is_alike and (not (was.tool_calls or now.tool_calls) or _are_called_alike(was, now)):
            same = index + 1
        elif len(others) < _MAX_OTHERS and _may_differ(was, now):
            others.append(index)
        else:
            break
    while _is_result(sent, same - 1) and (_is_result(known, same) or _is_result(sent, same)):
        same -= 1
    return same, [index for index in others if index < same]


def _is_result(messages: Sequence[Message], index: int) -> bool:
    return 0 <= index < len(messages) and messages[index].role == "tool"


def _may_differ(was: Message, now: Message) -> bool:
    """Return whether a change of this message leaves the scans behind it valid."""
    return was.role == now.role and not concerns_calls(was) and not concerns_calls(now)


def _are_called_alike(was: Message, now: Message) -> bool:
    if len(was.tool_calls) != len(now.tool_calls):
        return False
    try:
        return all(map(_is_called_alike, was.tool_calls, now.tool_calls))
    except RecursionError:  # arguments are nested deeper than the recursion limit
        return False


def _is_called_alike(was: ToolCall, now: ToolCall) -> bool:
    is_same = (was.id, was.name) == (now.id, now.name)
    return is_same and _is_spelled_alike(dict(was.arguments), dict(now.arguments))


def _is_spelled_alike(value: Json, other: Json) -> bool:
    """Return whether values are written alike.

    In Python 1, 1.0 and true are equal, and so are dicts in another order, but a model reads different texts.
    """
    if isinstance(value, dict) and isinstance(other, dict):
        return list(value) == list(other) and all(map(_is_spelled_alike, value.values(), other.values()))
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_spelled_alike, value, other))
    return type(value) is type(other) and (
        value == other if isinstance(value, str) else repr(value) == repr(other)
    )
