"""A strict reader of the events of Anthropic's streams."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

type Json = dict[str, Any]

_STARTS = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": {"input": {}}}
_DELTAS = {
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "text": {"text_delta": "text"},
    "tool_use": {"input_json_delta": "partial_json"},
}


@dataclass
class Blocks:
    """The blocks of a stream. Whatever its grammar does not allow fails."""

    content: list[Json] = field(default_factory=list)
    _is_open: bool = False
    _partial: str = ""

    def take(self, event: Json) -> None:
        steps = {
            "content_block_start": self._start,
            "content_block_delta": self._delta,
            "content_block_stop": self._stop,
        }
        steps[event["type"]](event)

    def end(self) -> list[Json]:
        assert not self._is_open
        return self.content

    def _start(self, event: Json) -> None:
        assert not self._is_open
        assert event["index"] == len(self.content)
        block = event["content_block"]
        assert block.items() >= _STARTS[block["type"]].items()
        self.content.append(dict(block))
        self._is_open, self._partial = True, ""

    def _delta(self, event: Json) -> None:
        block, delta = self._current(event), event["delta"]
        name = _DELTAS[block["type"]][delta["type"]]
        assert delta.keys() == {"type", name}
        if name == "partial_json":
            self._partial += delta[name]
        else:
            block[name] += delta[name]

    def _stop(self, event: Json) -> None:
        block = self._current(event)
        if block["type"] == "tool_use":
            block["input"] = _complete(self._partial)
        self._is_open = False

    def _current(self, event: Json) -> Json:
        assert self._is_open
        assert event["index"] == len(self.content) - 1
        return self.content[-1]


def _complete(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"raw": text}


def put_together(events: Sequence[Json]) -> Json:
    """The message of a stream without pings."""
    start, *middle, delta, stop = events
    assert (start["type"], delta["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    blocks = Blocks()
    for event in middle:
        blocks.take(event)
    return {**start["message"], "content": blocks.end(), **delta["delta"], "usage": delta["usage"]}


def named_events(body: bytes) -> list[Json]:
    """The events of a body, each under its own name."""
    assert body.endswith(b"\n\n")
    read: list[Json] = []
    for event in body[:-2].decode().split("\n\n"):
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def without_ids(message: Json) -> Json:
    """What two replies with the same words have in common."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert re.fullmatch(r"msg_[A-Za-z0-9]+", message["id"])
    assert all(re.fullmatch(r"toolu_[A-Za-z0-9]+", one) for one in ids)
    assert len(set(ids)) == len(ids)
    return {**{name: value for name, value in message.items() if name != "id"}, "content": content}
