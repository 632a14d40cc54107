"""Adapts a conversation to what its chat template can show: a table with one row for each limitation.

Everything that the client sent is kept, and every message stays in its place.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from start_llm.core.chat import ChatRequest, Json, Message, ToolCall
from start_llm.prompt import changes
from start_llm.prompt.changes import PromptTurn
from start_llm.prompt.template import TemplateMessage
from start_llm.prompt.template_audit.facts import TemplateFacts


@dataclass(frozen=True, slots=True)
class Adaptation:
    """One row of the table.

    Attributes:
        description: what the user reads of it; empty if it is not reported.
        applies: whether a template needs it.
        change: the function that applies it to the turns of a request.
        writes_calls: it takes `TemplateFacts.write_calls`, too.
    """

    description: str
    applies: Callable[[TemplateFacts], bool]
    change: Callable[..., list[PromptTurn]]
    writes_calls: bool = False

    def applied(
        self, turns: list[PromptTurn], request: ChatRequest, facts: TemplateFacts
    ) -> list[PromptTurn]:
        if self.writes_calls and facts.write_calls:
            return self.change(turns, request, facts.write_calls)
        return self.change(turns, request)


@dataclass(frozen=True, slots=True)
class Adapted:
    """A conversation as the template gets it.

    Attributes:
        lasts: `lasts[i]` is the index of the last request message that `messages[i]` holds a part of.
    """

    messages: list[TemplateMessage]
    lasts: list[int]
    tools: tuple[Mapping[str, Json], ...]


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation("", lambda _: True, changes.show_late_tools),
    Adaptation("", lambda _: True, changes.tell_unknown_results),
    Adaptation(
        "results with the names of their tools",
        lambda facts: facts.results_need_names,
        changes.name_results,
    ),
    Adaptation(
        "an empty system message beside tools",
        lambda facts: facts.tools_need_system,
        changes.put_system_beside_tools,
    ),
    Adaptation(
        "tools listed in the system message",
        lambda facts: not facts.takes_tools,
        changes.tell_tools,
        writes_calls=True,
    ),
    Adaptation(
        "calls and results written as text",
        lambda facts: not facts.takes_calls,
        changes.write_calls,
        writes_calls=True,
    ),
    Adaptation(
        "calls and results written as text where no tools are offered",
        lambda facts: facts.takes_calls and not facts.takes_calls_without_tools,
        changes.write_calls_without_tools,
        writes_calls=True,
    ),
    Adaptation(
        "calls made one after the other",
        lambda facts: not facts.takes_parallel_calls,
        changes.serialise_calls,
    ),
    Adaptation(
        "images of results in a user message behind them",
        lambda facts: not facts.images_in_results and facts.takes_user_after_result,
        changes.show_images_behind_results,
    ),
    Adaptation(
        "late system messages as marked user turns",
        lambda facts: not facts.takes_late_system,
        changes.mark_late_systems,
    ),
    Adaptation(
        "an empty question where there is none",
        lambda facts: not facts.takes_lone_system,
        changes.ask_nothing,
    ),
    Adaptation(
        "system message in the first user turn",
        lambda facts: not facts.takes_system,
        changes.fold_system,
    ),
    Adaptation(
        "an empty question before a first answer",
        lambda facts: not facts.takes_reply_first,
        changes.ask_before_replies,
    ),
    Adaptation(
        "user text after a result joined to it",
        lambda facts: not facts.takes_user_after_result,
        changes.join_to_results,
    ),
    Adaptation(
        "empty answers left out",
        lambda facts: facts.refuses_blank_replies,
        changes.leave_out_empty_replies,
    ),
    Adaptation(
        "neighbours of one role merged",
        lambda facts: not facts.takes_neighbours,
        changes.merge_neighbours,
    ),
    Adaptation(
        "text beside calls in a turn of its own",
        lambda facts: facts.text_beside_calls == "parted",
        changes.part_text_from_calls,
    ),
    Adaptation(
        "text beside calls before their result",
        lambda facts: facts.text_beside_calls == "moved",
        changes.move_text_to_results,
    ),
)

IN_THE_FORM: tuple[tuple[str, Callable[[TemplateFacts], bool]], ...] = (
    ("text beside calls set before them", lambda facts: facts.text_beside_calls == "set in"),
    ("marks that a reply quotes kept from the template", lambda facts: bool(facts.stand_ins.quoted)),
    ("no reasoning beside answers", lambda facts: "answers" in facts.reasoning_hide),
    ("no reasoning beside calls", lambda facts: "calls" in facts.reasoning_hide),
    ("texts in calls escaped", lambda facts: facts.quotes_texts is not None),
    ("empty messages as a space", lambda facts: bool(facts.refuses_empty)),
    ("empty descriptions and parameters for tools without", lambda facts: not facts.takes_bare_tools),
    (
        "images in results, where its template shows none",
        lambda facts: not facts.images_in_results and not facts.takes_user_after_result,
    ),
    ("schemas written into the descriptions of tools", lambda facts: not facts.shows_schemas),
)
"""Adaptations of the form in which messages and tools are passed: description and condition."""


def adapt(request: ChatRequest, facts: TemplateFacts) -> Adapted:
    """Apply every adaptation that this template needs, then convert the messages to the template's form.

    Args:
        request: its messages are in native form (`call_ids.in_native_form`), its tools in the form that the
            template needs (`tool_forms.ToolForms`).
    """
    turns = list(map(PromptTurn, request.messages, range(len(request.messages))))
    for row in ADAPTATIONS:
        if row.applies(facts):
            turns = row.applied(turns, request, facts)
    return Adapted(
        messages=[_seen(turn.message, facts) for turn in turns],
        lasts=[turn.last for turn in turns],
        tools=request.tools if facts.takes_tools else (),
    )


def needed(facts: TemplateFacts) -> list[str]:
    """Return descriptions of the adaptations that this template needs."""
    rows = [row.description for row in ADAPTATIONS if row.description and row.applies(facts)]
    return [*rows, *(description for description, applies in IN_THE_FORM if applies(facts))]


def _seen(message: Message, facts: TemplateFacts) -> TemplateMessage:
    """Convert a message to the form that the template expects."""
    seen: TemplateMessage = {"role": message.role, "content": _content(message, facts)}
    beside = "calls" if message.tool_calls else "answers"
    if message.reasoning is not None and facts.reasoning_key and beside not in facts.reasoning_hide:
        seen[facts.reasoning_key] = message.reasoning
    if message.tool_calls:
        seen["tool_calls"] = [_seen_call(call, facts) for call in message.tool_calls]
    if message.tool_call_id is not None:
        seen["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        seen["name"] = message.name
    return seen


def _content(message: Message, facts: TemplateFacts) -> str:
    lead = facts.lead if message.role == "assistant" else ""
    content = message.content.removeprefix(lead)
    if message.tool_calls:
        # White space is not text, but a template that shows no text beside calls may treat it as text.
        return content if facts.text_beside_calls == "kept" or content.strip() else ""
    return " " if not content and message.role in facts.refuses_empty else content


def _seen_call(call: ToolCall, facts: TemplateFacts) -> Json:
    arguments: Json = dict(call.arguments)
    if facts.quotes_texts:
        arguments = {name: _escaped(value, facts.quotes_texts) for name, value in call.arguments.items()}
    if facts.arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _escaped(value: Json, quote: str) -> Json:
    """Return a text as Python writes it between these quotes, without them."""
    if not isinstance(value, str):
        return value
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace(quote, f"\\{quote}")
