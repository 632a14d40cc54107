"""Every demand on a reply is met, even by models that say anything at all."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any

import jsonschema
import pytest

from tests.grammar import messages, responses
from tests.http.conftest import FamilyServer
from tests.http.forms import FORMS, OTHER, PATH, TOOLS
from tests.http.reading import QUESTION, Heard, hear, post
from tests.http.scripts import asking
from tests.server.client import CHAT, ask
from tests.serving import Server, serving
from tests.templates.traits import trait_folder

pytestmark = pytest.mark.sample(3)

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
Random = Callable[[str], Server]
RANDOM = ["hermes", "glm", "gemma4", "mistral", "harmony"]
THINKING = ["hermes", "glm", "gemma4", "harmony"]
FISH = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cod", "eel"]},
        "length": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "length"],
    "additionalProperties": False,
}
CATCH = {"type": "function", "function": {"name": "catch", "parameters": FISH}}
EAT = {"type": "function", "function": {"name": "eat", "parameters": FISH}}
SHOE = {"type": "function", "function": {"name": "a", "parameters": {"type": "shoe"}}}
AS_FISH = {"type": "json_schema", "json_schema": {"name": "fish", "schema": FISH}}
NO_FISH = {"strict": True, "schema": {"not": FISH}}
BY_CHANCE = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 400}
BRIEF = {**BY_CHANCE, "enable_thinking": False}


@pytest.fixture(scope="module")
def babbling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Random]:
    """`babbling("glm")` is a model of that form with random weights."""
    with ExitStack() as servers:

        @cache
        def serve(name: str) -> Server:
            folder = trait_folder(FORMS[name].trait, tmp_path_factory.mktemp(name))
            return servers.enter_context(serving(folder))

        yield serve


def fish_of(arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), FISH)


def check_call(heard: Heard, *names: str) -> None:
    assert heard.reply.finish == "tool_calls"
    assert heard.reply.content == ""
    for call in heard.reply.calls:
        assert call.name in names
        fish_of(call.arguments)


# ------------------------------------------------------------------------------------------- chat completions


@pytest.mark.thorough
@pytest.mark.parametrize("name", RANDOM)
def test_a_call_is_made_where_one_is_demanded(name, babbling: Random):
    tools = {"tools": [CATCH, EAT], "parallel_tool_calls": False}
    for seed, (choice, names) in enumerate(
        [("required", ("catch", "eat")), ({"type": "function", "function": {"name": "eat"}}, ("eat",))]
    ):
        heard = hear(babbling(name), **tools, **BRIEF, tool_choice=choice, seed=seed)
        check_call(heard, *names)
        assert len(heard.reply.calls) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["hermes", "gemma4"])
def test_a_tool_keeps_its_name_for_the_client_whatever_the_notation_can_write(name, babbling: Random):
    server, tool = babbling(name), "mcp:fish/catch"
    asked = {"tools": [{"type": "function", "function": {"name": tool, "parameters": FISH}}], **BRIEF}
    chosen = {"type": "function", "function": {"name": tool}}
    heard = hear(server, **asked, tool_choice=chosen, parallel_tool_calls=False, seed=1)
    check_call(heard, tool)
    reply = heard.body["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "name": tool, "content": "done"}
    after = post(server, {"messages": [*QUESTION, reply, result], **asked, "max_tokens": 1}).json["usage"]
    assert after["prompt_tokens_details"]["cached_tokens"] >= heard.usage["total_tokens"] - 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", RANDOM)
def test_an_answer_is_what_its_schema_says(name, babbling: Random):
    for seed in range(2):
        heard = hear(
            babbling(name), **BRIEF, response_format=AS_FISH, seed=seed, tools=[CATCH], tool_choice="none"
        )
        fish_of(heard.reply.content)
        assert (heard.reply.finish, heard.reply.calls) == ("stop", ())


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.thorough
def test_reasoning_comes_first_and_is_free(name, babbling: Random):
    thinking = {**BY_CHANCE, "enable_thinking": True, "thinking_budget": 12}
    reasoning_texts = ""
    for seed in range(3):
        answer = hear(babbling(name), **thinking, response_format=AS_FISH, seed=seed)
        fish_of(answer.reply.content)
        demanded = {"tools": [CATCH], "tool_choice": "required", "parallel_tool_calls": False}
        called = hear(babbling(name), **thinking, **demanded, seed=seed)
        check_call(called, "catch")
        reasoning_texts += answer.reply.reasoning + called.reply.reasoning
    assert reasoning_texts
    with pytest.raises(ValueError):
        json.loads(reasoning_texts)


@pytest.mark.thorough
def test_a_greedy_model_ends_its_objects_too(babbling: Random):
    asked = {"enable_thinking": False, "temperature": 0, "max_tokens": 60, "response_format": AS_FISH}
    fish_of(hear(babbling("hermes"), **asked).reply.content)


@pytest.mark.thorough
def test_a_reply_that_is_cut_says_so(babbling: Random):
    heard = hear(babbling("hermes"), **{**BRIEF, "max_tokens": 3}, response_format=AS_FISH, seed=1)
    assert (heard.reply.finish, heard.usage["completion_tokens"]) == ("length", 3)


@pytest.mark.thorough
def test_alternatives_that_the_form_forbids_are_not_reported(babbling: Random):
    report = {"logprobs": True, "top_logprobs": 5}
    heard = hear(babbling("hermes"), **BRIEF, **report, response_format=AS_FISH, seed=1)
    first, *_ = heard.logprobs
    assert first["token"].startswith("{")
    assert all(option["token"].startswith("{") for option in first["top_logprobs"])


def test_what_is_demanded_costs_nothing_of_the_prompt_and_nothing_of_the_cache(babbling: Random):
    server = babbling("hermes")
    text = "Where do the eels of the Sargasso Sea go? " * 20
    question = {"messages": [{"role": "user", "content": text}], "tools": [CATCH], **BRIEF, "max_tokens": 1}
    first = post(server, question).json["usage"]
    for asked in ({"tool_choice": "none"}, {"tool_choice": "required"}, {"response_format": AS_FISH}):
        usage = post(server, {**question, **asked}).json["usage"]
        assert usage["prompt_tokens"] == first["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"] - 1


@pytest.mark.thorough
def test_neighbours_of_a_guided_reply_say_what_they_say_alone(babbling: Random):
    server = babbling("hermes")
    free = [{"messages": [{"role": "user", "content": f"{word}?"}]} for word in ("Cod", "Eel", "Ray")]
    free = [{**request, "enable_thinking": False, "temperature": 0, "max_tokens": 80} for request in free]
    guided = {"messages": QUESTION, **BRIEF, "response_format": AS_FISH}

    def answer_to(body: Mapping[str, Any]) -> str:
        return post(server, body).json["choices"][0]["message"]["content"]

    alone = [answer_to(body) for body in free]
    with ThreadPoolExecutor() as pool:
        together = list(pool.map(answer_to, [*free, *({**guided, "seed": seed} for seed in range(3))]))
    assert together[:3] == alone
    for text in together[3:]:
        fish_of(text)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.between is not None])
def test_no_more_than_one_call_is_reported_where_that_is_the_limit(name, family: FamilyServer):
    asked = {"tools": TOOLS, "enable_thinking": False, "parallel_tool_calls": False, **asking("pair")}
    reply = hear(family(name), **asked).reply
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [PATH]
    assert (reply.content, reply.finish) == ("", "tool_calls")
    both = hear(family(name), **{**asked, "parallel_tool_calls": True}).reply
    assert [(call.name, json.loads(call.arguments)) for call in both.calls] == [PATH, OTHER]


# ------------------------------------------------------------------------------------ messages and responses


def both_ways(server: Server, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The reply as a whole, and put together from its stream."""
    whole = ask(server.port, "POST", path, body)
    streamed = ask(server.port, "POST", path, {**body, "stream": True})
    assert (whole.status, streamed.status) == (200, 200), whole.body
    reader = messages if path == MESSAGES else responses
    return [whole.json, reader.put_together(list(reader.named_events(streamed.body)))]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["hermes", "gemma4"])
def test_messages_keep_their_form(name, babbling: Random):
    fish = {"name": "catch", "input_schema": FISH}
    question = {"messages": QUESTION, **BRIEF, "tools": [fish]}
    for demand in ({"type": "any"}, {"type": "tool", "name": "catch"}):
        choice = {**demand, "disable_parallel_tool_use": True}
        for message in both_ways(babbling(name), MESSAGES, {**question, "seed": 3, "tool_choice": choice}):
            assert message["stop_reason"] == "tool_use"
            (block,) = message["content"]
            jsonschema.validate(block["input"], FISH)
    form = {"type": "json_schema", "schema": FISH}
    titled = {"output_config": {"format": form}, "tool_choice": {"type": "none"}}
    for message in both_ways(babbling(name), MESSAGES, {**question, "seed": 4, **titled}):
        (block,) = message["content"]
        fish_of(block["text"])
        assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize("name", ["hermes", "harmony"])
@pytest.mark.thorough
def test_responses_keep_their_form(name, babbling: Random):
    fish = {"type": "function", "name": "catch", "parameters": FISH}
    question = {"input": "Fish?", **BRIEF, "tools": [fish], "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "catch"}):
        for response in both_ways(babbling(name), RESPONSES, {**question, "seed": 5, "tool_choice": choice}):
            (item,) = response["output"]
            fish_of(item["arguments"])
    form = {"format": {"type": "json_schema", "name": "fish", "schema": FISH}}
    body = {**question, "seed": 6, "text": form, "tool_choice": "none"}
    for response in both_ways(babbling(name), RESPONSES, body):
        (item,) = response["output"]
        fish_of(item["content"][0]["text"])
        assert response["status"] == "completed"


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": NO_FISH}},
         "response_format.json_schema.schema"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [CATCH, SHOE], "tool_choice": "required"}, "tools"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "shoe"}}}},
         "text.format.schema"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "shoe"}}}},
         "output_config.format.schema"),
    ],
    ids=["chat", "no tools", "tool", "responses", "messages"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_what_cannot_be_enforced_is_refused_before_anything_is_sent(
    path, asked, field, stream, babbling: Random
):
    question = {"input": "?"} if path == RESPONSES else {"messages": QUESTION, "max_tokens": 9}
    refused = ask(babbling("hermes").port, "POST", path, {**question, **asked, "stream": stream})
    assert refused.status == 400
    assert field in refused.json["error"]["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_what_no_grammar_enforces_is_named_in_a_header_and_the_rest_holds(path, stream, babbling: Random):
    server = babbling("hermes")
    schema = {"type": "array", "items": {"enum": ["a"]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    form = {"type": "json_schema", "name": "twice", "schema": schema}
    asked = {
        CHAT: {"messages": QUESTION, "response_format": {**form, "json_schema": {**form, "strict": False}}},
        RESPONSES: {"input": "?", "text": {"format": form}, "max_output_tokens": 400},
        MESSAGES: {"messages": QUESTION, "output_config": {"format": form}},
    }[path]
    heard = ask(server.port, "POST", path, {**BRIEF, **asked, "stream": stream})
    assert heard.status == 200, heard.body
    assert heard.headers["x-start-llm-unenforced"] == "uniqueItems"
    assert "what no grammar enforces of a schema: uniqueItems" in server.printed()
    other = ask(server.port, "POST", CHAT, {"messages": QUESTION, "max_tokens": 1})
    assert "x-start-llm-unenforced" not in other.headers
    if path == CHAT and not stream:
        assert json.loads(heard.json["choices"][0]["message"]["content"]) == ["a", "a"]
