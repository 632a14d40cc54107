"""Finds where each message ends in the rendered text.

A second rendering shows it, whatever the template does: the same conversation with a mark at the end of each
message's text. If removing the marks gives the original rendering, the marks stand where the texts end. From
there a message reaches to its closer, which is an added token, so the text can be cut before it. See ADR
7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.core.markers import any_of
from start_llm.prompt.template import TemplateMessage

RARE = range(0x10600, 0x10737)
"""Characters of Linear A, which texts do not use and which Python's string literals show unescaped."""
# Kinds of marks: after a text, after the text of a message that also has calls, after a name.
_TEXT, _BESIDE_CALLS, _NAME = "t", "b", "n"

type Render = Callable[[Sequence[TemplateMessage]], str]
type Marking = Callable[[TemplateMessage, str, str], TemplateMessage]


class MessageEnd(NamedTuple):
    """The end of a request's message: its closer begins at character `offset` of the text."""

    message: int
    offset: int


@dataclass(frozen=True, slots=True)
class TurnClosers:
    """Patterns of all added tokens, and of those that end an assistant message."""

    added: re.Pattern[str]
    of_assistant: re.Pattern[str]

    @classmethod
    def of(cls, added: Sequence[str], of_assistant: frozenset[str]) -> TurnClosers:
        return cls(any_of(tuple(added)), any_of(tuple(sorted(of_assistant))))


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        messages: the messages as the template got them.
        lasts: for each message the index of the last request message that it holds a part of.
        tail: character offset at which the generation prompt begins.
    """

    messages: Sequence[TemplateMessage]
    lasts: Sequence[int]
    text: str
    tail: int


@dataclass(frozen=True, slots=True)
class _MessageSpan:
    """A message in the text.

    Attributes:
        start: offset of its text; of a later character of it if the beginning is not known.
        end: offset of the end of its text; None if it is not known.
    """

    start: int
    end: int | None = None


class Located(NamedTuple):
    """The ends of messages in ascending order, and the marking that found them; None if none worked."""

    places: Sequence[MessageEnd]
    marking: Marking | None


def locate(
    rendered: Rendered, render: Render, closers: TurnClosers, markings: Sequence[Marking] | None = None
) -> Located:
    """Find the ends of the messages.

    A message has no end if the template hides its text, moves it, or puts no added token after it.

    Args:
        render: renders messages; for `rendered.messages` it returns `rendered.text`.
        markings: the markings to try; None: all.
    """
    spans, marking = _spans(rendered, render, MARKINGS if markings is None else markings)
    limits = _limits(rendered, spans)
    places: list[MessageEnd] = []
    for index in _whole_prefixes(rendered.lasts):
        end = spans[index].end if index in spans else None
        if end is None:
            continue
        is_reply = rendered.messages[index]["role"] == "assistant"
        closer = (closers.of_assistant if is_reply else closers.added).search(rendered.text, end)
        if closer and closer.start() <= limits[index]:
            places.append(MessageEnd(rendered.lasts[index], closer.start()))
    return Located(places, marking)


def _whole_prefixes(lasts: Sequence[int]) -> Iterator[int]:
    """Yield the indices at which a prefix of the request is complete: no later message holds a part of it."""
    later = [*lasts[1:], max(lasts, default=0) + 1]
    for index in range(len(later) - 2, -1, -1):
        later[index] = min(later[index], later[index + 1])
    highest = -1
    for index, last in enumerate(lasts):
        highest = max(highest, last)
        if 0 <= highest == last < later[index]:
            yield index


def _limits(rendered: Rendered, spans: Mapping[int, _MessageSpan]) -> list[int]:
    """Return for each message the last offset, before the next text, at which its closer may begin."""
    limits: list[int] = []
    limit = rendered.tail
    for index in range(len(rendered.messages) - 1, -1, -1):
        span = spans.get(index)
        is_before_unseen = index + 1 < len(rendered.messages) and index + 1 not in spans
        if is_before_unseen and span and span.end is not None:
            limits.append(min(limit, _after_space(rendered.text, span.end)))
        else:
            limits.append(limit)
        limit = min(limit, span.start - 1) if span else limit
    return limits[::-1]


def _after_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _spans(
    rendered: Rendered, render: Render, markings: Sequence[Marking]
) -> tuple[dict[int, _MessageSpan], Marking | None]:
    """Return the spans of the messages that can be marked, and the marking that worked."""
    free = (char for char in map(chr, RARE) if char not in rendered.text)
    opening, closing = next(free, ""), next(free, "")
    if not closing:
        return {}, None
    mark = re.compile(f"{opening}([0-9]+)([a-z]){closing}")
    tried: list[TemplateMessage] = []
    for marked in markings:
        try:
            messages = [marked(seen, f"{opening}{i}", closing) for i, seen in enumerate(rendered.messages)]
            if messages == tried:
                continue
            tried = messages
            rendering = render(messages)
        except (InvalidRequest, RecursionError, ValueError, TypeError):
            # The template depends on what a text says, or arguments are nested too deeply to be marked or are
            # no JSON text. The next, weaker marking may work.
            continue
        if mark.sub("", rendering) == rendered.text:
            return _measured(rendered, list(mark.finditer(rendering))), marked
    return {}, None


def _measured(rendered: Rendered, matches: Sequence[re.Match[str]]) -> dict[int, _MessageSpan]:
    """Compute spans from the marks in the marked rendering.

    A name may be repeated later, where a result refers to its call, so only its first mark counts.
    """
    spans: dict[int, _MessageSpan] = {}
    named: set[int] = set()
    removed = 0
    for match in matches:
        index, kind = int(match[1]), match[2]
        place = match.start() - removed
        removed += len(match[0])
        span = spans.get(index) or _MessageSpan(place - _length(rendered, index, place))
        is_end = kind != _BESIDE_CALLS and index not in named
        spans[index] = _MessageSpan(span.start, place) if is_end else span
        if kind == _NAME:
            named.add(index)
    return spans


def _length(rendered: Rendered, index: int, place: int) -> int:
    """Return how many characters before the first mark surely belong to the message.

    That is the length of its content if the text has it there, else 1.
    """
    body = str(rendered.messages[index]["content"]).strip()
    return len(body) if body and rendered.text.endswith(body, 0, place) else 1


def mark_contents(seen: TemplateMessage, mark: str, closing: str) -> TemplateMessage:
    content = str(seen["content"])
    if not content.strip():
        return seen
    kind = _BESIDE_CALLS if seen.get("tool_calls") else _TEXT
    return {**seen, "content": _marked(content, f"{mark}{kind}{closing}")}


def mark_everything(seen: TemplateMessage, mark: str, closing: str) -> TemplateMessage:
    """Mark empty texts and the last call too.

    Empty replies are not marked: templates check whether a reply is empty.
    """
    marked = mark_contents(seen, mark, closing)
    if marked is seen and seen["role"] != "assistant":
        return {**seen, "content": _marked(str(seen["content"]), f"{mark}{_TEXT}{closing}")}
    calls = marked.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return marked
    last = dict(cast("dict[str, Json]", calls[-1]))
    function = dict(cast("dict[str, Json]", last["function"]))
    arguments = _mark_leaves(function["arguments"], f"{mark}{_TEXT}{closing}")
    if arguments == function["arguments"]:
        _mark_name(last, function, f"{mark}{_NAME}{closing}")
    function["arguments"] = arguments
    last["function"] = function
    return {**marked, "tool_calls": [*calls[:-1], last]}


def mark_parsed(seen: TemplateMessage, mark: str, closing: str) -> TemplateMessage:
    """Mark everything, and the inside of arguments that are JSON text: a renderer may parse them.

    Raises:
        ValueError, TypeError: they are no JSON text.
    """
    marked = mark_everything(_with_arguments(seen, json.loads), mark, closing)
    return _with_arguments(marked, partial(json.dumps, ensure_ascii=False))


def _with_arguments(seen: TemplateMessage, change: Callable[[Any], Json]) -> TemplateMessage:
    """Return the message with other arguments in its last call."""
    calls = seen.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return seen
    last = cast("dict[str, Json]", calls[-1])
    function = cast("dict[str, Json]", last["function"])
    changed: Json = {**function, "arguments": change(function["arguments"])}
    return {**seen, "tool_calls": [*calls[:-1], {**last, "function": changed}]}


MARKINGS: tuple[Marking, ...] = (mark_everything, mark_parsed, mark_contents)
"""All markings, the strongest first."""


def _mark_name(call: dict[str, Json], function: dict[str, Json], mark: str) -> None:
    """Mark the name of a call, and its id if that holds the name: some templates show the id instead."""
    if f".{function['name']}:" in str(call["id"]):
        call["id"] = f"{call['id']}{mark}"
    function["name"] = f"{function['name']}{mark}"


def _mark_leaves(value: Json, mark: str) -> Json:
    """Return the value with a mark at the end of every text in it."""
    match value:
        case str():
            return _marked(value, mark) if value.strip() else value
        case list():
            return [_mark_leaves(item, mark) for item in value]
        case dict():
            return {key: _mark_leaves(item, mark) for key, item in value.items()}
        case _:
            return value


def _marked(text: str, mark: str) -> str:
    """Insert the mark before white space at the end, which templates trim."""
    body = text.rstrip()
    return body + mark + text[len(body) :]
