"""The grammar of Anthropic's messages: what a client may rely on. Pings may stand anywhere after the start.

message_start  (content_block_start  content_block_delta*  content_block_stop)*  message_delta  message_stop
message_start  …  error
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.grammar import wire
from tests.grammar.wire import StreamContent, expect

type Json = dict[str, Any]

_PING = {"type": "ping"}
_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
_USAGE = {
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "cache_creation",
    "output_tokens",
    "output_tokens_details",
}
_STARTS = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
    "server_tool_use": {"input": {}},
    "web_search_tool_result": {},
}
_DELTAS = {
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "text": {"text_delta": "text"},
    "tool_use": {"input_json_delta": "partial_json"},
    "server_tool_use": {"input_json_delta": "partial_json"},
}


@dataclass
class Blocks:
    """The blocks of a stream. Whatever its grammar does not allow fails."""

    content: list[Json] = field(default_factory=list)
    _is_open: bool = False
    _partial: str = ""
    _last: str = ""

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
        expect(block, **_STARTS[block["type"]])
        if block["type"] == "tool_use":
            assert re.fullmatch(r"toolu_[A-Za-z0-9]+", block["id"])
            assert block["id"] not in [earlier.get("id") for earlier in self.content]
        self.content.append(dict(block))
        self._is_open, self._partial, self._last = True, "", ""

    def _delta(self, event: Json) -> None:
        block, delta = self._current(event), event["delta"]
        name = _DELTAS[block["type"]][delta["type"]]
        assert delta.keys() == {"type", name}
        assert delta[name], "an empty text is no change"
        assert self._last != "signature", "a signature ends reasoning"
        self._last = name
        if name == "partial_json":
            self._partial += delta[name]
        else:
            block[name] += delta[name]

    def _stop(self, event: Json) -> None:
        block = self._current(event)
        if block["type"] == "web_search_tool_result":
            assert block["tool_use_id"] in [earlier.get("id") for earlier in self.content[:-1]]
        elif block["type"] in ("tool_use", "server_tool_use"):
            block["input"] = _complete(self._partial)
        elif block["type"] == "thinking":
            assert self._last == "signature", "reasoning is not sealed"
        else:
            assert block["text"].strip(), "clients drop a text of nothing but white space"
        self._is_open = False

    def _current(self, event: Json) -> Json:
        assert self._is_open
        assert event["index"] == len(self.content) - 1
        return self.content[-1]


def _complete(text: str) -> Any:
    """Of a call that was cut in its arguments, what was written of them."""
    if not text:
        return {}
    try:
        return json.loads(text)
    except ValueError:
        return {"raw": text}


def read(events: Sequence[Json]) -> StreamContent:
    """Return the content of the stream. Everything that its grammar does not allow fails."""
    start, *middle, last = [event for event in events if event != _PING]
    assert events[0] == start, "a ping comes before the start"
    assert events[-1] == last, "something follows the end"
    message = _started(start)
    blocks = Blocks()
    if last["type"] == "error":
        for event in middle:
            blocks.take(event)
        assert last["error"].keys() == {"type", "message"}
        assert last["request_id"] == message["id"]
        return StreamContent(failure=last["error"]["message"])
    *middle, delta = middle
    expect(last, type="message_stop")
    expect(delta, type="message_delta")
    for event in middle:
        blocks.take(event)
    content = blocks.end()
    assert (delta["delta"]["stop_reason"] == "tool_use") <= any(row["type"] == "tool_use" for row in content)
    return StreamContent(
        {**message, "content": content, **_ended(delta), "usage": {**message["usage"], **delta["usage"]}}
    )


def put_together(events: Sequence[Json]) -> Json:
    """The message of a stream that has not failed."""
    content = read(events)
    assert content.failure is None
    return content.body


def _started(event: Json) -> Json:
    message = event["message"]
    expect(event, type="message_start")
    expect(message, type="message", role="assistant", content=[], stop_reason=None, stop_sequence=None)
    assert message["usage"].keys() == _USAGE | {"service_tier"}
    assert (message["usage"]["cache_read_input_tokens"], message["usage"]["output_tokens"]) == (0, 0)
    assert re.fullmatch(r"msg_[A-Za-z0-9]+", message["id"])
    return message


def _ended(event: Json) -> Json:
    """Why it ended. Usage is sent at the end, and counts the prompt that the start has counted."""
    delta, usage = event["delta"], event["usage"]
    assert delta.keys() == {"stop_reason", "stop_sequence"}
    assert delta["stop_reason"] in _REASONS
    assert (delta["stop_sequence"] is not None) == (delta["stop_reason"] == "stop_sequence")
    assert usage.keys() == _USAGE
    return delta


def named_events(body: bytes) -> list[Json]:
    """The events of a body, each under its own name."""
    assert body.count(b"event: ") == body.count(b"data: "), "an event has no name"
    return list(wire.events_in(body))


def without_ids(message: Json) -> Json:
    """Return what replies with the same words have in common. A signature contains its reply's name."""
    content = [
        {name: bool(value) if name == "signature" else value for name, value in block.items() if name != "id"}
        for block in message["content"]
    ]
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert re.fullmatch(r"msg_[A-Za-z0-9]+", message["id"])
    assert all(re.fullmatch(r"toolu_[A-Za-z0-9]+", call_id) for call_id in ids)
    assert len(set(ids)) == len(ids)
    return {**{name: value for name, value in message.items() if name != "id"}, "content": content}
