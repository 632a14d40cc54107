"""Renames call ids to the form that the template takes. The client's ids never reach the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from start_llm.core.chat import Message, ToolCall
from start_llm.core.family import CallIds
from start_llm.core.ids import bare_id


def in_native_form(messages: Sequence[Message], style: CallIds) -> tuple[Message, ...]:
    """Return the messages with native ids and with results in the order of their calls."""
    return tuple(Calls(style).in_native_form(messages))


def _in_order(messages: Sequence[Message], places: Mapping[str, int]) -> list[Message]:
    """Sort neighbouring results in the order of their calls: a template may show no other relation."""
    ordered: list[Message] = []
    for is_result, run in groupby(messages, key=lambda message: message.role == "tool"):
        neighbours = list(run)
        if is_result and all(message.tool_call_id in places for message in neighbours):
            neighbours.sort(key=lambda message: places[message.tool_call_id or ""])
        ordered += neighbours
    return ordered


def concerns_calls(message: Message) -> bool:
    """Return whether the message makes or answers a call."""
    return bool(message.tool_calls) or message.role == "tool" or message.tool_call_id is not None


class Calls:
    """The calls so far, and the ids that a client may use for them."""

    def __init__(self, style: CallIds) -> None:
        self._style: CallIds = style
        self._places: dict[str, int] = {}
        self._meant: dict[str, list[str]] = {}
        self._answered: set[str] = set()

    def copy(self) -> Calls:
        """Return an independent copy."""
        other = Calls(self._style)
        other._places, other._meant = self._places.copy(), self._meant.copy()
        other._answered = self._answered.copy()
        return other

    def in_native_form(self, messages: Iterable[Message]) -> list[Message]:
        """Return the following messages with native ids and with results in the order of their calls.

        Args:
            messages: must not begin with a result if the message before them is one.
        """
        return _in_order(list(map(self.renamed, messages)), self._places)

    def renamed(self, message: Message) -> Message:
        """Return the next message with native ids. A result without a call before it gets no id."""
        if not concerns_calls(message):
            return message
        made = self.made(message.tool_calls)
        answered = self.answered(message.tool_call_id or "") if message.role == "tool" else None
        return replace(message, tool_calls=made, tool_call_id=answered)

    def made(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Return the calls of a message with native ids. From now on their old ids refer to these calls."""
        renamed = [
            ToolCall(_native_id(self._style, call.name, count), call.name, call.arguments)
            for count, call in enumerate(calls, len(self._places))
        ]
        self._places |= {call.id: count for count, call in enumerate(renamed, len(self._places))}
        # Exact ids come last, so they override the looser spellings.
        for spelled in (_left_out, bare_id, str):
            meant: dict[str, list[str]] = {}
            for call, native in zip(calls, renamed, strict=True):
                meant.setdefault(spelled(call.id), []).append(native.id)
            self._meant |= meant
        return tuple(renamed)

    def answered(self, call_id: str) -> str | None:
        """Return the native id of the call that a result with this id answers, or None.

        Clients reuse ids: an id means its newest call, and within one message the results answer the calls of
        an id in order. Clients also drop punctuation or leave the id out.
        """
        meant = self._meant.get(call_id) or self._meant.get(bare_id(call_id))
        if meant is None:
            return None
        native = next((candidate for candidate in meant if candidate not in self._answered), meant[-1])
        self._answered.add(native)
        return native


def _left_out(call_id: str) -> str:  # noqa: ARG001 - one of the spellings
    return ""


def _native_id(style: CallIds, name: str, count: int) -> str:
    match style:
        case "ordinal":
            return f"call{count}"
        case "nine":
            return f"{count:09d}"
        case "kimi":
            return f"functions.{name}:{count}"
