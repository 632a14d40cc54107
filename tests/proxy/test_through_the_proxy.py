"""Requests and replies that pass through the proxy."""

from __future__ import annotations

import base64
import http.client
import json
import re
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.grammar.messages import named_events, put_together
from tests.proxy.conftest import KEY, MODEL, Answer, Proxied, until
from tests.server.client import ask

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
# Fields that must arrive as they were sent, whether or not this server acts on them.
KEPT: dict[str, Any] = {
    "session_id": "s-1",
    "enable_thinking": False,
    "thinking": {"type": "disabled"},
    "reasoning_effort": "low",
    "reasoning": {"effort": "low"},
    "verbosity": "low",
    "user": "me",
    "chat_template_kwargs": {"enable_thinking": False},
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "seed": 7,
    "stop": ["###"],
    "n": 1,
    "temperature": 0.3,
    "top_p": 0.8,
    "max_tokens": 3,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 1,
    "store": False,
    "prompt_cache_key": "k",
    "safety_identifier": "i",
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "adapter": "none",
    "response_format": {"type": "text"},
    "tools": [TOOL],
    "tool_choice": "auto",
    "continue_final_message": False,
    "add_generation_prompt": False,
}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Read it"}]},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I should read.",
        "tool_calls": [
            {
                "id": "call1",
                "type": "function",
                "function": {"name": "read", "arguments": '{"path":  "a\\u00e9"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call1", "content": "text"},
    {"role": "user", "content": "Thanks", "unknown_key": 1},
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", [MODEL, "gpt-5", "claude-sonnet-4-5", "whatever/it-is"])
@pytest.mark.parametrize("stream", [False, True])
def test_any_model_name_gets_a_chat(proxied: Proxied, model: str, stream: bool):
    answer = proxied.ask(CHAT, {"model": model, "messages": MESSAGES, "max_tokens": 4, "stream": stream})
    assert answer.status == 200, answer.text
    if stream:
        events = [
            line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")
        ]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert {chunk["model"] for chunk in chunks} == {model}
    else:
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.json["model"] == model


@pytest.mark.sample(2)
@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_who_names_no_model_learns_which_one_answered(proxied: Proxied, named: dict[str, Any], stream: bool):
    loaded = proxied.server.get("/health")["model"]
    asked = {"messages": MESSAGES, "max_tokens": 2, "stream": stream, **named}
    answer = proxied.ask(CHAT, asked)
    assert set(re.findall(r'"model": ?"([^"]*)"', answer.text)) == {loaded}, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": MESSAGES[:1], "max_tokens": 2}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
    ],
)
def test_nobody_has_to_name_a_model_in_any_protocol(proxied: Proxied, path: str, body: dict[str, Any]):
    answer = proxied.ask(path, body)
    assert (answer.status, answer.json["model"]) == (200, proxied.server.get("/health")["model"])


@pytest.mark.parametrize("path", ["/", "/health", "/api/hello", "/v1/models"])
def test_both_ports_say_the_same_of_the_server(proxied: Proxied, path: str):
    answer = proxied.ask(path)
    assert (answer.status, answer.json) == (200, proxied.server.get(path))


def test_embeddings_are_the_servers_own(proxied: Proxied):
    answer = proxied.ask("/v1/embeddings", {"model": "m", "input": "Hello"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "model")
    assert "makes no embeddings" in answer.json["error"]["message"]


def test_the_server_counts_for_both_ports(proxied: Proxied):
    assert proxied.ask("/stats").json.keys() == proxied.server.get("/stats").keys()
    assert "start_llm" in proxied.ask("/metrics").text or "vllm:" in proxied.ask("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.sample(12)
def test_a_field_reaches_the_server_as_it_was_sent(proxied: Proxied, name: str, stream: bool):
    proxied.tunnel.clear()
    body: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": 2, "stream": stream}
    body[name] = KEPT[name]
    if name == "top_logprobs":
        body["logprobs"] = True
    answer = proxied.ask(CHAT, body)
    assert answer.status == 200, answer.text
    (heard,) = proxied.tunnel.heard(CHAT)
    assert heard.body[name] == KEPT[name]


def test_messages_reach_the_server_as_they_were_sent(proxied: Proxied):
    proxied.tunnel.clear()
    answer = proxied.ask(CHAT, {"model": "m", "messages": CONVERSATION, "max_tokens": 2})
    assert answer.status == 200, answer.text
    (heard,) = proxied.tunnel.heard(CHAT)
    assert heard.body["messages"] == CONVERSATION


def test_session_headers_reach_the_server(proxied: Proxied):
    proxied.tunnel.clear()
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 2}
    proxied.ask(CHAT, body, headers={"x-session-id": "s-9", "x-claude-code-session-id": "c-9"})
    (heard,) = proxied.tunnel.heard(CHAT)
    assert heard.headers["x-session-id"] == "s-9"
    assert heard.headers["x-claude-code-session-id"] == "c-9"
    assert KEY not in str(heard.headers)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stream", [False, True])
def test_usage_comes_back_with_cached_tokens(proxied: Proxied, stream: bool):
    body: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_tokens": 2, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    proxied.ask(CHAT, body)
    answer = proxied.ask(CHAT, body)
    last = json.loads(answer.text.strip().split("data: ")[-2]) if stream else answer.json
    usage = last["usage"]
    assert usage["completion_tokens"] == 2
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1 > 0


MESSAGE = {"model": "claude-x", "max_tokens": 2, "messages": MESSAGES, "top_k": 3}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", MESSAGE),
        ("/v1/responses", {"model": "gpt-x", "input": "Hello", "max_output_tokens": 16}),
    ],
)
def test_other_protocols_pass_untranslated(proxied: Proxied, path: str, body: dict[str, Any]):
    proxied.tunnel.clear()
    proxied.ask(path, body)
    (heard,) = proxied.tunnel.heard(path)
    assert {name: heard.body[name] for name in body if name != "model"} == {
        name: value for name, value in body.items() if name != "model"
    }


def test_a_message_comes_back_in_its_own_form(proxied: Proxied):
    proxied.ask("/v1/messages", MESSAGE)
    answer = proxied.ask("/v1/messages", MESSAGE).json
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (1, 2)
    assert usage["cache_read_input_tokens"] > 1


def test_a_stream_of_a_message_keeps_its_grammar(proxied: Proxied):
    answer = proxied.ask("/v1/messages", {**MESSAGE, "stream": True})
    assert put_together(named_events(answer.text.encode()))["usage"]["output_tokens"] == 2


def test_a_response_comes_back_in_its_own_form(proxied: Proxied):
    answer = proxied.ask("/v1/responses", {"model": "gpt-x", "input": "Hello", "max_output_tokens": 16})
    assert answer.status == 200, answer.json
    assert (answer.json["object"], answer.json["usage"]["output_tokens"]) == ("response", 16)


def test_a_wrong_value_is_a_400_that_names_the_field(proxied: Proxied):
    answer = proxied.ask(CHAT, {"model": "m", "messages": MESSAGES, "top_k": -1})
    assert answer.status == 400
    assert "'top_k' must be" in answer.json["error"]["message"]


NAMES = [MODEL, "whatever/it-is", "claude-sonnet-4-5", "claude-opus-4-9", "gpt-5", "o3", "deepseek-chat"]
THINKING = [
    {"type": "adaptive", "display": "omitted"},
    {"type": "enabled", "budget_tokens": 2000},
    {"type": "disabled"},
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(10)
def test_how_a_model_is_to_think_reaches_the_server_whatever_its_name(proxied: Proxied, name: str):
    """Lesson 29."""
    for thinking in THINKING:
        for beside in ({}, {"output_config": {"effort": "high"}}):
            proxied.tunnel.clear()
            asked = {"thinking": thinking, **beside}
            assert proxied.ask("/v1/messages", {**MESSAGE, **asked, "model": name}).status == 200
            (heard,) = proxied.tunnel.heard("/v1/messages")
            sent = {field: heard.body.get(field) for field in ("thinking", "output_config")}
            assert {**sent, "model": heard.body["model"]} == {"output_config": None, **asked, "model": name}


LONG = "Überlegt: was misst »die Tiefe« – in Metern?\n" * 40
SCHEMA = TOOL["function"]["parameters"]
COUNTED: dict[str, Any] = {
    "/v1/messages/count_tokens": {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [*MESSAGES, {"role": "assistant", "content": LONG}, *MESSAGES],
        "tools": [{"name": "read", "input_schema": SCHEMA}],
    },
    "/v1/responses/input_tokens": {
        "instructions": "Be brief.",
        "input": [*MESSAGES, {"role": "assistant", "content": LONG}, *MESSAGES],
        "tools": [{"type": "function", **TOOL["function"]}],
    },
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", COUNTED)
def test_tokens_are_counted_by_the_server_whatever_the_name(proxied: Proxied, path: str, name: str):
    answer = proxied.ask(path, {**COUNTED[path], "model": name})
    assert (answer.status, answer.json) == (200, proxied.server.post(path, COUNTED[path]))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("header", "key"),
    [("Authorization", f"Bearer {KEY}"), ("x-api-key", KEY)],
)
def test_a_kept_response_belongs_to_its_key_wherever_that_stands(proxied: Proxied, header: str, key: str):
    """LiteLLM's own way to a kept response does not say whose it is (lesson 30)."""
    kept = with_key(proxied, "POST", "/v1/responses", ASKED, {header: key})
    assert kept.status == 200, kept.text
    path = f"/v1/responses/{kept.json['id']}"
    answer = with_key(proxied, "GET", path, None, {header: key})
    assert (answer.status, answer.json["id"]) == (200, kept.json["id"])
    assert [item["id"] for item in answer.json["output"]] == [item["id"] for item in kept.json["output"]]
    assert with_key(proxied, "GET", f"{path}/input_items", None, {header: key}).json["data"]
    assert with_key(proxied, "GET", path, None, {header: "wrong"}).status == 401
    assert with_key(proxied, "DELETE", path, None, {header: key}).json["deleted"]
    gone = with_key(proxied, "GET", path, None, {header: key})
    assert (gone.status, kept.json["id"] in gone.json["error"]["message"]) == (404, True)


ASKED = {"model": "m", "input": "Hi", "max_output_tokens": 16}


def with_key(proxied: Proxied, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
    """A request that has a key where these headers say, and nowhere else."""
    return proxied.ask(path, body, method=method, headers={"Authorization": "", **headers})


def test_no_path_but_those_of_responses_can_be_reached_by_the_name_of_one(proxied: Proxied):
    inside = "litellm:custom_llm_provider:x;model_id:y;response_id:../../stats"
    for name in ("..%2F..%2Fstats", "..", "resp_" + base64.b64encode(inside.encode()).decode()):
        assert proxied.ask(f"/v1/responses/{name}", method="GET").status == 404


def test_clients_may_say_hello(proxied: Proxied):
    assert proxied.ask("/", method="HEAD").status == 200
    assert proxied.ask("/api/hello", method="GET").json["server"] == "start_llm"


def test_a_browser_is_led_to_the_servers_status_page(proxied: Proxied):
    connection = http.client.HTTPConnection("localhost", proxied.port, timeout=30)
    connection.request("GET", "/", headers={"Accept": "text/html,*/*;q=0.8"})
    reply = connection.getresponse()
    led_to = urlsplit(reply.headers["location"])
    connection.close()
    assert (reply.status, led_to.hostname, led_to.port) == (307, "localhost", proxied.tunnel.port)
    page = ask(proxied.tunnel.port, "GET", led_to.path, headers={"Accept": "text/html"})
    assert b"<!doctype html>" in page.body


@pytest.mark.sample(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_an_error_is_reported_in_the_servers_own_words(proxied: Proxied, path: str, stream: bool):
    """Clients act on the words: this one makes Claude Code compact."""
    history = [{"role": "user", "content": "word " * 70_000}]
    body = {"model": "m", "max_tokens": 2, "messages": history, "input": history, "stream": stream}
    answer = proxied.ask(path, body)
    direct = ask(proxied.server.port, "POST", path, body)
    assert (answer.status, bare(answer.json)) == (400, bare(direct.json))
    words = "prompt is too long: " if path == "/v1/messages" else "maximum context length is "
    assert answer.json["error"]["message"].removeprefix("This model's ").startswith(words)


HI = [{"role": "user", "content": "Hi"}]
MALFORMED = [
    *[
        (CHAT, {"messages": messages})
        for messages in (1, [1], [{"role": 5}], [{"role": "user", "content": 1}])
    ],
    *[(CHAT, {"messages": HI, **fields}) for fields in ({"stop": {}}, {"tools": 1}, {"max_tokens": "x"})],
    *[("/v1/completions", {"prompt": prompt}) for prompt in (1, {}, [[1], [2]], ["a", 1])],
    *[("/v1/messages", {"max_tokens": 2, "messages": messages}) for messages in (1, [1], [{"role": "x"}])],
    ("/v1/messages", {"max_tokens": 2, "messages": HI, "thinking": 1}),
    *[("/v1/responses", {"input": items}) for items in (5, {}, [5])],
    ("/v1/responses", {"input": "Hi", "tools": 1}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("path", "fields"), MALFORMED, ids=str)
def test_what_litellm_falls_over_is_refused_as_the_server_does_it(
    proxied: Proxied, path: str, fields: dict[str, Any]
):
    body = {"model": "m", **fields}
    answer, direct = proxied.ask(path, body), ask(proxied.server.port, "POST", path, body)
    assert direct.status == 400
    assert (answer.status, bare(answer.json)) == (400, bare(direct.json))


def bare(error: Any) -> Any:
    return {name: value for name, value in error.items() if name != "request_id"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/messages", 400),
        ("POST", "/v1/messages/count_tokens", 400),
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/messages/nothing", 404),
        ("POST", "/v1/responses", 400),
        ("GET", "/v1/nothing", 404),
    ],
)
def test_what_litellm_refuses_itself_has_the_form_of_the_protocol(
    proxied: Proxied, method: str, path: str, status: int
):
    answer = proxied.ask(path, b"{bad" if method == "POST" else None, method=method)
    assert answer.status == status
    assert ("type" in answer.json) is path.startswith("/v1/messages")
    assert {"type", "message"} <= answer.json["error"].keys()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.thorough
def test_a_client_that_leaves_in_mid_prefill_is_cancelled_after_its_chunk(proxied: Proxied, stream: bool):
    # A chunk is planned for a second at most. The best of three: what a busy machine adds is not ours.
    assert any(seconds_until_cancelled(proxied, stream) < 1.5 for _ in range(3))


def seconds_until_cancelled(proxied: Proxied, stream: bool) -> float:
    """From the moment a client leaves during prefill until the engine has dropped its prompt."""

    def prefill() -> Any:
        return proxied.server.get("/stats")["engine"]["prefill"]

    connection = http.client.HTTPConnection("127.0.0.1", proxied.port, timeout=60)
    body = {"model": "m", "messages": [{"role": "user", "content": "word " * 30_000}], "stream": stream}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", CHAT, json.dumps(body), headers)
    until(lambda: prefill() is not None, within_s=20)
    began = time.monotonic()
    connection.close()
    until(lambda: prefill() is None, within_s=10)
    return time.monotonic() - began
