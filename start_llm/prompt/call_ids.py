"""Ids of calls in the template's own form. A client's spelling never reaches the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from start_llm.core.chat import Message, ToolCall
from start_llm.core.family import CallIds
from start_llm.core.ids import bare_id


def in_native_form(messages: Sequence[Message], style: CallIds) -> tuple[Message, ...]:
    """Native ids, and results in the order of their calls."""
    return tuple(in_order_of_calls(with_native_ids(messages, style)))


def with_native_ids(messages: Iterable[Message], style: CallIds) -> list[Message]:
    """Calls are counted through the conversation, and each result gets the id of the call that it answers.

    So a prefix keeps its ids. A result without a call in front of it has no id.
    """
    renamed: list[Message] = []
    calls = _Calls(style)
    for message in messages:
        if message.tool_calls or message.role == "tool" or message.tool_call_id is not None:
            made = calls.made(message.tool_calls)
            answered = calls.answered(message.tool_call_id or "") if message.role == "tool" else None
            renamed.append(replace(message, tool_calls=made, tool_call_id=answered))
        else:
            renamed.append(message)
    return renamed


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Results that follow each other stand as their calls do: a template may show no other sign.

    Args:
        messages: with native ids. A run of results stays as it is, if the call of one of them is not known.
    """
    calls = [call.id for message in messages for call in message.tool_calls]
    places = {call_id: place for place, call_id in enumerate(calls)}
    ordered: list[Message] = []
    for is_result, run in groupby(messages, key=lambda message: message.role == "tool"):
        neighbours = list(run)
        if is_result and all(message.tool_call_id in places for message in neighbours):
            neighbours.sort(key=lambda message: places[message.tool_call_id or ""])
        ordered += neighbours
    return ordered


class _Calls:
    """The calls so far, by what a client may call them."""

    def __init__(self, style: CallIds) -> None:
        self._style: CallIds = style
        self._count = 0
        self._meant: dict[str, list[str]] = {}
        self._answered: set[str] = set()

    def made(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """The calls of a message with native ids, which their old ids mean from now on."""
        renamed = [
            ToolCall(_native_id(self._style, call.name, self._count + index), call.name, call.arguments)
            for index, call in enumerate(calls)
        ]
        self._count += len(calls)
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
