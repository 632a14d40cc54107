"""Cache diagnostics: where a request leaves the earlier one that its client names."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.grammar import wire
from tests.server.client import Reply, ask
from tests.serving import Server, serving

type Json = dict[str, Any]

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
COUNTED = ("model_changed", "system_changed", "tools_changed", "messages_changed")


def tool(name: str) -> Json:
    return {"name": name, "description": "Of a sea.", "input_schema": {"type": "object", "properties": {}}}


FIRST: Json = {
    "system": "Be brief and say what you see. " * 12,
    "tools": [tool("depth"), tool("tide")],
    "messages": [
        {"role": "user", "content": "How deep is the sea at the pier? " * 4},
        {"role": "assistant", "content": "Nine metres at high tide, and four at low tide."},
        {"role": "user", "content": "And behind the breakwater? " * 4},
    ],
}


def set_content(body: Json, index: int, text: str) -> None:
    body["messages"][index]["content"] = text


def asked_more(body: Json) -> None:
    body["messages"] += [
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "And in the harbour?"},
    ]


CHANGES: dict[str, Callable[[Json], object]] = {
    "another system text": lambda body: body.update(system="Be long-winded. " * 12),
    "more at the end of the system text": lambda body: body.update(system=body["system"] + "Now."),
    "less of the system text": lambda body: body.update(system=body["system"][:-60]),
    "no system text": lambda body: body.pop("system"),
    "a system text in blocks": lambda body: body.update(system=[{"type": "text", "text": "Otherwise."}]),
    "system and tools": lambda body: body.update(system="Otherwise.", tools=[tool("wind")]),
    "system and messages": lambda body: (
        body.update(system="Otherwise."),
        set_content(body, 0, "Otherwise?"),
    ),
    "one tool more": lambda body: body["tools"].append(tool("wind")),
    "one tool less": lambda body: body["tools"].pop(),
    "no tools": lambda body: body.pop("tools"),
    "tools in another order": lambda body: body["tools"].reverse(),
    "another description": lambda body: body["tools"][0].update(description="Of a lake."),
    "another schema": lambda body: body["tools"][1].update(input_schema={"type": "object", "required": []}),
    "another tool name": lambda body: body["tools"][1].update(name="ebb"),
    "a tool twice": lambda body: body["tools"].append(tool("depth")),
    "tools and messages": lambda body: (body["tools"].pop(), set_content(body, 0, "Otherwise?")),
    "another first question": lambda body: set_content(body, 0, "How deep is the lake?"),
    "another last question": lambda body: set_content(body, 2, "Where is the breakwater? " * 4),
    "another reply": lambda body: set_content(body, 1, "Ten metres."),
    "a reply as a question": lambda body: body["messages"][1].update(role="user"),
    "the first turn left out": lambda body: body.update(messages=body["messages"][2:]),
    "the middle left out": lambda body: body["messages"].pop(1),
    "a summary instead": lambda body: body.update(messages=[{"role": "user", "content": "In short: " * 40}]),
    "an earlier message inserted": lambda body: body["messages"].insert(
        0, {"role": "user", "content": "Hello."}
    ),
    "a system message in the middle": lambda body: body["messages"].insert(
        1, {"role": "system", "content": "Answer in metres."}
    ),
    "an earlier message in two": lambda body: body["messages"].insert(
        0, {"role": "user", "content": "How deep is the sea"}
    ),
    "thinking": lambda body: body.update(thinking={"type": "enabled", "budget_tokens": 99}),
    "another temperature": lambda body: body.update(temperature=1.0, top_p=0.5),
    "another limit": lambda body: body.update(max_tokens=5),
    "a tool choice": lambda body: body.update(tool_choice={"type": "none"}),
    "cache control": lambda body: body.update(cache_control={"type": "ephemeral"}),
    "cache control of a block": lambda body: body.update(
        system=[{"type": "text", "text": body["system"], "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    ),
    "stop sequences": lambda body: body.update(stop_sequences=["never"]),
    "a service tier": lambda body: body.update(service_tier="standard_only"),
    "a user id": lambda body: body.update(metadata={"user_id": "somebody else"}),
    "what nobody knows": lambda body: body.update(of_tomorrow={"x": 1}),
    "the same again": lambda body: body,
    "a reply that was not given": asked_more,
    "two turns after a reply that was not given": lambda body: (asked_more(body), asked_more(body)),
    "the last question taken back": lambda body: body["messages"].__delitem__(slice(1, None)),
    "white space at an end": lambda body: set_content(body, 2, body["messages"][2]["content"] + "  \n"),
    "text in blocks": lambda body: body["messages"][0].update(
        content=[{"type": "text", "text": body["messages"][0]["content"]}]
    ),
}
EXPECTED = {
    "another system text": "system_changed",
    "more at the end of the system text": "system_changed",
    "less of the system text": "system_changed",
    "no system text": "system_changed",
    "a system text in blocks": "system_changed",
    "system and tools": "system_changed",
    "system and messages": "system_changed",
    "one tool more": "tools_changed",
    "one tool less": "tools_changed",
    "no tools": "tools_changed",
    "another description": "tools_changed",
    "another schema": "tools_changed",
    "another tool name": "tools_changed",
    "a tool twice": "tools_changed",
    "tools and messages": "tools_changed",
    "another first question": "messages_changed",
    "another last question": "messages_changed",
    "another reply": "messages_changed",
    "a reply as a question": "messages_changed",
    "the first turn left out": "messages_changed",
    "the middle left out": "messages_changed",
    "a summary instead": "messages_changed",
    "an earlier message inserted": "messages_changed",
    "a system message in the middle": "messages_changed",
    "an earlier message in two": "messages_changed",
    "a reply that was not given": "messages_changed",
    "two turns after a reply that was not given": "messages_changed",
    "white space at an end": "messages_changed",
}
"""The reason by the name of the change. For the others there is none: nothing is read again."""


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel) -> Generator[Server]:
    with serving(tiny_model("qwen3", hidden=128, layers=2), thinking=False) as running:
        yield running


def send(server: Server, body: Json, previous: str | None = None, **headers: str) -> Reply:
    asked = {"max_tokens": 3, "diagnostics": {"previous_message_id": previous}, **body}
    reply = ask(server.port, "POST", MESSAGES, asked, headers)
    assert reply.status == 200, reply.body
    return reply


def started(reply: Reply) -> Json:
    """The message that a stream begins with."""
    start = next(iter(wire.events_in(reply.body)))
    assert start["type"] == "message_start"
    return start["message"]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sample(14)
def test_each_change_has_its_reason(server: Server, name: str):
    first = {**FIRST, "metadata": {"user_id": name}}
    previous = send(server, first).json["id"]
    changed = copy.deepcopy(first)
    CHANGES[name](changed)
    streamed = started(send(server, {**changed, "stream": True}, previous))
    whole = send(server, changed, previous).json
    assert streamed["diagnostics"] == whole["diagnostics"]
    if name not in EXPECTED:
        assert whole["diagnostics"] is None
        return
    reason = whole["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == EXPECTED[name]
    assert 0 < reason["cache_missed_input_tokens"] <= streamed["usage"]["input_tokens"]


def test_the_missed_tokens_are_those_that_are_read_again(server: Server):
    first = {**FIRST, "system": "Count them. " * 30}
    reply = send(server, first).json
    read = reply["usage"]["input_tokens"]
    changed = copy.deepcopy(first)
    set_content(changed, 2, "Another question?")
    missed = send(server, changed, reply["id"]).json["diagnostics"]["cache_miss_reason"]
    assert 0 < missed["cache_missed_input_tokens"] < read / 4, "all but the last question is known"


def test_its_own_reply_sent_back_is_no_change(server: Server):
    body = copy.deepcopy(FIRST)
    reply = send(server, body).json
    body["messages"] += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "?"}]
    again = send(server, body, reply["id"]).json
    assert again["diagnostics"] is None
    assert again["usage"]["input_tokens"] < 20


def test_a_prewarm_can_be_compared_with(server: Server):
    body = {**FIRST, "system": "Warm it. " * 30}
    warm = send(server, {**body, "max_tokens": 0}).json["id"]
    assert send(server, body, warm).json["diagnostics"] is None
    other = send(server, {**body, "system": "Cold. " * 30}, warm).json["diagnostics"]["cache_miss_reason"]
    assert other["type"] == "system_changed"


def test_a_clock_that_a_note_tells_is_no_miss(server: Server):
    """The recorded tokens are read on, so nothing is read again but the note."""

    def at(clock: str) -> Json:
        rules = f"{'Be brief. ' * 40}\nCurrent date: {clock}\n{'Say what you see. ' * 40}"
        return {**FIRST, "system": rules, "metadata": {"user_id": '{"session_id": "clock"}'}}

    previous = send(server, at("2026-11-27 10:00")).json["id"]
    assert send(server, at("2026-11-27 10:07"), previous).json["diagnostics"] is None


def test_who_asks_for_none_gets_none_and_the_first_turn_has_none(server: Server):
    plain = ask(server.port, "POST", MESSAGES, {**FIRST, "max_tokens": 3}).json
    assert "diagnostics" not in plain
    assert send(server, FIRST).json["diagnostics"] is None


@pytest.mark.thorough
def test_an_unknown_id_is_not_found_and_neither_is_that_of_another_key(server: Server):
    previous = send(server, FIRST, Authorization="Bearer one").json["id"]
    unknown = {"cache_miss_reason": {"type": "previous_message_not_found"}}
    for name, key in ((previous, "two"), ("msg_never", "one"), ("", "one")):
        reply = send(server, FIRST, name, Authorization=f"Bearer {key}").json
        assert reply["diagnostics"] == unknown
    assert send(server, FIRST, previous, Authorization="Bearer one").json["diagnostics"] is None


@pytest.mark.parametrize(
    ("diagnostics", "param"),
    [(5, "diagnostics"), ({"previous_message_id": 5}, "diagnostics.previous_message_id")],
)
def test_what_is_no_id_is_refused(server: Server, diagnostics: Any, param: str):
    refused = ask(server.port, "POST", MESSAGES, {**FIRST, "max_tokens": 3, "diagnostics": diagnostics})
    assert refused.status == 400
    assert f"'{param}'" in refused.json["error"]["message"]


@pytest.mark.thorough
def test_another_model_is_reported_as_such(tiny_model: TinyModel, tmp_path: Path):
    for family in ("qwen3", "llama"):
        shutil.copytree(tiny_model(family, hidden=128, layers=2), tmp_path / family)
    with serving(Path("qwen3"), model_dir=str(tmp_path), thinking=False, max_kv_size=4096) as server:
        previous = send(server, {**FIRST, "model": "qwen3"}).json["id"]
        reason = send(server, {**FIRST, "model": "llama"}, previous).json["diagnostics"]["cache_miss_reason"]
        assert reason["type"] == "model_changed"
        assert reason["cache_missed_input_tokens"] > 100
        assert send(server, {**FIRST, "model": "qwen3"}, previous).json["diagnostics"] is None


def test_a_response_is_compared_with_another(server: Server):
    """As `prompt_cache_options.comparison_response_id` of openai 3.57 has it."""

    def respond(previous: str | None, **changes: Any) -> Json:
        options = {} if previous is None else {"comparison_response_id": previous}
        body: Json = {"instructions": "Be brief. " * 20, "input": "How deep is the sea?", **changes}
        return server.post(RESPONSES, {**body, "max_output_tokens": 3, "prompt_cache_options": options})

    first = respond(None)
    assert "prompt_cache_diagnostics" not in first
    assert respond(first["id"])["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert respond("resp_never")["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    other = respond(first["id"], input="Where is it?")["prompt_cache_diagnostics"]
    assert (other["type"], other["reason"]) == ("cache_miss", "input_changed")
    assert other["cache_missed_tokens"] > 0
    offered = [{"type": "function", "name": "depth", "parameters": {"type": "object", "properties": {}}}]
    assert respond(first["id"], tools=offered)["prompt_cache_diagnostics"]["reason"] == "tools_changed"
