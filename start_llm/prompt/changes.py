"""Changes conversations that a template cannot show as they are: one function for each row of `adapt`.

Each function takes the turns of a conversation and the request that they come from, and returns new turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from start_llm.core.chat import ChatRequest, Json, Message, ToolCall

_SYSTEM_IN_PLACE = "[System message]\n"
_USER_BEHIND_RESULT = "[User message]\n"
_TEXT_BESIDE_CALL = "[Text before the call]\n"
_BETWEEN = "\n\n"


class PromptTurn(NamedTuple):
    """A message for the template, and the index of the last request message in it; -1 if it holds none."""

    message: Message
    last: int


def show_late_tools(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:
    """Append a late tool's schema to the message that refers to it, so that the prefix stays the same."""
    if not any(turn.message.tool_references for turn in turns):
        return turns
    schemas = {tool_name(tool): json.dumps(tool, ensure_ascii=False) for tool in request.late_tools}

    def shown(message: Message) -> Message:
        lines = [schemas.get(name, name) for name in message.tool_references]
        return replace(message, content="\n".join([message.content, *lines] if message.content else lines))

    return [
        PromptTurn(shown(turn.message), turn.last) if turn.message.tool_references else turn for turn in turns
    ]


def tool_name(tool: Mapping[str, Json]) -> str:
    """Return the name in a tool's schema; empty if it has none."""
    function = tool.get("function")
    return str(function.get("name")) if isinstance(function, dict) else ""


def tell_unknown_results(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Turn results of calls that are not in the conversation into user messages: templates refuse them."""
    if not any(_is_unknown(turn.message) for turn in turns):
        return turns
    return [
        PromptTurn(_told_result(turn.message, turn.message.name or "a tool"), turn.last)
        if _is_unknown(turn.message)
        else turn
        for turn in turns
    ]


def _is_unknown(result: Message) -> bool:
    return result.role == "tool" and result.tool_call_id is None


def _told_result(message: Message, name: str) -> Message:
    return Message(role="user", content=f"[Result of {name}]\n{message.content}")


def tell_tools(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:
    """Append the tools' schemas, and a form of calls that is always recognised, to the system message."""
    if not request.tools:
        return turns
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in request.tools)
    told = (
        f"You have these tools:\n{schemas}\nTo call one, answer with "
        '<tool_call>{"name": "NAME", "arguments": {…}}</tool_call> and nothing after it.'
    )
    if turns and turns[0].message.role == "system":
        first = turns[0].message
        return [PromptTurn(replace(first, content=_joined(first.content, told)), turns[0].last), *turns[1:]]
    return [PromptTurn(Message(role="system", content=told), -1), *turns]


def put_system_beside_tools(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:
    """Add an empty system message for templates that show tools only in one."""
    has_system = bool(turns) and turns[0].message.role == "system"
    return turns if has_system or not request.tools else [PromptTurn(Message(role="system"), -1), *turns]


def write_calls(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001 - every change has this signature
    """Write calls as text in the form that `tell_tools` asks for, and results as user messages."""
    names = {call.id: call.name for turn in turns for call in turn.message.tool_calls}

    def written(message: Message) -> Message:
        if message.role == "tool":
            return _told_result(message, names[message.tool_call_id or ""])
        calls = "\n".join(f"<tool_call>{_call_text(call)}</tool_call>" for call in message.tool_calls)
        return replace(message, content=_joined(message.content, calls), tool_calls=()) if calls else message

    return [PromptTurn(written(turn.message), turn.last) for turn in turns]


def write_calls_without_tools(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:
    """Write calls as text if the request has no tools, for templates that show calls only beside tools.

    A client that compacts its conversation sends no tools.
    """
    return turns if request.tools else write_calls(turns, request)


def _call_text(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def part_text_from_calls(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Move text and reasoning into a turn of their own before the calls."""
    parted: list[PromptTurn] = []
    for turn in turns:
        message = turn.message
        if message.tool_calls and message.content.strip():
            text = Message(role="assistant", content=message.content, reasoning=message.reasoning)
            parted.append(PromptTurn(text, turn.last))
            message = replace(message, content="", reasoning=None)
        parted.append(PromptTurn(message, turn.last))
    return parted


def move_text_to_results(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Move text beside calls to the beginning of the first result.

    For templates that show such text neither beside the calls nor before them. The message then ends
    with that result, so no boundary is set after the turn with its calls.
    """
    moved = list(turns)
    for index, (turn, following) in enumerate(pairwise(turns)):
        calling, result = turn.message, following.message
        if calling.tool_calls and calling.content.strip() and result.role == "tool":
            told = _joined(_TEXT_BESIDE_CALL + calling.content, result.content)
            moved[index] = PromptTurn(replace(calling, content=""), following.last)
            moved[index + 1] = PromptTurn(replace(result, content=told), following.last)
    return moved


def serialise_calls(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Put each call in a message of its own, followed by its results."""
    results: dict[str, list[PromptTurn]] = {
        call.id: [] for turn in turns if len(turn.message.tool_calls) > 1 for call in turn.message.tool_calls
    }
    serial: list[PromptTurn] = []
    for turn in turns:
        if turn.message.tool_call_id in results:
            results[turn.message.tool_call_id].append(turn)
    for turn in turns:
        if turn.message.tool_call_id not in results:
            serial += _one_by_one(turn, results) if len(turn.message.tool_calls) > 1 else [turn]
    return serial


def _one_by_one(turn: PromptTurn, results: Mapping[str, list[PromptTurn]]) -> list[PromptTurn]:
    """Split a turn by calls. The first call keeps the other parts of the message."""
    first, *others = turn.message.tool_calls
    serial = [PromptTurn(replace(turn.message, tool_calls=(first,)), turn.last), *results[first.id]]
    for call in others:
        serial += [PromptTurn(Message(role="assistant", tool_calls=(call,)), turn.last), *results[call.id]]
    return serial


def mark_late_systems(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Merge the system messages at the start. Turn later ones into marked user turns in their place."""
    count = next((i for i, turn in enumerate(turns) if turn.message.role != "system"), len(turns))
    head = (
        [PromptTurn(_merged([turn.message for turn in turns[:count]]), turns[count - 1].last)]
        if count
        else []
    )
    return [*head, *(_as_user(turn, _SYSTEM_IN_PLACE) for turn in turns[count:])]


def _as_user(turn: PromptTurn, mark: str) -> PromptTurn:
    if turn.message.role != "system":
        return turn
    return PromptTurn(Message(role="user", content=mark + turn.message.content), turn.last)


def ask_nothing(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Add an empty question after the system text if there is none, for templates that require one."""
    if any(turn.message.role == "user" for turn in turns):
        return turns
    count = next((i for i, turn in enumerate(turns) if turn.message.role != "system"), len(turns))
    return [*turns[:count], PromptTurn(Message(role="user"), -1), *turns[count:]]


def fold_system(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Turn system messages into user turns, for templates without a system role."""
    return [_as_user(turn, "") for turn in turns]


def merge_neighbours(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Merge neighbouring turns of one role, except results and turns that follow calls."""
    merged: list[PromptTurn] = []
    for turn in turns:
        if merged and _may_merge(merged[-1].message, turn.message):
            merged[-1] = PromptTurn(_merged([merged[-1].message, turn.message]), turn.last)
        else:
            merged.append(turn)
    return merged


def join_to_results(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Append user text to the result before it; after a call without a result, make it the result."""
    joined: list[PromptTurn] = []
    for turn in turns:
        before = joined[-1].message if joined and turn.message.role == "user" else None
        told = _USER_BEHIND_RESULT + turn.message.content
        if before and before.role == "tool":
            result = replace(before, content=_joined(before.content, told))
            joined[-1] = PromptTurn(result, turn.last)
        elif before and before.tool_calls:
            result = Message(role="tool", content=told, tool_call_id=before.tool_calls[-1].id)
            joined.append(PromptTurn(result, turn.last))
        else:
            joined.append(turn)
    return joined


def leave_out_empty_replies(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:  # noqa: ARG001
    """Remove empty replies, for templates that refuse them even with a placeholder."""
    return [turn for turn in turns if not _is_empty_reply(turn.message)]


def _is_empty_reply(message: Message) -> bool:
    return message.role == "assistant" and not message.content.strip() and not message.tool_calls


def _may_merge(left: Message, right: Message) -> bool:
    return left.role == right.role != "tool" and not left.tool_calls


def _merged(messages: Sequence[Message]) -> Message:
    """Merge messages of one role; the result keeps the last one's calls."""
    reasoning_texts = [message.reasoning for message in messages if message.reasoning]
    return replace(
        messages[-1],
        content=_joined(*[message.content for message in messages]),
        reasoning=_joined(*reasoning_texts) or None,
    )


def _joined(*texts: str) -> str:
    return _BETWEEN.join(text for text in texts if text)
