"""Text completions: prompts in every form, and a stream that says what the whole body says."""

import codecs
import re
from typing import Any

import pytest
from hypothesis import given

from start_llm.core.chat import TextRequest
from start_llm.core.errors import InvalidRequest
from start_llm.core.events import Content, Finished, Output
from start_llm.protocols.base import ParsedRequest
from start_llm.protocols.openai.completions import parse
from tests.protocols.helpers import CONTEXT, PIECES, USAGE, body, events, replies, streamed, whole


def call(**fields: Any) -> ParsedRequest:
    return parse(body(**{"prompt": "hi", **fields}), {}, CONTEXT)


def prompt(value: Any) -> Any:
    parsed = call(prompt=value).request
    assert isinstance(parsed, TextRequest)
    return parsed.prompt


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        call(**fields)
    return refused.value


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("hi", "hi"),
        (["hi"], "hi"),
        ("", ""),
        ([1, 2, 999, 0], (1, 2, 999, 0)),
        ([[1, 2]], (1, 2)),
        ([7], (7,)),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_a_list_of_one_of_them(sent, read):
    assert prompt(sent) == read


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        (5, "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, "a"], "prompt"),
        ([[]], "prompt"),
        ([1, 2.0], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, None], "prompt[1]"),
        ([1, 1000], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([[1, 10**400]], "prompt[0][1]"),
        ([[1, {}]], "prompt[0][1]"),
    ],
)
def test_any_other_prompt_is_refused_with_the_path_of_the_fault(sent, param):
    assert refusal(prompt=sent).param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("best_of", 2),
        ("echo", True),
        ("echo", 0),
        ("suffix", "x"),
        ("adapter", 3),
        ("logprobs", 21),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(field, value):
    assert refusal(**{field: value}).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("guided_json", {"type": "object"}),
        ("guided_choice", ["yes", "no"]),
        ("structured_outputs", {"regex": "[0-9]+"}),
        ("grammar", "root ::= 'x'"),
    ],
)
def test_a_form_of_the_text_that_would_be_ignored_is_refused_by_name(field, value):
    error = refusal(**{field: value})
    assert error.param == field
    assert "send a chat request" in error.message


def test_values_that_ask_for_nothing_unbuilt_are_taken():
    assert call(response_format={"type": "text"}, guided_json=None, grammar="").request == call().request
    assert call(n=1, best_of=1, echo=False, suffix="").request == call().request
    assert call(echo=None, suffix=None, logprobs=None).request == call().request


def test_logprobs_is_a_number_of_alternatives():
    assert call(logprobs=0).request.options.top_logprobs == 0
    assert call(logprobs=3).request.options.top_logprobs == 3
    assert call().request.options.top_logprobs is None
    assert refusal(logprobs=True).param == "logprobs"


def test_a_whole_reply_has_the_shape_of_the_protocol():
    answer = whole(call(model="davinci").reply, [Content("Hello", tokens=(0,))], Finished("stop", USAGE))
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert (answer["model"], answer["system_fingerprint"]) == ("davinci", "lab/loaded")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert re.fullmatch(r"cmpl-[A-Za-z0-9]{24}", answer["id"])


def test_a_stream_ends_with_reason_and_usage_in_one_chunk_or_in_two_for_those_who_ask():
    outputs: list[Output] = [Content("Hello", tokens=(0,))]
    end = Finished("length", USAGE)
    *_, last = streamed(call(stream=True).reply, outputs, end)
    assert (last["choices"][0]["finish_reason"], last["usage"]["total_tokens"]) == ("length", 10)
    reply = call(stream=True, stream_options={"include_usage": True}).reply
    *_, last, usage = streamed(reply, outputs, end)
    assert (last["choices"][0]["finish_reason"], "usage" in last) == ("length", False)
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 10)


def test_a_sign_of_life_is_a_chunk_without_text():
    frame = call().reply.keep_alive()
    assert isinstance(frame.data, dict)
    assert frame.data["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}]


@given(reply=replies)
def test_a_stream_and_a_whole_reply_say_the_same(reply):
    outputs, end = reply
    fields = {"logprobs": 2, "return_token_ids": True}
    parts = [chunk["choices"][0] for chunk in streamed(call(**fields).reply, outputs, end)]
    (choice,) = whole(call(**fields).reply, outputs, end)["choices"]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
    for name, column in choice["logprobs"].items():
        assert [entry for part in parts for entry in (part["logprobs"] or {name: []})[name]] == column
    assert parts[-1]["finish_reason"] == choice["finish_reason"] == end.reason


@given(reply=replies)
def test_an_offset_is_where_the_token_begins_in_the_text(reply):
    outputs, end = reply
    (choice,) = whole(call(logprobs=0, return_token_ids=True).reply, outputs, end)["choices"]
    scored = choice["logprobs"]
    decoder, characters = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for token, offset in zip(choice["token_ids"], scored["text_offset"], strict=False):
        assert offset == characters
        characters += len(decoder.decode(PIECES[token]))
    assert scored["text_offset"] == sorted(scored["text_offset"])


def test_offsets_count_characters_also_after_one_of_two_tokens():
    outputs, end = events([4, 5, 0])
    (choice,) = whole(call(logprobs=0).reply, outputs, end)["choices"]
    assert choice["text"] == "🐟Hello"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
