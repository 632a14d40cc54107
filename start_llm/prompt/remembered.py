"""Conversations that were looked at, so that in one that goes on from them only what is new is looked at.

What is found of a message depends on nothing in front of it but calls, their results, and whether there are
other messages of its role. So it holds as long as those are the same, even where a message in front says
something else: a system text with another date.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq
from typing import NamedTuple

from start_llm.core.canonical import CanonicalKey, chain
from start_llm.core.chat import Json, Message, ToolCall
from start_llm.prompt.call_ids import Calls, concerns_calls
from start_llm.prompt.looks import Look, Ways, looks_at, names_of

_MOST_CONVERSATIONS = 16
_MOST_BYTES = 32 * 2**20
_MESSAGE_BYTES = 1000
"""About what is kept of a message beside its text."""
_MOST_OTHERS = 16
"""Messages that say something else than before: with more it is another conversation."""


type _Tools = Sequence[Mapping[str, Json]]
type _Said = tuple[str | tuple[str, ...] | None, ...]

_SAID = attrgetter("content", "role", "reasoning", "tool_call_id", "tool_references", "name", "reply_name")
"""Of a message, all but its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A conversation, or the beginning of one, that was looked at.

    Attributes:
        sent: its messages, as the client sent them.
        names: by what the client shows that it was told each (`looks.names_of`).
        looks: at the messages in native form, where results stand in the order of their calls.
        calls: of all of them.
        root: where the chain begins.
        keys: for each prefix.
    """

    sent: Sequence[Message]
    names: Sequence[frozenset[str]]
    looks: Sequence[Look]
    calls: Calls
    root: CanonicalKey
    keys: Sequence[CanonicalKey]


class _Known(NamedTuple):
    """A conversation that is remembered, and what its messages say beside their calls."""

    beginning: Beginning
    said: Sequence[_Said]
    nbytes: int


class RememberedConversations:
    """Looks at conversations, and remembers some. Safe to use from any thread."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._nothing = Beginning(
            sent=(), names=(), looks=(), calls=Calls(ways.call_ids), root=CanonicalKey(b""), keys=()
        )
        self._known: list[_Known] = []
        self._lock = threading.Lock()
        self.looked_at = 0
        """Messages that really were."""

    def look(self, sent: Sequence[Message], late_tools: _Tools, root: CanonicalKey) -> Beginning:
        """All that is found of a conversation.

        Args:
            sent: its messages, as the client sent them.
            late_tools: of the request.
            root: where the chain begins.
        """
        said: list[_Said] = list(map(_SAID, sent))
        known, known_said = self._nearest(said)
        same, others = _shared(known.sent, sent, list(map(eq, known_said, said)))
        calls = self._calls_of(known, same)
        looks = list(known.looks[:same])
        anew = {index: looks[index].native for index in _referring(looks)}
        anew |= {index: sent[index] for index in others}
        for index, native in anew.items():
            (looks[index],) = self._looks([native], late_tools, sent[:index])
        looks += self._looks(calls.in_native_form(sent[same:]), late_tools, sent[:same])
        found = Beginning(
            sent=sent,
            names=_names(known, sent, same, others),
            looks=looks,
            calls=calls,
            root=root,
            keys=_keys(known, looks, root),
        )
        self._keep(found, said, instead_of=known if same == len(known.sent) else None)
        return found

    def _nearest(self, said: Sequence[_Said]) -> tuple[Beginning, Sequence[_Said]]:
        """Of those that are remembered the one, of several the newest, that says most in the same places."""
        with self._lock:
            known = self._known[::-1]
        nearest = max(known, key=lambda one: sum(map(eq, one.said, said)), default=None)
        return (nearest.beginning, nearest.said) if nearest else (self._nothing, ())

    def _keep(self, found: Beginning, said: Sequence[_Said], instead_of: Beginning | None) -> None:
        nbytes = sum(_MESSAGE_BYTES + len(look.canonical.data) for look in found.looks)
        with self._lock:
            self._known = [one for one in self._known if one.beginning is not instead_of]
            self._known.append(_Known(found, said, nbytes))
            total = sum(one.nbytes for one in self._known)
            while len(self._known) > _MOST_CONVERSATIONS or total > _MOST_BYTES:
                total -= self._known.pop(0).nbytes

    def _calls_of(self, known: Beginning, count: int) -> Calls:
        """Of so many of its messages."""
        if count == len(known.sent):
            return known.calls.copy()
        calls = Calls(self._ways.call_ids)
        calls.in_native_form(known.sent[:count])
        return calls

    def _looks(
        self, native: Sequence[Message], late_tools: _Tools, before: Sequence[Message]
    ) -> Sequence[Look]:
        with self._lock:
            self.looked_at += len(native)
        return looks_at(native, self._ways, late_tools, {message.role for message in before})


def _referring(looks: Sequence[Look]) -> list[int]:
    """Messages that make late tools known, which another request may have otherwise."""
    return [index for index, look in enumerate(looks) if look.native.tool_references]


def _names(
    known: Beginning, sent: Sequence[Message], same: int, others: Sequence[int]
) -> Sequence[frozenset[str]]:
    names = [*known.names[:same], *map(names_of, sent[same:])]
    for index in others:
        names[index] = names_of(sent[index])
    return names


def _keys(known: Beginning, looks: Sequence[Look], root: CanonicalKey) -> Sequence[CanonicalKey]:
    """Those of a known beginning, up to where something else is compared, and what follows."""
    pairs = enumerate(zip(known.looks, looks, strict=False))
    least = min(len(known.looks), len(looks))
    same = next((at for at, (was, now) in pairs if was is not now and was.canonical != now.canonical), least)
    begun = known.keys[:same] if known.root == root else ()
    return [*begun, *chain(begun[-1] if begun else root, (look.canonical for look in looks[len(begun) :]))]


def _shared(
    known: Sequence[Message], sent: Sequence[Message], says_same: Sequence[bool]
) -> tuple[int, list[int]]:
    """How long a beginning holds, and which of its messages say something else, up to the last that does not.

    Results that follow each other stand as their calls do, so they hold together or not at all.

    Args:
        says_same: whether two messages say the same beside their calls.
    """
    same, others = 0, list[int]()
    for index, is_alike in enumerate(says_same):
        was, now = known[index], sent[index]
        if is_alike and (not (was.tool_calls or now.tool_calls) or _are_called_alike(was, now)):
            same = index + 1
        elif len(others) < _MOST_OTHERS and _may_differ(was, now):
            others.append(index)
        else:
            break
    while _is_result(sent, same - 1) and (_is_result(known, same) or _is_result(sent, same)):
        same -= 1
    return same, [index for index in others if index < same]


def _is_result(messages: Sequence[Message], index: int) -> bool:
    return 0 <= index < len(messages) and messages[index].role == "tool"


def _may_differ(was: Message, now: Message) -> bool:
    """Whether what follows is looked at alike."""
    return was.role == now.role and not concerns_calls(was) and not concerns_calls(now)


def _are_called_alike(was: Message, now: Message) -> bool:
    if len(was.tool_calls) != len(now.tool_calls):
        return False
    try:
        return all(map(_is_called_alike, was.tool_calls, now.tool_calls))
    except RecursionError:  # arguments that are nested as deeply as Python goes
        return False


def _is_called_alike(was: ToolCall, now: ToolCall) -> bool:
    is_same = (was.id, was.name) == (now.id, now.name)
    return is_same and _is_spelled_alike(dict(was.arguments), dict(now.arguments))


def _is_spelled_alike(one: Json, other: Json) -> bool:
    """1, 1.0 and true are equal, and so are objects in another order, but not for a model."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(_is_spelled_alike, one.values(), other.values()))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_spelled_alike, one, other))
    return type(one) is type(other) and (one == other if isinstance(one, str) else repr(one) == repr(other))
