"""Fits a conversation to what its template can show: one row for each thing that a template may not do.

Nothing that the client said is lost, and every message stays where it stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from start_llm.core.chat import ChatRequest, Json, Message, ToolCall
from start_llm.prompt import changes
from start_llm.prompt.changes import Turn
from start_llm.prompt.facts import TemplateFacts
from start_llm.prompt.template import Seen


@dataclass(frozen=True, slots=True)
class Adaptation:
    """One row: what is done, for which templates, in words for the user."""

    told: str
    applies: Callable[[TemplateFacts], bool]
    change: Callable[[list[Turn], ChatRequest], list[Turn]]


@dataclass(frozen=True, slots=True)
class Adapted:
    """A conversation as the template gets it.

    `lasts[i]` is the last message of the request of which `messages[i]` holds something.
    """

    messages: list[Seen]
    lasts: list[int]
    tools: tuple[Mapping[str, Json], ...]


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation("", lambda _: True, changes.show_late_tools),
    Adaptation("", lambda _: True, changes.tell_unknown_results),
    Adaptation("tools told in the system message", lambda facts: not facts.takes_tools, changes.tell_tools),
    Adaptation("calls and results written as text", lambda facts: not facts.takes_calls, changes.write_calls),
    Adaptation(
        "calls made one after the other",
        lambda facts: not facts.takes_parallel_calls,
        changes.serialise_calls,
    ),
    Adaptation(
        "late system messages as marked user turns",
        lambda facts: not facts.takes_late_system,
        changes.mark_late_systems,
    ),
    Adaptation(
        "system message in the first user turn",
        lambda facts: not facts.takes_system,
        changes.fold_system,
    ),
    Adaptation(
        "user text behind a result joined to it",
        lambda facts: not facts.takes_user_after_result,
        changes.join_to_results,
    ),
    Adaptation(
        "neighbours of one role merged",
        lambda facts: not facts.takes_neighbours,
        changes.merge_neighbours,
    ),
    Adaptation(
        "text beside calls in a turn of its own",
        lambda facts: not facts.keeps_text_beside_calls and facts.splits_text_from_calls,
        changes.part_text_from_calls,
    ),
    Adaptation(
        "text beside calls in front of their result",
        lambda facts: not facts.keeps_text_beside_calls and not facts.splits_text_from_calls,
        changes.move_text_to_results,
    ),
)


def adapt(request: ChatRequest, facts: TemplateFacts) -> Adapted:
    """Every row that this template needs, then its own form.

    Args:
        request: its messages are in native form (`call_ids.in_native_form`).
    """
    turns = list(map(Turn, request.messages, range(len(request.messages))))
    for row in ADAPTATIONS:
        if row.applies(facts):
            turns = row.change(turns, request)
    return Adapted(
        messages=[_seen(turn.message, facts) for turn in turns],
        lasts=[turn.last for turn in turns],
        tools=request.tools if facts.takes_tools else (),
    )


def needed(facts: TemplateFacts) -> list[str]:
    """What is done for this template, in words."""
    return [row.told for row in ADAPTATIONS if row.told and row.applies(facts)]


def _seen(message: Message, facts: TemplateFacts) -> Seen:
    """The message as a template expects it."""
    seen: Seen = {"role": message.role, "content": message.content}
    if facts.lead and message.role == "assistant":
        seen["content"] = message.content.removeprefix(facts.lead)
    if message.reasoning is not None and facts.thought_key:
        seen[facts.thought_key] = message.reasoning
    if message.tool_calls:
        seen["tool_calls"] = [_seen_call(call, facts) for call in message.tool_calls]
    if message.tool_call_id is not None:
        seen["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        seen["name"] = message.name
    return seen


def _seen_call(call: ToolCall, facts: TemplateFacts) -> Json:
    arguments: Json = dict(call.arguments)
    if facts.arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
