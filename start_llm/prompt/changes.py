"""Changes conversations that a template cannot show as they are: one function for each row of `adapt`.

Each function takes the turns of a conversation and the request that they come from, and returns new turns.
One that needs no more than the turns names the request `_request`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest
from typing import NamedTuple

from start_llm.core.chat import ChatRequest, Json, Message, tool_name
from start_llm.core.family import WriteCalls
from start_llm.core.images import has_image, image_words

_SYSTEM_IN_PLACE = "[System message]\n"
_USER_BEHIND_RESULT = "[User message]\n"
_TEXT_BESIDE_CALL = "[Text before the call]\n"
_IMAGE, _IMAGE_BELOW = "[Image {}]\n{}", "[Image {}: below]"
_HERMES = '<tool_call>{"name": "NAME", "arguments": {…}}</tool_call>'
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
        content = "\n".join([message.content, *lines] if message.content else lines)
        return replace(message, content=content) if lines else message

    return _each(turns, shown)


def _each(turns: Sequence[PromptTurn], change: Callable[[Message], Message]) -> list[PromptTurn]:
    return [PromptTurn(change(turn.message), turn.last) for turn in turns]


def tell_unknown_results(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Turn results of calls that are not in the conversation into user messages: templates refuse them."""

    def shown(message: Message) -> Message:
        is_unknown = message.role == "tool" and message.tool_call_id is None
        return _as_user_message(message, message.name or "a tool") if is_unknown else message

    return _each(turns, shown)


def name_results(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Give each result the name of the tool that it comes from."""
    names = {call.id: call.name for turn in turns for call in turn.message.tool_calls}

    def named(message: Message) -> Message:
        is_result = message.role == "tool"
        return replace(message, name=names[message.tool_call_id or ""]) if is_result else message

    return _each(turns, named)


def _as_user_message(message: Message, name: str) -> Message:
    return Message(role="user", content=f"[Result of {name}]\n{message.content}")


def write_as_hermes(calls: Sequence[tuple[str, Mapping[str, Json]]]) -> str:
    """Write calls in the form that is always recognised."""
    objects = ({"name": name, "arguments": dict(arguments)} for name, arguments in calls)
    return "\n".join(f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in objects)


def tell_tools(
    turns: list[PromptTurn], request: ChatRequest, write_calls: WriteCalls | None = None
) -> list[PromptTurn]:
    """Append the tools' schemas, and the form of calls, to the system message."""
    if not request.tools:
        return turns
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in request.tools)
    form = write_calls([("NAME", {"KEY": "VALUE"})]) if write_calls else _HERMES
    text = f"You have these tools:\n{schemas}\nTo call one, answer with {form} and nothing after it."
    if turns and turns[0].message.role == "system":
        first = turns[0].message
        return [PromptTurn(replace(first, content=_joined(first.content, text)), turns[0].last), *turns[1:]]
    return [PromptTurn(Message(role="system", content=text), -1), *turns]


def put_system_beside_tools(turns: list[PromptTurn], request: ChatRequest) -> list[PromptTurn]:
    """Add an empty system message for templates that show tools only in one."""
    has_system = bool(turns) and turns[0].message.role == "system"
    return turns if has_system or not request.tools else [PromptTurn(Message(role="system"), -1), *turns]


def write_calls(
    turns: list[PromptTurn], _request: ChatRequest, write: WriteCalls = write_as_hermes
) -> list[PromptTurn]:
    """Write calls as text in the form that `tell_tools` asks for, and results as user messages."""
    names = {call.id: call.name for turn in turns for call in turn.message.tool_calls}

    def written(message: Message) -> Message:
        if message.role == "tool":
            return _as_user_message(message, names[message.tool_call_id or ""])
        if not message.tool_calls:
            return message
        calls = write([(call.name, call.arguments) for call in message.tool_calls])
        return replace(message, content=_joined(message.content, calls), tool_calls=())

    return _each(turns, written)


def write_calls_without_tools(
    turns: list[PromptTurn], request: ChatRequest, write: WriteCalls = write_as_hermes
) -> list[PromptTurn]:
    """Write calls as text if the request has no tools, for templates that show calls only beside tools.

    A client that compacts its conversation sends no tools.
    """
    return turns if request.tools else write_calls(turns, request, write)


def part_text_from_calls(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
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


def move_text_to_results(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Move text beside calls to the beginning of the first result.

    For templates that show such text neither beside the calls nor before them. The message then ends
    with that result, so no boundary is set after the turn with its calls. Without a result the text becomes
    a message before the calls.
    """
    moved: list[PromptTurn] = []
    pending: str = ""
    for turn, following in zip_longest(turns, turns[1:]):
        calling, text = turn.message, turn.message.content
        if pending:
            moved.append(PromptTurn(replace(calling, content=_joined(pending, text)), turn.last))
            pending = ""
        elif not calling.tool_calls or not text.strip():
            moved.append(turn)
        elif following and following.message.role == "tool":
            pending = _TEXT_BESIDE_CALL + text
            moved.append(PromptTurn(replace(calling, content=""), following.last))
        else:
            moved.append(PromptTurn(Message(role="assistant", content=text), turn.last))
            moved.append(PromptTurn(replace(calling, content=""), turn.last))
    return moved


def serialise_calls(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
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


def show_images_behind_results(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Move images of neighbouring results into a user message behind them, and leave a pointer in each place.

    Results from the first one with an image on end with that message.
    """
    shown: list[PromptTurn] = []
    for is_result, run in groupby(turns, key=lambda turn: turn.message.role == "tool"):
        neighbours = list(run)
        shown += _with_images_behind(neighbours) if is_result else neighbours
    return shown


def _with_images_behind(results: Sequence[PromptTurn]) -> Sequence[PromptTurn]:
    first = next((at for at, turn in enumerate(results) if has_image(turn.message.content)), None)
    if first is None:
        return results
    last, words, turns = max(turn.last for turn in results), list[str](), list(results[:first])
    for turn in results[first:]:
        content, after = "", 0
        for word in image_words(turn.message.content):
            words.append(word.group())
            content += turn.message.content[after : word.start()] + _IMAGE_BELOW.format(len(words))
            after = word.end()
        content += turn.message.content[after:]
        turns.append(PromptTurn(replace(turn.message, content=content), last))
    images = [_IMAGE.format(number, word) for number, word in enumerate(words, 1)]
    return [*turns, PromptTurn(Message(role="user", content="\n".join(images)), last)]


def mark_late_systems(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Merge the system messages at the start. Turn later ones into marked user turns in their place."""
    count = _leading_systems(turns)
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


def ask_nothing(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Add an empty question after the system text if there is none, for templates that require one."""
    if any(turn.message.role == "user" for turn in turns):
        return turns
    count = _leading_systems(turns)
    return [*turns[:count], PromptTurn(Message(role="user"), -1), *turns[count:]]


def ask_before_replies(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Add an empty question before a reply that nothing but system text precedes."""
    count = _leading_systems(turns)
    if count == len(turns) or turns[count].message.role != "assistant":
        return turns
    return [*turns[:count], PromptTurn(Message(role="user"), -1), *turns[count:]]


def _leading_systems(turns: Sequence[PromptTurn]) -> int:
    return next((i for i, turn in enumerate(turns) if turn.message.role != "system"), len(turns))


def fold_system(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Turn system messages into user turns, for templates without a system role."""
    return [_as_user(turn, "") for turn in turns]


def merge_neighbours(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Merge neighbouring turns of one role, except results and turns that follow calls.

    Turns that share their last message with the first of two neighbours, as results do with the images behind
    them, are complete only with the second one.
    """
    merged: list[PromptTurn] = []
    for turn in turns:
        if merged and _may_merge(merged[-1].message, turn.message):
            left = merged.pop()
            for at in range(len(merged) - 1, -1, -1):
                if merged[at].last != left.last:
                    break
                merged[at] = merged[at]._replace(last=turn.last)
            turn = PromptTurn(_merged([left.message, turn.message]), turn.last)  # noqa: PLW2901
        merged.append(turn)
    return merged


def join_to_results(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
    """Append user text to the result before it; after a call without a result, make it the result."""
    joined: list[PromptTurn] = []
    for turn in turns:
        before = joined[-1].message if joined and turn.message.role == "user" else None
        text = _USER_BEHIND_RESULT + turn.message.content
        if before and before.role == "tool":
            result = replace(before, content=_joined(before.content, text))
            joined[-1] = PromptTurn(result, turn.last)
        elif before and before.tool_calls:
            result = Message(role="tool", content=text, tool_call_id=before.tool_calls[-1].id)
            joined.append(PromptTurn(result, turn.last))
        else:
            joined.append(turn)
    return joined


def leave_out_empty_replies(turns: list[PromptTurn], _request: ChatRequest) -> list[PromptTurn]:
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
