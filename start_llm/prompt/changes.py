"""What is done to a conversation that a template cannot show as it is: a function for each row of `adapt`.

Each takes the turns of a conversation and the request that they come from, and gives the turns anew.
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
_TEXT_BESIDE_CALL = "[Text in front of the call]\n"
_BETWEEN = "\n\n"


class Turn(NamedTuple):
    """A message for the template, and the last message of the request that it holds; -1 if it holds none."""

    message: Message
    last: int


def show_late_tools(turns: list[Turn], request: ChatRequest) -> list[Turn]:
    """The schema of a late tool stands where it is referred to, so that the prefix stays as it was."""
    if not any(turn.message.tool_references for turn in turns):
        return turns
    schemas = {tool_name(tool): json.dumps(tool, ensure_ascii=False) for tool in request.late_tools}

    def shown(message: Message) -> Message:
        lines = [schemas.get(name, name) for name in message.tool_references]
        return replace(message, content="\n".join([message.content, *lines] if message.content else lines))

    return [Turn(shown(turn.message), turn.last) if turn.message.tool_references else turn for turn in turns]


def tool_name(tool: Mapping[str, Json]) -> str:
    """Of its schema; nothing if it has none."""
    function = tool.get("function")
    return str(function.get("name")) if isinstance(function, dict) else ""


def tell_unknown_results(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """A result whose call is not in the conversation, which templates refuse, is told by the user."""
    if not any(_is_unknown(turn.message) for turn in turns):
        return turns
    return [
        Turn(_told_result(turn.message, turn.message.name or "a tool"), turn.last)
        if _is_unknown(turn.message)
        else turn
        for turn in turns
    ]


def _is_unknown(result: Message) -> bool:
    return result.role == "tool" and result.tool_call_id is None


def _told_result(message: Message, name: str) -> Message:
    return Message(role="user", content=f"[Result of {name}]\n{message.content}")


def tell_tools(turns: list[Turn], request: ChatRequest) -> list[Turn]:
    """Schemas, and a form of calls that is always recognised, behind the system text."""
    if not request.tools:
        return turns
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in request.tools)
    told = (
        f"You have these tools:\n{schemas}\nTo call one, answer with "
        '<tool_call>{"name": "NAME", "arguments": {…}}</tool_call> and nothing behind it.'
    )
    if turns and turns[0].message.role == "system":
        first = turns[0].message
        return [Turn(replace(first, content=_joined(first.content, told)), turns[0].last), *turns[1:]]
    return [Turn(Message(role="system", content=told), -1), *turns]


def put_system_beside_tools(turns: list[Turn], request: ChatRequest) -> list[Turn]:
    """For templates that show tools in a system message alone."""
    has_system = bool(turns) and turns[0].message.role == "system"
    return turns if has_system or not request.tools else [Turn(Message(role="system"), -1), *turns]


def write_calls(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001 - the form of a change
    """Calls as `tell_tools` asks for them, and results as user turns."""
    names = {call.id: call.name for turn in turns for call in turn.message.tool_calls}

    def written(message: Message) -> Message:
        if message.role == "tool":
            return _told_result(message, names[message.tool_call_id or ""])
        calls = "\n".join(f"<tool_call>{_call_text(call)}</tool_call>" for call in message.tool_calls)
        return replace(message, content=_joined(message.content, calls), tool_calls=()) if calls else message

    return [Turn(written(turn.message), turn.last) for turn in turns]


def write_calls_without_tools(turns: list[Turn], request: ChatRequest) -> list[Turn]:
    """For templates that show calls beside tools alone: a client that compacts offers none."""
    return turns if request.tools else write_calls(turns, request)


def _call_text(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def part_text_from_calls(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """The text, and the thought with it, in a turn in front of the calls."""
    parted: list[Turn] = []
    for turn in turns:
        message = turn.message
        if message.tool_calls and message.content.strip():
            text = Message(role="assistant", content=message.content, reasoning=message.reasoning)
            parted.append(Turn(text, turn.last))
            message = replace(message, content="", reasoning=None)
        parted.append(Turn(message, turn.last))
    return parted


def move_text_to_results(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """For templates that show text neither beside calls nor in front of them: it opens the first result.

    The message has its end there too, so the turn with its calls is no place to cut.
    """
    moved = list(turns)
    for index, (turn, following) in enumerate(pairwise(turns)):
        calling, result = turn.message, following.message
        if calling.tool_calls and calling.content.strip() and result.role == "tool":
            told = _joined(_TEXT_BESIDE_CALL + calling.content, result.content)
            moved[index] = Turn(replace(calling, content=""), following.last)
            moved[index + 1] = Turn(replace(result, content=told), following.last)
    return moved


def serialise_calls(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """Each call in a message of its own, its results right behind it."""
    results: dict[str, list[Turn]] = {
        call.id: [] for turn in turns if len(turn.message.tool_calls) > 1 for call in turn.message.tool_calls
    }
    serial: list[Turn] = []
    for turn in turns:
        if turn.message.tool_call_id in results:
            results[turn.message.tool_call_id].append(turn)
    for turn in turns:
        if turn.message.tool_call_id not in results:
            serial += _one_by_one(turn, results) if len(turn.message.tool_calls) > 1 else [turn]
    return serial


def _one_by_one(turn: Turn, results: Mapping[str, list[Turn]]) -> list[Turn]:
    """The first of the calls keeps what the message has beside them."""
    first, *others = turn.message.tool_calls
    serial = [Turn(replace(turn.message, tool_calls=(first,)), turn.last), *results[first.id]]
    for call in others:
        serial += [Turn(Message(role="assistant", tool_calls=(call,)), turn.last), *results[call.id]]
    return serial


def mark_late_systems(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """System messages at the start become one; a later one stays in its place as a marked user turn."""
    count = next((i for i, turn in enumerate(turns) if turn.message.role != "system"), len(turns))
    head = [Turn(_merged([turn.message for turn in turns[:count]]), turns[count - 1].last)] if count else []
    return [*head, *(_as_user(turn, _SYSTEM_IN_PLACE) for turn in turns[count:])]


def _as_user(turn: Turn, mark: str) -> Turn:
    if turn.message.role != "system":
        return turn
    return Turn(Message(role="user", content=mark + turn.message.content), turn.last)


def ask_nothing(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """For templates that need a question, where nobody asks one: an empty one behind the system text."""
    if any(turn.message.role == "user" for turn in turns):
        return turns
    count = next((i for i, turn in enumerate(turns) if turn.message.role != "system"), len(turns))
    return [*turns[:count], Turn(Message(role="user"), -1), *turns[count:]]


def fold_system(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """For templates without a system role: its text opens the first user turn."""
    return [_as_user(turn, "") for turn in turns]


def merge_neighbours(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """Turns of one role that follow each other become one; results, and what follows calls, stay apart."""
    merged: list[Turn] = []
    for turn in turns:
        if merged and _may_merge(merged[-1].message, turn.message):
            merged[-1] = Turn(_merged([merged[-1].message, turn.message]), turn.last)
        else:
            merged.append(turn)
    return merged


def join_to_results(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """User text stands in the result in front of it, or is the result of a call that has none."""
    joined: list[Turn] = []
    for turn in turns:
        before = joined[-1].message if joined and turn.message.role == "user" else None
        told = _USER_BEHIND_RESULT + turn.message.content
        if before and before.role == "tool":
            result = replace(before, content=_joined(before.content, told))
            joined[-1] = Turn(result, turn.last)
        elif before and before.tool_calls:
            result = Message(role="tool", content=told, tool_call_id=before.tool_calls[-1].id)
            joined.append(Turn(result, turn.last))
        else:
            joined.append(turn)
    return joined


def leave_out_empty_replies(turns: list[Turn], request: ChatRequest) -> list[Turn]:  # noqa: ARG001
    """For templates that refuse them whatever is put in their place."""
    return [turn for turn in turns if not _is_empty_reply(turn.message)]


def _is_empty_reply(message: Message) -> bool:
    return message.role == "assistant" and not message.content.strip() and not message.tool_calls


def _may_merge(left: Message, right: Message) -> bool:
    return left.role == right.role != "tool" and not left.tool_calls


def _merged(messages: Sequence[Message]) -> Message:
    """One message of one role, the last one's calls with it."""
    thoughts = [message.reasoning for message in messages if message.reasoning]
    return replace(
        messages[-1],
        content=_joined(*[message.content for message in messages]),
        reasoning=_joined(*thoughts) or None,
    )


def _joined(*texts: str) -> str:
    return _BETWEEN.join(text for text in texts if text)
