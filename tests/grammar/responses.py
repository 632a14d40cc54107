"""The grammar of a response's events: what a client may rely on. Each has the next number.

created  in_progress  (item | in_progress)*  (completed | incomplete | failed)
item:    output_item.added  part.added?  delta*  done  part.done?  output_item.done
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.grammar import wire
from tests.grammar.wire import StreamContent, expect

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
_BUILT_IN = {"local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation"}
"""Items without events of their text, and the member that holds their arguments."""
_GROWS = {"status", "output", "usage", "error", "incomplete_details", "completed_at"}
_ENDS = ("response.completed", "response.incomplete", "response.failed")


def named_events(body: bytes) -> Iterator[Event]:
    """The events of a stream, each with a name that its data has too."""
    assert body.count(b"event: ") == body.count(b"data: "), "an event has no name"
    return wire.events_in(body)


def read(events: Sequence[Event]) -> StreamContent:
    """Return the content of the stream. Everything that its grammar does not allow fails."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, second, *rest = events
    expect(first, type="response.created")
    expect(second, type="response.in_progress")
    assert first["response"] == second["response"]
    expect(first["response"], status="in_progress", output=[], usage=None, error=None)
    assert re.fullmatch(r"resp_[A-Za-z0-9]+", first["response"]["id"])
    *rest, last = rest
    assert last["type"] in _ENDS, "it does not end"
    response, items = last["response"], list[dict[str, Any]]()
    assert last["type"] == f"response.{response['status']}"
    _same_head(first["response"], response)
    rest = _without_life(rest, first["response"])
    failed = response["status"] == "failed"
    while rest:
        rest = _read_item(rest, items, may_break_off=failed)
    assert items == response["output"]
    assert len({item["id"] for item in items}) == len(items)
    if failed:
        return StreamContent(failure=response["error"]["message"])
    _check_usage(response)
    return StreamContent(response)


def put_together(events: Sequence[Event]) -> dict[str, Any]:
    """The response of a stream that has not failed."""
    content = read(events)
    assert content.failure is None
    return content.body


def _same_head(first: Mapping[str, Any], last: Mapping[str, Any]) -> None:
    """A response has at its end everything that it had at first, except its outcome."""
    assert {name: last[name] for name in first if name not in _GROWS} == {
        name: value for name, value in first.items() if name not in _GROWS
    }


def _check_usage(response: Mapping[str, Any]) -> None:
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 <= usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]
    assert 0 <= usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]
    incomplete = {"reason": "max_output_tokens"} if response["status"] == "incomplete" else None
    expect(response, incomplete_details=incomplete, error=None)


def _without_life(events: Sequence[Event], head: Mapping[str, Any]) -> list[Event]:
    """Signs of life tell the items that are done; they are looked at, and left out."""
    done = 0
    kept: list[Event] = []
    for event in events:
        if event["type"] == "response.in_progress":
            expect(event["response"], status="in_progress")
            _same_head(head, event["response"])
            assert len(event["response"]["output"]) == done
            continue
        done += event["type"] == "response.output_item.done"
        kept.append(event)
    return kept


def _read_item(events: list[Event], items: list[dict[str, Any]], *, may_break_off: bool) -> list[Event]:
    """Adds an item, and returns the events after it; none if they break off."""
    try:
        return _read_whole_item(list(events), items)
    except IndexError:
        assert may_break_off, "an item is not ended"
        return []


def _read_whole_item(events: list[Event], items: list[dict[str, Any]]) -> list[Event]:
    """Adds an item, and returns the events after it."""
    added, *rest = events
    assert added["type"] == "response.output_item.added"
    assert (added["output_index"], added["item"]["status"]) == (len(items), "in_progress")
    kind = added["item"]["type"]
    if kind == "reasoning" and rest[0]["type"].startswith("response.reasoning_summary"):
        kind = "summary"
    if kind in _BUILT_IN:
        items.append(_ended_built_in_item(rest.pop(0), added["item"], kind))
        return rest
    text, part, place = _TEXTS[kind]
    where: dict[str, Any] = {"item_id": added["item"]["id"], "output_index": len(items)}
    where |= {place: 0} if place else {}
    if part:
        _expect(rest.pop(0), f"{part}.added", where)
    deltas = list(_deltas(rest, f"{text}.delta", where))
    written = "".join(delta["delta"] for delta in deltas)
    scores = {"logprobs": [row for delta in deltas for row in delta["logprobs"]]} if kind == "message" else {}
    done = rest.pop(0)
    _expect(done, f"{text}.done", {**where, **scores, _WHOLE.get(kind, "text"): written})
    if part:
        ended = rest.pop(0)
        _expect(ended, f"{part}.done", where)
        expect(ended["part"], text=written, **scores)
    items.append(_ended_item(rest.pop(0), added["item"], kind, written))
    return rest


def _ended_built_in_item(event: Event, added: Mapping[str, Any], kind: str) -> dict[str, Any]:
    assert event["type"] == "response.output_item.done"
    item, member = event["item"], _BUILT_IN[kind]
    assert re.fullmatch(r"[A-Za-z0-9]+", item["call_id"])
    assert {**item, "status": "in_progress", member: added[member]} == added
    return item


def _deltas(events: list[Event], name: str, where: Mapping[str, Any]) -> Iterator[Event]:
    """Takes them off the list."""
    while events[0]["type"] == f"response.{name}":
        delta = events.pop(0)
        _expect(delta, name, where)
        assert delta["delta"], "an empty text is no change"
        yield delta


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
