"""Streams as a client reads them: events out of bytes, and what all protocols have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"
_OTHER_EACH_TIME = re.compile(r"(^|_)id$|^created$|_at$|^sequence_number$|^signature$|^encrypted_content$")

COMPLAINTS = (AssertionError, KeyError, IndexError, TypeError, ValueError)
"""Errors that a reader raises if it meets something that the grammar does not have."""


@dataclass(frozen=True, slots=True)
class StreamContent:
    """The content of a stream.

    Attributes:
        body: of the reply, as if it had not been streamed; None if it failed.
        failure: the message of the failure that ended it.
        parts: kinds and texts in their order, where the body does not tell it.
    """

    body: Any = None
    failure: str | None = None
    parts: tuple[tuple[str, str], ...] = ()


def events_in(body: bytes) -> Iterator[Any]:
    """The data of each event. One with a name has it in its data too, and nothing else stands there."""
    assert body.endswith(b"\n\n"), "the last event is cut"
    for event in body[:-2].split(b"\n\n"):
        match = re.fullmatch(rb"(?:event: ([a-z_.]+)\n)?data: ([^\n]+)", event)
        assert match, event
        data: Any = DONE if match[2] == DONE.encode() else json.loads(match[2])
        if match[1]:
            assert data["type"] == match[1].decode()
        yield data


def bare(value: Any) -> Any:
    """Without ids, times and seals, which are others each time."""
    if isinstance(value, list):
        return [bare(item) for item in value]
    if isinstance(value, dict):
        return {name: bare(item) for name, item in value.items() if not _OTHER_EACH_TIME.search(name)}
    return value


def expect(members: Mapping[str, Any], **expected: Any) -> None:
    """Each of these members has this value."""
    assert {name: members.get(name) for name in expected} == expected
