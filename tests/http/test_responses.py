"""Responses over sockets, with every family: items out, items in, and nothing is read twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.grammar.responses import named_events, put_together
from tests.http.conftest import FamilyServer
from tests.http.forms import ANSWER, FORMS, PATH, PROSE, REASONING, THINKING, TOOLS, answers, reasoning_texts
from tests.http.scripts import asking
from tests.server.client import Reply, ask
from tests.serving import Server, serving

pytestmark = pytest.mark.sample(5)

RESPONSES = "/v1/responses"
EVERY = list(FORMS)
SCRIPTS = [
    (name, script) for name, form in FORMS.items() for script in {**reasoning_texts(form), **answers(form)}
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
QUESTION: dict[str, Any] = {"type": "message", "role": "user", "content": "How deep is the sea?"}
RESULT = "Fifty-two, says the file."
type Fields = dict[str, Any]


def fields(name: str, script: str, **more: Any) -> Fields:
    thinking = {"effort": "high" if script in reasoning_texts(FORMS[name]) else "none"}
    return {"input": [QUESTION], "tools": FLAT, "reasoning": thinking, **asking(script), **more}


def post(server: Server, body: Fields, path: str = RESPONSES, **headers: str) -> Any:
    reply = ask(server.port, "POST", path, body, headers)
    assert reply.status == 200, reply.body
    return reply.json


def stream(server: Server, body: Fields) -> Any:
    reply = ask(server.port, "POST", RESPONSES, {**body, "stream": True})
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    return put_together(list(named_events(reply.body)))


def output_of(response: Any) -> list[tuple[str, Any]]:
    """Return the output as a client understands it."""
    return [(item["type"], _text(item)) for item in response["output"]]


def _text(item: Any) -> Any:
    if item["type"] == "function_call":
        return item["name"], json.loads(item["arguments"])
    (part,) = item.get("content") or item["summary"]
    return part["text"]


@pytest.mark.parametrize(("name", "script"), SCRIPTS)
@pytest.mark.product
@pytest.mark.sample(6)
def test_a_stream_says_what_a_whole_reply_says(name, script, family: FamilyServer):
    server, body = family(name), fields(name, script)
    whole, streamed = post(server, body), stream(server, body)
    assert output_of(whole) == output_of(streamed) != []
    assert (whole["status"], whole["model"]) == (streamed["status"], streamed["model"])
    counts = [dict(stored["usage"]) for stored in (whole, streamed)]
    assert all(stored.pop("input_tokens_details")["cached_tokens"] >= 0 for stored in counts)
    assert counts[0] == counts[1]
    assert counts[0]["total_tokens"] == counts[0]["input_tokens"] + counts[0]["output_tokens"]


@pytest.mark.parametrize("name", EVERY)
def test_text_and_call_are_items(name, family: FamilyServer):
    response = post(family(name), fields(name, "prose"))
    assert output_of(response) == [("message", PROSE), ("function_call", PATH)]
    assert (response["status"], response["incomplete_details"]) == ("completed", None)


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_an_item_in_front(name, family: FamilyServer):
    response = post(family(name), fields(name, "reasoned"))
    assert output_of(response) == [("reasoning", REASONING), ("message", ANSWER)]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


# ------------------------------------------------------------------------------------------------ round trips


def results(response: Any) -> list[Fields]:
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
        for item in response["output"]
        if item["type"] == "function_call"
    ]


def only_sealed(item: Fields) -> Fields:
    """As opencode and OpenClaw send reasoning back."""
    kept = {"type": "reasoning", "summary": [], "encrypted_content": item.get("encrypted_content")}
    return kept if item["type"] == "reasoning" else item


@pytest.mark.parametrize("sends", [dict, only_sealed], ids=["verbatim", "sealed"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.sample(32)
def test_a_call_goes_round_and_its_reply_is_bound(name, sends, family: FamilyServer):
    """The script is an option of the template, so both requests have the same one."""
    server, script = family(name), "reasoned_call" if name in THINKING else "call"
    question = {"role": "user", "content": f"How deep is it, {sends.__name__}?"}
    first = post(server, fields(name, script, input=[question]))
    before = server.get("/stats")["transcripts"]["bound_tokens"]
    body = fields(name, script, input=[question, *map(sends, first["output"]), *results(first)])
    counted = post(server, body, f"{RESPONSES}/input_tokens")
    second = post(server, body)
    assert output_of(second) == output_of(first)
    assert counted == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}
    bound = server.get("/stats")["transcripts"]["bound_tokens"] - before
    # All but the token that ends the reply.
    assert bound == first["usage"]["input_tokens"] + first["usage"]["output_tokens"] - 1


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", EVERY)
def test_a_response_can_be_gone_on_from_and_is_the_same_conversation(name, family: FamilyServer):
    server = family(name)
    script, after = ("reasoned_call", "reasoned") if name in THINKING else ("call", "answer")
    first = post(server, fields(name, script, instructions="Be brief."))
    short = fields(name, after, input=results(first), previous_response_id=first["id"])
    whole = fields(name, after, input=[QUESTION, *first["output"], *results(first)], instructions="Be brief.")
    second = post(server, short)
    assert second["previous_response_id"] == first["id"]
    assert second["instructions"] == "Be brief."
    assert second["usage"]["input_tokens"] == post(server, whole)["usage"]["input_tokens"]
    assert output_of(stream(server, short)) == output_of(second)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EVERY)
def test_a_turn_that_was_broken_off_can_be_continued(name, family: FamilyServer):
    """Codex sends what it has when a stream breaks: reasoning alone, or a call that was made already."""
    server = family(name)
    script = "reasoned" if name in THINKING else "answer"
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": REASONING}]}
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": json.dumps(PATH[1])}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": PROSE}]}
    for items in ([thought], [call], [thought, call], [text], [thought, text]):
        response = post(server, fields(name, script, input=[QUESTION, *items]))
        assert output_of(response)[-1] == ("message", ANSWER)


def test_a_chat_and_a_response_are_one_conversation(family: FamilyServer):
    server = family("hermes")
    first = server.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Is it one?"}],
            "enable_thinking": True,
            **asking("reasoned"),
        },
    )
    message = first["choices"][0]["message"]
    items = [
        {"role": "user", "content": "Is it one?"},
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": "Yes."},
    ]
    before = server.get("/stats")["transcripts"]["bound"]
    post(server, fields("hermes", "reasoned", input=items, tools=[]))
    assert server.get("/stats")["transcripts"]["bound"] == before + 1


def test_a_nested_tool_is_called_by_the_names_of_the_client(family: FamilyServer):
    """The script calls `read`, the one tool that this can mean (ADR 19), nested here under a longer name."""
    server = family("hermes")
    nested = {"type": "namespace", "name": "files", "description": "Files.", "tools": FLAT}
    response = post(server, fields("hermes", "call", tools=[nested]))
    assert output_of(response) == [("function_call", PATH)]
    (called,) = (item for item in response["output"] if item["type"] == "function_call")
    assert (called["namespace"], called["name"]) == ("files", "read")
    flat = {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "list"}]}
    response = post(server, fields("hermes", "call", tools=[*FLAT, flat]))
    assert output_of(response) == [("function_call", PATH)]


def test_what_cannot_be_offered_is_reported_to_the_terminal(family: FamilyServer):
    server = family("hermes")
    for _ in range(2):
        post(server, fields("hermes", "answer", tools=[{"type": "image_generation"}]))
    assert server.printed().count("Tools of type 'image_generation' are not offered") == 1


# ----------------------------------------------------------------------------------------- one that is kept


def stored(server: Server, method: str, name: str, **headers: str) -> Reply:
    return ask(server.port, method, f"{RESPONSES}/{name}", headers=headers)


def test_a_response_is_returned_and_forgotten(family: FamilyServer):
    server = family("hermes")
    response = post(server, fields("hermes", "answer"))
    before = server.get("/stats")["response_store"]
    assert before["entries"] > 0
    assert before["bytes"] > len(json.dumps(response))
    assert stored(server, "GET", response["id"]).json == response
    assert stored(server, "HEAD", response["id"]).status == 200
    gone = stored(server, "DELETE", response["id"])
    assert gone.json == {"id": response["id"], "object": "response", "deleted": True}
    assert server.get("/stats")["response_store"]["entries"] == before["entries"] - 1
    for method in ("GET", "DELETE"):
        refused = stored(server, method, response["id"])
        assert (refused.status, refused.error["type"]) == (404, "not_found_error")
    body = fields("hermes", "answer", previous_response_id=response["id"])
    refused = ask(server.port, "POST", RESPONSES, body)
    assert (refused.status, refused.error["param"]) == (404, "previous_response_id")


def test_another_key_finds_nothing(family: FamilyServer):
    server, mine, other = family("hermes"), "Bearer mine", "Bearer other"
    response = post(server, fields("hermes", "answer"), Authorization=mine)
    assert stored(server, "GET", response["id"], Authorization=mine).status == 200
    for headers in ({}, {"Authorization": other}):
        assert stored(server, "GET", response["id"], **headers).status == 404
        assert stored(server, "DELETE", response["id"], **headers).status == 404
    body = fields("hermes", "answer", previous_response_id=response["id"])
    assert ask(server.port, "POST", RESPONSES, body, {"Authorization": other}).status == 404
    assert stored(server, "GET", response["id"], Authorization=mine).status == 200


def test_what_is_not_to_be_stored_is_not(family: FamilyServer):
    server = family("hermes")
    before = server.get("/stats")["response_store"]["entries"]
    response = post(server, fields("hermes", "answer", store=False))
    assert server.get("/stats")["response_store"]["entries"] == before
    assert stored(server, "GET", response["id"]).status == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", RESPONSES, "POST"),
        ("DELETE", f"{RESPONSES}/input_tokens", "POST"),
        ("POST", f"{RESPONSES}/resp_1", "GET, HEAD, DELETE"),
        ("DELETE", "/v1/models", "GET, HEAD"),
    ],
)
def test_other_methods_are_refused(method, path, allowed, family: FamilyServer):
    reply = ask(family("hermes").port, method, path, {} if method == "POST" else None)
    assert (reply.status, reply.headers["allow"]) == (405, allowed)


# ----------------------------------------------------------------------------------------------- the endings


def test_a_limit_makes_it_incomplete(family: FamilyServer):
    body = fields("hermes", "answer", max_output_tokens=2)
    for response in (post(family("hermes"), body), stream(family("hermes"), body)):
        assert response["status"] == response["output"][-1]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens"] == 2


def test_a_prompt_beyond_the_window_is_the_inputs_fault_and_can_be_counted(tiny_model):
    with serving(tiny_model("qwen3"), max_kv_size=64) as server:
        body = {"input": "word " * 100}
        refused = ask(server.port, "POST", RESPONSES, body)
        assert (refused.status, refused.error["param"]) == (400, "input")
        assert refused.error["code"] == "context_length_exceeded"
        assert post(server, body, f"{RESPONSES}/input_tokens")["input_tokens"] > 64
