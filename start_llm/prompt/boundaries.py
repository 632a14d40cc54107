"""Where each message ends in the rendered text.

One more rendering tells, whatever the template does: the same conversation with a mark at the end of each
message's text. If it is the original once the marks are taken out, the marks stand where the texts end. From
there a message reaches to its closer, which is an added token; a text may be cut in front of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.prompt.template import Seen

_RARE = range(0x10600, 0x10737)
"""Signs of Linear A, which no text has, and which Python's literals show as they are."""
# Kinds of marks: behind a text, behind the text of a message that has calls too, behind a name.
_TEXT, _BESIDE_CALLS, _NAME = "t", "b", "n"

type Render = Callable[[Sequence[Seen]], str]
type Marking = Callable[[Seen, str, str], Seen]


class Place(NamedTuple):
    """A message of the request ends at character `offset` of the text, where its closer begins."""

    message: int
    offset: int


@dataclass(frozen=True, slots=True)
class Closers:
    """Added tokens: all of them, and those that end an assistant's message."""

    added: re.Pattern[str]
    of_assistant: re.Pattern[str]

    @classmethod
    def of(cls, added: Sequence[str], of_assistant: frozenset[str]) -> Closers:
        return cls(_any_of(added), _any_of(sorted(of_assistant)))


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        messages: as the template got them.
        lasts: for each message the last message of the request that it holds a part of.
        text: the whole text.
        tail: the character of it at which the tail begins, which makes the model answer.
    """

    messages: Sequence[Seen]
    lasts: Sequence[int]
    text: str
    tail: int


@dataclass(frozen=True, slots=True)
class _Span:
    """A message in the text.

    Attributes:
        start: a character of its text, the first one if that can be told.
        end: where its text ends; None if that cannot be told.
    """

    start: int
    end: int | None = None


class Located(NamedTuple):
    """The ends of messages in a text, in ascending order, and the marking that told; None: none did."""

    places: Sequence[Place]
    marking: Marking | None


def locate(
    rendered: Rendered, render: Render, closers: Closers, markings: Sequence[Marking] | None = None
) -> Located:
    """Where the messages end.

    Args:
        render: gives `rendered.text` for `rendered.messages`.
        markings: that may tell; None: any.

    A message has no place if the template hides its text, moves it, or puts no added token behind it.
    """
    spans, marking = _spans(rendered, render, MARKINGS if markings is None else markings)
    limits = _limits(rendered, spans)
    places: list[Place] = []
    for index in _whole_prefixes(rendered.lasts):
        end = spans[index].end if index in spans else None
        if end is None:
            continue
        is_reply = rendered.messages[index]["role"] == "assistant"
        closer = (closers.of_assistant if is_reply else closers.added).search(rendered.text, end)
        if closer and closer.start() <= limits[index]:
            places.append(Place(rendered.lasts[index], closer.start()))
    return Located(places, marking)


def _whole_prefixes(lasts: Sequence[int]) -> Iterator[int]:
    """Indices at which everything so far is behind us: nothing of an earlier message comes later."""
    later = [*lasts[1:], max(lasts, default=0) + 1]
    for index in range(len(later) - 2, -1, -1):
        later[index] = min(later[index], later[index + 1])
    highest = -1
    for index, last in enumerate(lasts):
        highest = max(highest, last)
        if 0 <= highest == last < later[index]:
            yield index


def _limits(rendered: Rendered, spans: Mapping[int, _Span]) -> list[int]:
    """For each message the last position at which its closer may begin: in front of the texts behind it."""
    limits: list[int] = []
    limit = rendered.tail
    for index in range(len(rendered.messages) - 1, -1, -1):
        span = spans.get(index)
        is_before_unseen = index + 1 < len(rendered.messages) and index + 1 not in spans
        if is_before_unseen and span and span.end is not None:
            limits.append(min(limit, _behind_space(rendered.text, span.end)))
        else:
            limits.append(limit)
        limit = min(limit, span.start - 1) if span else limit
    return limits[::-1]


def _behind_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _spans(
    rendered: Rendered, render: Render, markings: Sequence[Marking]
) -> tuple[dict[int, _Span], Marking | None]:
    """The messages that can be marked, and how."""
    free = (char for char in map(chr, _RARE) if char not in rendered.text)
    opening, closing = next(free, ""), next(free, "")
    if not closing:
        return {}, None
    mark = re.compile(f"{opening}([0-9]+)([a-z]){closing}")
    for marked in markings:
        try:
            rendering = render(
                [marked(seen, f"{opening}{i}", closing) for i, seen in enumerate(rendered.messages)]
            )
        except (InvalidRequest, RecursionError):
            # The template looks at what a text says, or arguments are nested too deeply to be marked; the
            # next, weaker marking may pass.
            continue
        if mark.sub("", rendering) == rendered.text:
            return _measured(rendered, list(mark.finditer(rendering))), marked
    return {}, None


def _measured(rendered: Rendered, found: Sequence[re.Match[str]]) -> dict[int, _Span]:
    """A name may be repeated further on, where a result refers to its call: there its first mark counts."""
    spans: dict[int, _Span] = {}
    named: set[int] = set()
    removed = 0
    for match in found:
        index, kind = int(match[1]), match[2]
        place = match.start() - removed
        removed += len(match[0])
        span = spans.get(index) or _Span(place - _length(rendered, index, place))
        is_end = kind != _BESIDE_CALLS and index not in named
        spans[index] = _Span(span.start, place) if is_end else span
        if kind == _NAME:
            named.add(index)
    return spans


def _length(rendered: Rendered, index: int, place: int) -> int:
    """Characters in front of the first mark that are surely of the message: its content, if it ends here."""
    body = str(rendered.messages[index]["content"]).strip()
    return len(body) if body and rendered.text.endswith(body, 0, place) else 1


def mark_contents(seen: Seen, mark: str, closing: str) -> Seen:
    content = str(seen["content"])
    if not content.strip():
        return seen
    kind = _BESIDE_CALLS if seen.get("tool_calls") else _TEXT
    return {**seen, "content": _marked(content, f"{mark}{kind}{closing}")}


def mark_everything(seen: Seen, mark: str, closing: str) -> Seen:
    """Calls, and empty texts too, but for empty replies: templates ask whether a reply is empty."""
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


MARKINGS: tuple[Marking, ...] = (mark_everything, mark_contents)
"""The strongest first."""


def _mark_name(call: dict[str, Json], function: dict[str, Json], mark: str) -> None:
    """Some templates show an id that holds the name instead of the name."""
    if f".{function['name']}:" in str(call["id"]):
        call["id"] = f"{call['id']}{mark}"
    function["name"] = f"{function['name']}{mark}"


def _mark_leaves(value: Json, mark: str) -> Json:
    """Every text in a value, marked at its end."""
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
    """The mark stands in front of white space at the end, which templates trim."""
    body = text.rstrip()
    return body + mark + text[len(body) :]
