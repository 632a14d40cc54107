"""How clients spell a conversation that they send again: each changes something, at every request anew.

What they change was seen in the traffic of coding agents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from typing import Any

from tests.agents.agent_account import TOOLS, Message, Tool

type Spell = Callable[[Sequence[Message], int], list[Message]]
"""Messages as a request of that number has them."""

REASONING, CALLS, TEXT = "reasoning_content", "tool_calls", "content"
PARALLEL_CALLS = 3
FIRST_EDITED = 3


def _as_they_are(messages: Sequence[Message], _: int) -> list[Message]:
    return list(messages)


class Change(Enum):
    """What it means to a model that a client spells something in another way.

    Attributes:
        SPELLING: it says nothing new, and what was computed of the earlier spelling can be used.
        NEWS: it says how things are now. The model has to read the lines that changed.
        PREFIX: it says nothing new, but what was computed behind the earlier spelling cannot be used: the
            model was shown a message there that is gone, or nothing proves that the earlier spelling was this
            conversation's.
        CONTENT: it is new text.
    """

    SPELLING = auto()
    NEWS = auto()
    PREFIX = auto()
    CONTENT = auto()


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client's behaviour.

    Attributes:
        title: what it changes.
        spell: its messages.
        changes: what that means to a model.
        tools: its tools in the request of that number.
        calls: that a fixed reply makes.
        has_text: a fixed reply has a text beside its calls.
        is_about_calls: its replies are fixed ones, even where the server's own are asked for elsewhere.
        hears: parts that the server's own replies must have; where there are any, no reply is a fixed one.
        asks_titles: it asks for a title between turns.
        is_named: it says which conversation this is.
    """

    title: str = ""
    spell: Spell = _as_they_are
    changes: Change = Change.SPELLING
    tools: Callable[[int], Sequence[Tool]] = lambda _: TOOLS
    calls: int = 1
    has_text: bool = True
    is_about_calls: bool = False
    hears: tuple[str, ...] = ()
    asks_titles: bool = False
    is_named: bool = False

    @property
    def is_scripted(self) -> bool:
        """It takes a model that says more than random tokens."""
        return REASONING in self.hears or CALLS in self.hears


PLAIN = Client()


def new_lines(messages: Sequence[Message], before: Sequence[Message]) -> list[str]:
    """Lines that no earlier message has, in their order."""
    known = {line for message in before for line in _lines(message)}
    return [line for message in messages for line in _lines(message) if line not in known]


def _lines(message: Message) -> list[str]:
    content: str = message.get("content") or ""
    return content.split("\n")


# ---------------------------------------------------------------------------------------- metadata, reasoning


def with_billing_header(messages: Sequence[Message], number: int) -> list[Message]:
    """Claude Code 2.1.126: the first line of the system prompt has another `cch` in every request."""
    line = f"x-anthropic-billing-header: cc_version=2.1.126.d79; cc_entrypoint=cli; cch={number:05x};"
    return _first(messages, lambda text: f"{line}\n{text}")


def _metadata(number: int | None) -> str:
    line = "" if number is None else f'  "message_id": "{number:012x}",\n'
    return f'Conversation info:\n```json\n{{\n{line}  "sender": "somebody"\n}}\n```\n\n'


def _with_envelopes(newest: Callable[[int], str], older: str) -> Spell:
    """OpenClaw: what stands before its user's words, and what is left of it in the next request."""

    def spelled(messages: Sequence[Message], number: int) -> list[Message]:
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        return _questions(messages, lambda at, text: (newest(number) if at == last else older) + text)

    return spelled


def _questions(messages: Sequence[Message], spell: Callable[[int, str], str]) -> list[Message]:
    """The messages, with each user's text as `spell` writes it at its place."""
    return [
        {**message, "content": spell(at, message["content"])} if message["role"] == "user" else message
        for at, message in enumerate(messages)
    ]


def _hint(number: int) -> str:
    return _metadata(0) + f"[message_id: {number:012x}]\n"


def _deferred_tools(number: int) -> str:
    """OpenClaw's gateway: a tool that it has not when it wakes by itself."""
    lines = ["theme (core): Changes how it looks.", "transcripts (core): Reads notes.", "tts (core): Speaks."]
    there = [f"- {line}\n" for line in lines if number % 2 == 0 or "transcripts" not in line]
    return f"### Deferred Tool Schemas\nAvailable deferred-schema tools:\n{''.join(there)}"


def _without_reasoning(messages: Sequence[Message], _: int) -> list[Message]:
    return [_with_reasoning(message, None) for message in messages]


def _reasoning_as_reasoning(messages: Sequence[Message], _: int) -> list[Message]:
    return [_with_reasoning(message, "reasoning") for message in messages]


def _reasoning_in_the_text(messages: Sequence[Message], _: int) -> list[Message]:
    def spelled(message: Message) -> Message:
        reasoning = message.get("reasoning_content")
        if not reasoning:
            return message
        content = f"<think>\n{reasoning.strip()}\n</think>\n\n{message['content']}"
        return {**_with_reasoning(message, None), "content": content}

    return [spelled(message) for message in messages]


def _reasoning_now_and_then(messages: Sequence[Message], number: int) -> list[Message]:
    return _without_reasoning(messages, number) if number % 2 else list(messages)


def _with_reasoning(message: Message, field: str | None) -> Message:
    """Its reasoning in that field, or in none."""
    others = {key: value for key, value in message.items() if key != "reasoning_content"}
    reasoning = message.get("reasoning_content")
    return others if field is None or reasoning is None else {**others, field: reasoning}


# ------------------------------------------------------------------------------------- calls, contents, tools


def with_other_arguments(messages: Sequence[Message], number: int) -> list[Message]:
    """The same arguments, as another JSON library writes them."""
    return [_respelt(message, number) if message.get("tool_calls") else message for message in messages]


def _respelt(message: Message, number: int) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"], number)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _json(text: str, number: int) -> str:
    arguments = json.loads(text)
    match number % 3:
        case 0:
            return json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
        case 1:
            return json.dumps(_whole_numbers(arguments), indent=2)
        case _:
            return json.dumps(dict(reversed(arguments.items())), ensure_ascii=False)


def _whole_numbers(arguments: dict[str, Any]) -> dict[str, Any]:
    """1000.0 is written 1000."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in arguments.items()
    }


def with_other_nothing(messages: Sequence[Message], number: int) -> list[Message]:
    """The content of a reply that is calls alone: null, an empty text, or none."""
    return [
        _with_nothing(message, (number + index) % 3) if message["content"] == "" else message
        for index, message in enumerate(messages)
    ]


def _with_nothing(message: Message, kind: int) -> Message:
    others = {key: value for key, value in message.items() if key != "content"}
    return [{**others, "content": None}, {**others, "content": ""}, others][kind]


def with_lists(messages: Sequence[Message], number: int) -> list[Message]:
    """Every other content is a list of one part, and in the next request a plain text."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if (number + index) % 2
        else message
        for index, message in enumerate(messages)
    ]


def with_results_in_other_order(messages: Sequence[Message], number: int) -> list[Message]:
    """Results of parallel calls, as they happened to come in: in the next request in another order."""
    ordered: list[Message] = []
    for is_result, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        neighbours = list(run)
        ordered += _turned(neighbours, number) if is_result else neighbours
    return ordered


def _other_tools(number: int) -> list[Tool]:
    return _turned(TOOLS, number)


def _turned[Item](items: Sequence[Item], by: int) -> list[Item]:
    by %= len(items)
    return [*items[by:], *items[:by]]


# ---------------------------------------------------------------------------- what says how things are now


def _with_line_in_front(line: Callable[[int], str]) -> Spell:
    """The system prompt begins with it."""
    return lambda messages, number: _first(messages, lambda text: f"{line(number)}\n{text}")


def _with_line_after(line: Callable[[int], str]) -> Spell:
    """The system prompt ends with it."""
    return lambda messages, number: _first(messages, lambda text: f"{text}\n{line(number)}")


def _first(messages: Sequence[Message], spell: Callable[[str], str], place: int = 0) -> list[Message]:
    """The messages, with the text of the system prompt, or of another place, as `spell` writes it."""
    spelled = {**messages[place], "content": spell(messages[place]["content"])}
    return [*messages[:place], spelled, *messages[place + 1 :]]


def _clock(number: int) -> str:
    return f"Current time is 10:{number:02}."


def _date(number: int) -> str:
    """It is midnight before the third request."""
    return f"Today's date: 2026-11-{20 + (number > 1)}"


def _inbound(number: int) -> str:
    content = json.dumps({"schema": "inbound", "channel": f"chat{number}"}, indent=2)
    return f"## Inbound Context (trusted metadata)\nOf this message.\n\n```json\n{content}\n```"


def _inbound_at_times(number: int) -> str:
    return "" if number % 2 else _inbound(0)


def _git_status(number: int) -> str:
    return (
        "gitStatus: This is the git status at the start of the conversation.\n\nCurrent branch: main\n\n"
        f"Status:\n M file{number}.py\n\nRecent commits:\n{number:07x} A change\n"
    )


def _with_statistics(messages: Sequence[Message], number: int) -> list[Message]:
    """Add statistics to the first question, as a sub-agent shows the time and tokens it took so far."""
    return _first(messages, lambda text: f"{text}\nStats: runtime {number}s", place=1)


def _with_carrier(messages: Sequence[Message], number: int) -> list[Message]:
    """OpenClaw: a user message at the end of each request that the next one does not have."""
    context = f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nRuns: {number}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    return [*messages, {"role": "user", "content": context}]


def _temporal_context(number: int) -> str:
    """OpenClaw: midnight comes, and the machine moves, before the third request."""
    date, zone = f"2026-11-{20 + (number > 1)}", "Europe/Vienna" if number > 1 else "UTC"
    return f"## Temporal Context\nCurrent date: {date}\nTime zone: {zone}"


def _with_changing_reminder(messages: Sequence[Message], number: int) -> list[Message]:
    """Claude Code 2.1.197: the first question begins with it; who continues a session reads it anew."""
    reminder = (
        "<system-reminder>\nYou can use the following context:\n# claudeMd\nThe project's instructions:\n\n"
        f"Use tabs.\nTest what you change.\nThis is version {number}.\n# currentDate\n"
        f"Today's date is 2026-11-{20 + number}.\n\n      IMPORTANT: this context may not be relevant.\n"
        "</system-reminder>\n\n"
    )
    return _first(messages, lambda text: reminder + text, place=1)


# ------------------------------------------------------------------------------------- what they add or edit


def _with_reminders(messages: Sequence[Message], _: int) -> list[Message]:
    """Each question has one, and keeps it."""
    reminder = "\n<system-reminder>\nStep {}.\n</system-reminder>"
    return _questions(messages, lambda at, text: text + reminder.format(at))


def _with_system_messages(messages: Sequence[Message], _: int) -> list[Message]:
    """Claude Code: after each question, and there they stay."""
    extended: list[Message] = []
    for index, message in enumerate(messages):
        extended.append(message)
        if message["role"] == "user":
            text = f"The date has changed. Today's date is now 2026-11-{index + 1:02}."
            extended.append({"role": "system", "content": text})
    return extended


def _with_edited_result(messages: Sequence[Message], number: int) -> list[Message]:
    """From the fourth request on, the first result says something else."""
    edited = next((index for index, message in enumerate(messages) if message["role"] == "tool"), None)
    if number < FIRST_EDITED or edited is None:
        return list(messages)
    return _first(messages, lambda _: "This result was cleared.", place=edited)


def _envelopes() -> dict[str, Client]:
    """By agents that call tools, by named conversations without any, and where nothing proves anything."""
    spells = {
        "hint line vanishes": ("hint", _with_envelopes(_hint, _metadata(0))),
        "envelope vanishes": ("envelope", _with_envelopes(_hint, "")),
        "envelope is refreshed": ("refreshed", _with_envelopes(_hint, _hint(0))),
    }
    clients: dict[str, Client] = {}
    for title, (name, spell) in spells.items():
        clients[name] = Client(title=title, spell=spell, hears=(CALLS,))
        clients[f"{name}-named"] = Client(
            title=f"{title}, named, no calls", spell=spell, hears=(TEXT,), is_named=True
        )
        clients[f"{name}-unproven"] = Client(
            title=f"{title}, unproven", spell=spell, hears=(TEXT,), changes=Change.PREFIX
        )
    return clients


CLIENTS: dict[str, Client] = {
    "billing": Client(title="billing header changes", spell=with_billing_header),
    "reasoning-stripped": Client(
        title="reasoning stripped", spell=_without_reasoning, hears=(REASONING, CALLS)
    ),
    "reasoning-kept": Client(title="reasoning as reasoning_content", hears=(REASONING, CALLS)),
    "reasoning-renamed": Client(
        title="reasoning as reasoning", spell=_reasoning_as_reasoning, hears=(REASONING, CALLS)
    ),
    "reasoning-in-text": Client(
        title="reasoning in the text", spell=_reasoning_in_the_text, hears=(REASONING, CALLS)
    ),
    "reasoning-at-times": Client(
        title="reasoning now and then", spell=_reasoning_now_and_then, hears=(REASONING, CALLS)
    ),
    "arguments": Client(title="own arguments re-serialised", spell=with_other_arguments, hears=(CALLS,)),
    "no-content": Client(
        title="content null, empty, absent", spell=with_other_nothing, has_text=False, is_about_calls=True
    ),
    "lists": Client(title="content text or list", spell=with_lists),
    "tools": Client(title="tools in another order", tools=_other_tools),
    "results": Client(
        title="parallel results in another order",
        spell=with_results_in_other_order,
        calls=PARALLEL_CALLS,
        is_about_calls=True,
    ),
    # After a reply that the server wrote: the same words with another id may be another client's.
    "message-id": Client(
        title="message id vanishes", spell=_with_envelopes(_metadata, _metadata(None)), hears=(CALLS,)
    ),
    **_envelopes(),
    "deferred": Client(
        title="list of tools changes",
        spell=_with_line_after(_deferred_tools),
        hears=(CALLS,),
        changes=Change.NEWS,
    ),
    "title": Client(title="a title in between", asks_titles=True),
    "clock-first": Client(
        title="clock before the system prompt", spell=_with_line_in_front(_clock), changes=Change.NEWS
    ),
    "clock-last": Client(
        title="clock after the system prompt", spell=_with_line_after(_clock), changes=Change.NEWS
    ),
    "midnight": Client(title="date at midnight", spell=_with_line_after(_date), changes=Change.NEWS),
    "statistics": Client(
        title="run statistics change", spell=_with_statistics, hears=(CALLS,), changes=Change.NEWS
    ),
    # One chat's own: they may change after a reply that the server wrote.
    "inbound": Client(
        title="inbound block changes", spell=_with_line_after(_inbound), hears=(CALLS,), changes=Change.NEWS
    ),
    "inbound-at-times": Client(
        title="inbound block now and then",
        spell=_with_line_after(_inbound_at_times),
        hears=(CALLS,),
        changes=Change.NEWS,
    ),
    "git": Client(
        title="git status changes", spell=_with_line_after(_git_status), hears=(CALLS,), changes=Change.NEWS
    ),
    "temporal": Client(
        title="date and time zone change", spell=_with_line_after(_temporal_context), changes=Change.NEWS
    ),
    "reminder": Client(
        title="first reminder changes", spell=_with_changing_reminder, hears=(CALLS,), changes=Change.NEWS
    ),
    "reminders": Client(title="a reminder in each question", spell=_with_reminders, changes=Change.CONTENT),
    "systems": Client(
        title="a system message after each question", spell=_with_system_messages, changes=Change.CONTENT
    ),
    "edit": Client(title="an old result edited", spell=_with_edited_result, changes=Change.CONTENT),
    "carrier": Client(title="carrier at the end", spell=_with_carrier, hears=(CALLS,), changes=Change.PREFIX),
}
