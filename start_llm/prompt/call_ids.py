"""Ids of calls in the template's own form. A client's spelling never reaches the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from start_llm.core.chat import Message, ToolCall
from start_llm.core.family import CallIds
from start_llm.core.ids import bare_id


def in_native_form(messages: Sequence[Message], style: CallIds) -> tuple[Message, ...]:
    """Native ids, and results in the order of their calls."""
    return tuple(Calls(style).in_native_form(messages))


def with_native_ids(messages: Iterable[Message], style: CallIds) -> list[Message]:
    """Calls are counted through the conversation, and each result gets the id of the call that it answers.

    So a prefix keeps its ids. A result without a call in front of it has no id.
    """
    return list(map(Calls(style).renamed, messages))


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Results that follow each other stand as their calls do: a template may show no other sign.

    Args:
        messages: with native ids. A run of results stays as it is, if the call of one of them is not known.
    """
    calls = [call.id for message in messages for call in message.tool_calls]
    return _in_order(messages, {call_id: place for place, call_id in enumerate(calls)})


def _in_order(messages: Sequence[Message], places: Mapping[str, int]) -> list[Message]:
    ordered: list[Message] = []
    for is_result, run in groupby(messages, key=lambda message: message.role == "tool"):
        neighbours = list(run)
        if is_result and all(message.tool_call_id in places for message in neighbours):
            neighbours.sort(key=lambda message: places[message.tool_call_id or ""])
        ordered += neighbours
    return ordered


def concerns_calls(message: Message) -> bool:
    """Whether it makes some, or answers one."""
    return bool(message.tool_calls) or message.role == "tool" or message.tool_call_id is not None


class Calls:
    """The calls so far, by what a client may call them."""

    def __init__(self, style: CallIds) -> None:
        self._style: CallIds = style
        self._places: dict[str, int] = {}
        self._meant: dict[str, list[str]] = {}
        self._answered: set[str] = set()

    def copy(self) -> Calls:
        """To go on from, whatever becomes of this one."""
        other = Calls(self._style)
        other._places, other._meant = self._places.copy(), self._meant.copy()
        other._answered = self._answered.copy()
        return other

    def in_native_form(self, messages: Iterable[Message]) -> list[Message]:
        """What follows, with native ids, and results in the order of their calls.

        Args:
            messages: begin with no result, if the one in front of them is one.
        """
        return _in_order(list(map(self.renamed, messages)), self._places)

    def renamed(self, message: Message) -> Message:
        """The next message, with native ids."""
        if not concerns_calls(message):
            return message
        made = self.made(message.tool_calls)
        answered = self.answered(message.tool_call_id or "") if message.role == "tool" else None
        return replace(message, tool_calls=made, tool_call_id=answered)

    def made(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """The calls of a message with native ids, which their old ids mean from now on."""
        renamed = [
            ToolCall(_native_id(self._style, call.name, count), call.name, call.arguments)
            for count, call in enumerate(calls, len(self._places))
        ]
        self._places |= {call.id: count for count, call in enumerate(renamed, len(self._places))}
        # The exact spelling last: it counts more.
        for spelled in (_left_out, bare_id, str):
            meant: dict[str, list[str]] = {}
            for call, native in zip(calls, renamed, strict=True):
                meant.setdefault(spelled(call.id), []).append(native.id)
            self._meant |= meant
        return tuple(renamed)

    def answered(self, call_id: str) -> str | None:
        """The call that a result with this id answers.

        Clients use an id again, which then means the new call, also within one message, where the results
        answer its calls in order. They drop punctuation, or leave the id out.
        """
        meant = self._meant.get(call_id) or self._meant.get(bare_id(call_id))
        if meant is None:
            return None
        native = next((one for one in meant if one not in self._answered), meant[-1])
        self._answered.add(native)
        return native


def _left_out(call_id: str) -> str:  # noqa: ARG001 - a way to spell it
    return ""


def _native_id(style: CallIds, name: str, count: int) -> str:
    match style:
        case "ordinal":
            return f"call{count}"
        case "nine":
            return f"{count:09d}"
        case "kimi":
            return f"functions.{name}:{count}"
