"""Prewarms in every dialect: the prompt is read, nothing is generated, the next request reads the rest."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.grammar import completions, wire
from tests.grammar.messages import named_events, put_together
from tests.http.test_conversations import FAMILIES, TOOLS, system, user
from tests.server.client import ask
from tests.serving import Server, serving

pytestmark = pytest.mark.sample(3)

type Json = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """How one endpoint is asked for a prewarm.

    Attributes:
        prewarm: the fields that ask for it.
        body: returns the rest of a request with these messages.
    """

    path: str
    prewarm: Json
    body: Callable[[list[Json]], Json]

    def computed(self, usage: Json) -> int:
        if self.path == "/v1/messages":
            return usage["input_tokens"]
        read = "input_tokens" if self.path == "/v1/responses" else "prompt_tokens"
        return usage[read] - usage[f"{read}_details"]["cached_tokens"]

    def written(self, usage: Json) -> int:
        return usage["completion_tokens" if "completion_tokens" in usage else "output_tokens"]


def _of_messages(messages: list[Json]) -> Json:
    first, *others = messages
    return {"system": first["content"], "messages": others}


def _as_chat(messages: list[Json]) -> Json:
    return {"messages": messages}


def _as_text(messages: list[Json]) -> Json:
    return {"prompt": " ".join(message["content"] for message in messages)}


def _as_input(messages: list[Json]) -> Json:
    return {"input": messages}


PREWARM = {"prompt_cache_options": {"prewarm": True}}
DIALECTS = {
    "chat": Dialect("/v1/chat/completions", PREWARM, _as_chat),
    "chat, as llama.cpp": Dialect("/v1/chat/completions", {"n_predict": 0}, _as_chat),
    "responses": Dialect("/v1/responses", PREWARM, _as_input),
    "messages": Dialect("/v1/messages", {"max_tokens": 0}, _of_messages),
    "text": Dialect("/v1/completions", {"max_tokens": 0}, _as_text),
    "text, as llama.cpp": Dialect("/v1/completions", {"n_predict": 0}, _as_text),
}


@pytest.fixture(scope="module", params=[*FAMILIES, "glm4_moe_lite"])
def server(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Generator[Server]:
    with serving(tiny_model(request.param, hidden=128, layers=2), thinking=False) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tiny_model: TinyModel) -> Generator[Server]:
    with serving(tiny_model("qwen3", hidden=128, layers=2), thinking=False) as running:
        yield running


def post(server: Server, dialect: Dialect, messages: list[Json], **more: Any) -> Json:
    return server.post(dialect.path, {**dialect.body(messages), "temperature": 0, **more})


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.sample(6)
def test_the_next_request_reads_one_token(server: Server, name: str):
    dialect, messages = DIALECTS[name], [system(f"Warm {name}"), user("How deep is the sea?")]
    before = server.get("/stats")["engine"]["generated_tokens"]
    warm = post(server, dialect, messages, **dialect.prewarm)
    stats = server.get("/stats")
    assert (stats["engine"]["generated_tokens"], dialect.written(warm["usage"])) == (before, 0)
    assert dialect.computed(warm["usage"]) > 20
    limit = "max_output_tokens" if dialect.path == "/v1/responses" else "max_tokens"
    reply = post(server, dialect, messages, **{limit: 4})
    assert (dialect.computed(reply["usage"]), dialect.written(reply["usage"])) == (1, 4)


def test_another_question_after_a_warm_beginning_reads_the_question(server: Server):
    """The usual warm-up: system text and tools, and some question."""
    dialect, rules = DIALECTS["chat"], system("Beginning")
    warm = post(server, dialect, [rules, user("warm")], **dialect.prewarm, tools=TOOLS)
    reply = post(server, dialect, [rules, user("How deep is the sea?")], max_tokens=4, tools=TOOLS)
    assert dialect.computed(reply["usage"]) < 40 < dialect.computed(warm["usage"])


def test_a_value_that_has_changed_since_is_noted_and_nothing_else_is_read_again(plain: Server):
    """The prompt is recorded as it was read."""
    dialect = DIALECTS["chat"]

    def at(clock: str) -> list[Json]:
        return [
            {"role": "system", "content": f"Be brief.\nCurrent date: {clock}\n" + "Say it. " * 99},
            user("Go"),
        ]

    warm = post(plain, dialect, at("2026-11-27 10:00"), **dialect.prewarm, session_id="clock")
    reply = post(plain, dialect, at("2026-11-27 10:05"), max_tokens=4, session_id="clock")
    assert dialect.computed(reply["usage"]) < dialect.computed(warm["usage"]) / 4


def test_what_is_said_of_it_whole_and_streamed(plain: Server):
    messages = [system("Known"), user("How?")]
    chat = post(plain, DIALECTS["chat"], messages, **PREWARM)
    (choice,) = chat["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    raw = ask(plain.port, "POST", "/v1/chat/completions", {"messages": messages, "stream": True, **PREWARM})
    assert completions.read(list(wire.events_in(raw.body))).body["choices"][0]["message"]["content"] == ""
    body = {**_of_messages(messages), "max_tokens": 0}
    whole = plain.post("/v1/messages", body)
    assert (whole["content"], whole["stop_reason"]) == ([], "max_tokens")
    streamed = put_together(
        named_events(ask(plain.port, "POST", "/v1/messages", {**body, "stream": True}).body)
    )
    assert (streamed["content"], streamed["stop_reason"]) == ([], "max_tokens")


def test_it_is_no_turn_of_its_conversation(plain: Server):
    messages = [system("Counted"), user("How?")]
    for fields in (PREWARM, {"max_tokens": 4}):
        post(plain, DIALECTS["chat"], messages, **fields, session_id="counted")
    newest = plain.get("/activity")["conversations"][0]
    assert len(newest["turns"]) == 1


def test_a_response_is_complete_and_kept_nowhere(plain: Server):
    response = plain.post("/v1/responses", {"input": "How deep is the sea?", **PREWARM})
    assert (response["status"], response["output"], response["store"]) == ("completed", [], False)
    assert ask(plain.port, "GET", f"/v1/responses/{response['id']}").status == 404


def test_a_demand_for_a_vendors_tool_is_read_all_the_same(plain: Server):
    body = {"input": "Look it up.", "tools": [{"type": "web_search"}], "tool_choice": "required", **PREWARM}
    assert plain.post("/v1/responses", body)["output"] == []
    body = {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}}
    reply = plain.post("/v1/messages", {"messages": [user("Look it up.")], "max_tokens": 0, **body})
    assert (reply["content"], reply["stop_reason"]) == ([], "max_tokens")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"prompt_cache_options": {"prewarm": 1}}, "prompt_cache_options.prewarm"),
        ("/v1/responses", {"prompt_cache_options": []}, "prompt_cache_options"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/completions", {"n_predict": -2}, "n_predict"),
    ],
)
def test_what_cannot_be_meant_is_refused(plain: Server, path: str, fields: Json, param: str):
    question = {"messages": [user("Hi")]} if "chat" in path else {"prompt": "Hi"}
    asked = {**({"input": "Hi"} if "responses" in path else question), **fields}
    refused = ask(plain.port, "POST", path, asked)
    assert (refused.status, refused.json["error"]["param"]) == (400, param)
