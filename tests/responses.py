"""A strict reader of the events of a response: what a client may rely on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

type Event = dict[str, Any]

# Of each kind of item: events of its text, of the part that holds it, and where that stands in the item.
_TEXTS: Mapping[str, tuple[str, str, str | None]] = {
    "message": ("output_text", "content_part", "content_index"),
    "reasoning": ("reasoning_text", "content_part", "content_index"),
    "summary": ("reasoning_summary_text", "reasoning_summary_part", "summary_index"),
    "function_call": ("function_call_arguments", "", None),
    "custom_tool_call": ("custom_tool_call_input", "", None),
}
_WHOLE = {"function_call": "arguments", "custom_tool_call": "input"}
_ENDS = ("response.completed", "response.incomplete", "response.failed")


def named_events(body: bytes) -> Iterator[Event]:
    """The events of a stream, each with a name that its data has too."""
    assert body.endswith(b"\n\n")
    for event in body[:-2].split(b"\n\n"):
        match = re.fullmatch(rb"event: (.+)\ndata: (.+)", event)
        assert match, event
        data = json.loads(match[2])
        assert data["type"] == match[1].decode()
        yield data


def put_together(events: Sequence[Event]) -> dict[str, Any]:
    """The response that the events tell. Every one of them has to be where it belongs."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, second, *rest = [event for event in events if not _is_life_sign(event)]
    *rest, last = rest
    assert (first["type"], last["type"] in _ENDS) == ("response.created", True)
    assert first["response"] == second["response"]
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert {event["response"]["id"] for event in (first, second, last)} == {response["id"]}
    items: list[dict[str, Any]] = []
    while rest:
        rest = _read_item(rest, items)
    assert items == response["output"]
    return response


def _is_life_sign(event: Event) -> bool:
    return event["type"] == "response.in_progress" and event["sequence_number"] != 1


def _read_item(events: list[Event], items: list[dict[str, Any]]) -> list[Event]:
    """Adds an item, and returns the events behind it."""
    added, *rest = events
    assert added["type"] == "response.output_item.added"
    assert (added["output_index"], added["item"]["status"]) == (len(items), "in_progress")
    kind = added["item"]["type"]
    if kind == "reasoning" and rest[0]["type"].startswith("response.reasoning_summary"):
        kind = "summary"
    text, part, place = _TEXTS[kind]
    where: dict[str, Any] = {"item_id": added["item"]["id"], "output_index": len(items)}
    where |= {place: 0} if place else {}
    if part:
        _expect(rest.pop(0), f"{part}.added", where)
    written = "".join(_deltas(rest, f"{text}.delta", where))
    done = rest.pop(0)
    _expect(done, f"{text}.done", where)
    assert done[_WHOLE.get(kind, "text")] == written
    if part:
        ended = rest.pop(0)
        _expect(ended, f"{part}.done", where)
        assert ended["part"]["text"] == written
    items.append(_ended_item(rest.pop(0), added["item"], kind, written))
    return rest


def _deltas(events: list[Event], name: str, where: Mapping[str, Any]) -> Iterator[str]:
    """Takes them off the list."""
    while events[0]["type"] == f"response.{name}":
        delta = events.pop(0)
        _expect(delta, name, where)
        assert delta["delta"], "an empty text is no change"
        yield delta["delta"]


def _expect(event: Event, name: str, where: Mapping[str, Any]) -> None:
    assert event["type"] == f"response.{name}"
    assert {key: event[key] for key in where} == where


def _ended_item(event: Event, added: Mapping[str, Any], kind: str, written: str) -> dict[str, Any]:
    assert event["type"] == "response.output_item.done"
    item = event["item"]
    parts = item["summary"] if kind == "summary" else item.get("content")
    if kind in _WHOLE:
        assert item[_WHOLE[kind]] == written
        assert re.fullmatch(r"[A-Za-z0-9]+", item["call_id"])
        assert {**item, "status": "in_progress", _WHOLE[kind]: ""} == added
    else:
        (part,) = parts
        assert part["text"] == written
        assert (item["id"], item["type"]) == (added["id"], added["type"])
    assert item["status"] in ("completed", "incomplete")
    return item
