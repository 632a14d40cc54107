"""Whatever a client sends, it gets a JSON 4xx that names the field at fault, or a closed connection where it
made no request; and the next good request is served."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from backports import zstd

from tests.conftest import ChainModel
from tests.server.client import CHAT, TEXT, Client, ask, message
from tests.serving import Server, serving

USER = {"role": "user", "content": "Hi"}
GOOD = {CHAT: {"messages": [USER], "max_tokens": 1}, TEXT: {"prompt": "Hi", "max_tokens": 1}}
ENDPOINTS = (CHAT, TEXT)
CONTEXT_WINDOW = 4096


class Case(NamedTuple):
    """A body for a path, and the field that the refusal has to name; None if it cannot name one."""

    path: str
    body: bytes
    param: str | None

    def __str__(self) -> str:
        return f"{self.path} {self.param} {self.body[:300]!r}"


def case(path: str, param: str | None, /, **fields: Any) -> Case:
    return Case(path, json.dumps(GOOD[path] | fields).encode(), param)


# ---------------------------------------------------------------------------- every field of every wrong type

VALUES = {"boolean": True, "number": 7.5, "string": "x", "array": [[]], "object": {"x": 1}}

COMMON_FIELDS = {
    "model": "string",
    "stream": "boolean",
    "stream_options": "object",
    "max_tokens": "number",
    "max_completion_tokens": "number",
    "temperature": "number",
    "top_p": "number",
    "top_k": "number",
    "min_p": "number",
    "repetition_penalty": "number",
    "repetition_context_size": "number",
    "presence_penalty": "number",
    "frequency_penalty": "number",
    "seed": "number",
    "stop": "string array",
    "logit_bias": "object",
    "return_token_ids": "boolean",
    "n": "number",
    "adapter": "string",
    "hlg": "object boolean",
}
CHAT_FIELDS = COMMON_FIELDS | {
    "messages": "array",
    "tools": "array",
    "tool_choice": "string object",
    "parallel_tool_calls": "boolean",
    "response_format": "object",
    "chat_template_kwargs": "object",
    "logprobs": "boolean",
    "top_logprobs": "number",
    "enable_thinking": "boolean",
    "thinking": "boolean string object",
    "thinking_budget": "number",
    "reasoning": "boolean string object",
    "reasoning_effort": "string",
    "output_config": "object",
}
TEXT_FIELDS = COMMON_FIELDS | {
    "prompt": "string array",
    "logprobs": "number",
    "best_of": "number",
    "echo": "boolean",
    "suffix": "string",
}
INTEGERS = ("max_tokens", "max_completion_tokens", "top_k", "repetition_context_size", "seed")


def _turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "x"} | fields, USER]}


def _tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"}} | fields]}


def _call(**function: Any) -> dict[str, Any]:
    return _turn(tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"} | function}])


NESTED_CHAT_FIELDS: tuple[tuple[str, str, Callable[[Any], dict[str, Any]]], ...] = (
    ("messages[0]", "object", lambda value: {"messages": [value]}),
    ("messages[0].role", "string", lambda value: {"messages": [{"role": value, "content": "x"}]}),
    ("messages[0].content", "string array", lambda value: {"messages": [{"role": "user", "content": value}]}),
    ("messages[0].content[0]", "string object", lambda value: {"messages": [USER | {"content": [value]}]}),
    (
        "messages[0].content[0].type",
        "string",
        lambda value: {"messages": [USER | {"content": [{"type": value, "text": "x"}]}]},
    ),
    (
        "messages[0].content[0].text",
        "string",
        lambda value: {"messages": [USER | {"content": [{"type": "text", "text": value}]}]},
    ),
    ("messages[0].name", "string", lambda value: {"messages": [USER | {"name": value}]}),
    ("messages[1].tool_call_id", "string", lambda value: _turn(role="tool", tool_call_id=value)),
    ("messages[1].name", "string", lambda value: _turn(role="tool", name=value)),
    ("tools[0]", "object", lambda value: {"tools": [value]}),
    ("tools[0].type", "string", lambda value: _tool(type=value)),
    ("tools[0].function", "object", lambda value: _tool(function=value)),
    ("tools[0].function.name", "string", lambda value: _tool(function={"name": value})),
    ("tools[0].function.description", "string", lambda v: _tool(function={"name": "f", "description": v})),
    ("tools[0].function.parameters", "object", lambda v: _tool(function={"name": "f", "parameters": v})),
    ("tools[0].defer_loading", "boolean", lambda value: _tool(defer_loading=value)),
    (
        "messages[1].content[0].tool_name",
        "string",
        lambda value: _turn(role="tool", content=[{"type": "tool_reference", "tool_name": value}]),
    ),
    ("thinking.type", "string", lambda value: {"thinking": {"type": value}}),
    ("thinking.budget_tokens", "number", lambda value: {"thinking": {"budget_tokens": value}}),
    ("reasoning.effort", "string", lambda value: {"reasoning": {"effort": value}}),
    ("stream_options.include_usage", "boolean", lambda value: {"stream_options": {"include_usage": value}}),
    ("stop[1]", "string", lambda value: {"stop": ["a", value]}),
    ("logit_bias.5", "number", lambda value: {"logit_bias": {"5": value}}),
)


HISTORY_FIELDS: tuple[tuple[str, str, Callable[[Any], dict[str, Any]]], ...] = (
    ("messages[1].reasoning_content", "string", lambda value: _turn(reasoning_content=value)),
    ("messages[1].reasoning", "string", lambda value: _turn(reasoning=value)),
    ("messages[1].tool_calls", "array", lambda value: _turn(tool_calls=value)),
    ("messages[1].tool_calls[0]", "object", lambda value: _turn(tool_calls=[value])),
    ("messages[1].tool_calls[0].function", "object", lambda value: _turn(tool_calls=[{"function": value}])),
    (
        "messages[1].tool_calls[0].id",
        "string",
        lambda value: _turn(tool_calls=[{"id": value, "function": {"name": "f"}}]),
    ),
    ("messages[1].tool_calls[0].function.name", "string", lambda value: _call(name=value)),
    ("messages[1].tool_calls[0].function.arguments", "string object", lambda value: _call(arguments=value)),
)
"""Fields in front of the newest question."""


def wrong_values(accepted: str) -> Iterator[Any]:
    return (value for kind, value in VALUES.items() if kind not in accepted.split())


def wrong_types() -> Iterator[Case]:
    for path, fields in ((CHAT, CHAT_FIELDS), (TEXT, TEXT_FIELDS)):
        for name, accepted in fields.items():
            yield from (case(path, name, **{name: value}) for value in wrong_values(accepted))
        yield from (case(path, name, **{name: 7.5}) for name in INTEGERS)
    for name, accepted, fields_with in NESTED_CHAT_FIELDS:
        yield from (case(CHAT, name, **fields_with(value)) for value in wrong_values(accepted))


# ------------------------------------------------------------------------------- numbers that cannot be meant

HUGE = ("1e400", "-1e400", "9" * 400, "9" * 5000, "-" + "9" * 5000)
OUT_OF_RANGE = {
    "max_tokens": "-2 2147483648",
    "max_completion_tokens": "0 -2 2147483648",
    "temperature": "-0.1 5.1",
    "top_p": "-0.1 1.1",
    "top_k": "-1 2147483648",
    "min_p": "-0.1 1.1",
    "repetition_penalty": "-1 0 10.1",
    "repetition_context_size": "-1 1048577",
    "presence_penalty": "-2.1 2.1",
    "frequency_penalty": "-2.1 2.1",
    "seed": "-9223372036854775809 9223372036854775808",
    "n": "0 3 -1",
}


def _with_number(path: str, name: str, number: str) -> Case:
    """The number stands in the body as it is written here."""
    return Case(path, json.dumps(GOOD[path] | {name: "@"}).replace('"@"', number).encode(), name)


def bad_numbers() -> Iterator[Case]:
    for name, values in OUT_OF_RANGE.items():
        yield from (_with_number(path, name, number) for path in ENDPOINTS for number in values.split())
        yield from (_with_number(CHAT, name, number) for number in HUGE)
    yield _with_number(CHAT, "max_tokens", "0")  # of a text it is a prewarm
    yield from (_with_number(CHAT, "thinking_budget", number) for number in ("-1", "7.5", "-1e400"))
    yield from (_with_number(CHAT, "top_logprobs", number) for number in ("-1", "21", *HUGE))
    yield from (_with_number(TEXT, "logprobs", number) for number in ("-1", "21", *HUGE))
    for number in ("-1", "100000", *HUGE):
        yield Case(TEXT, b'{"prompt": [1, %b]}' % number.encode(), "prompt[1]")
    for number in ("-100.5", "101", *HUGE):
        yield Case(TEXT, b'{"prompt": "Hi", "logit_bias": {"5": %b}}' % number.encode(), "logit_bias.5")
    for constant in ("NaN", "Infinity", "-Infinity"):
        yield _with_number(CHAT, "temperature", constant)._replace(param=None)  # such a body is not JSON


# ------------------------------------------------------------------------------------------ messages, prompts

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def bad_contents() -> Iterator[Case]:
    yield Case(CHAT, b"{}", "messages")
    yield case(CHAT, "messages", messages=None)
    yield case(CHAT, "messages", messages=[])
    yield case(CHAT, "messages[0].role", messages=[{"content": "x"}])
    for role in ("", "root", "User", "tools"):
        yield case(CHAT, "messages[0].role", messages=[USER | {"role": role}])
    for part in ({"type": "video"}, {"type": ""}, {"text": "x"}):
        yield case(CHAT, "messages[0].content[0].type", messages=[USER | {"content": [part]}])
    yield case(CHAT, "messages[0].content[0].text", messages=[USER | {"content": [{"type": "text"}]}])
    for part in (IMAGE, IMAGE | {"type": "input_image"}, IMAGE | {"type": "image"}):
        yield case(CHAT, "messages[1].content[1]", messages=[USER, USER | {"content": ["x", part]}])
    for name in (None, ""):
        yield case(CHAT, "tools[0].function.name", **_tool(function={"name": name}))
        yield case(CHAT, "tools[0].type", **_tool(type=name))
    yield case(CHAT, "tools[0].function", tools=[{"type": "function"}])
    yield case(CHAT, "chat_template_kwargs.tokenize", chat_template_kwargs={"tokenize": True})
    yield case(CHAT, "chat_template_kwargs.messages", chat_template_kwargs={"messages": []})
    for prompt in (None, "", [], [[]], [""], ["a", "b"], [[1], [2]], [1, "a"]):
        yield case(TEXT, "prompt", prompt=prompt)
    yield case(TEXT, "prompt[0][1]", prompt=[[1, -1]])
    yield case(TEXT, "prompt", prompt=[1] * CONTEXT_WINDOW)
    yield case(CHAT, "messages", messages=[USER | {"content": "\x01" * CONTEXT_WINDOW}])
    for path in ENDPOINTS:
        yield case(path, "stop", stop="")
        yield case(path, "stop", stop=["a", ""])
        yield case(path, "stop", stop=["x" * 1001])
        yield case(path, "stop", stop=[str(number) for number in range(17)])
        for key in ("", "x", "-1", "1.5", "100000", "9" * 5000, "\u0665"):
            yield case(path, "logit_bias", logit_bias={key: 1})


def unbuilt_values() -> Iterator[Case]:
    for path in ENDPOINTS:
        yield case(path, "n", n=2)
        yield case(path, "adapter", adapter="mine")
        yield case(path, "hlg.enabled", hlg={"enabled": 1})
        yield case(path, "hlg.width", hlg={"width": "4"})
        yield case(path, "hlg.toe", hlg={"toe": 0})
    for value in ("required", "any"):
        yield case(CHAT, "tool_choice", tool_choice=value)
    yield case(TEXT, "best_of", best_of=2)
    yield case(TEXT, "echo", echo=True)
    yield case(TEXT, "suffix", suffix="x")


# ------------------------------------------------------------------------------------------ text and JSON


def no_unicode() -> Iterator[Case]:
    for not_utf8 in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80"):
        yield Case(TEXT, b'{"prompt": "%b"}' % not_utf8, None)
    for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-16-be"):
        yield Case(TEXT, json.dumps(GOOD[TEXT]).encode(encoding), None)


NOT_AN_OBJECT = (
    *(b"", b" ", b"{", b"}", b"[]", b'[{"prompt": "Hi"}]', b"null", b"true", b"7", b'"prompt"', b"prompt=Hi"),
    *(
        b"{'prompt': 'Hi'}",
        b'{"prompt": "Hi"',
        b'{"prompt": "Hi",}',
        b'{"prompt": "Hi"} x',
        b'{"prompt" "Hi"}',
    ),
    *(b'{"prompt": "H\ni"}', b'{"prompt": "\\x"}', b'{"prompt": 01}', b'{"prompt": .5}', b'{1: "Hi"}', b"\0"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": "Hi", "a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
)


def no_json() -> Iterator[Case]:
    return (Case(path, body, None) for path in ENDPOINTS for body in NOT_AN_OBJECT)


CASES = list(chain(wrong_types(), bad_numbers(), bad_contents(), unbuilt_values(), no_unicode(), no_json()))
FIELDS_AT_FAULT = list(dict.fromkeys((sample.path, sample.param) for sample in CASES))


def test_the_tables_hold_hundreds_of_different_bodies():
    assert len({(sample.path, sample.body) for sample in CASES}) == len(CASES)
    assert len(CASES) > 500


@pytest.fixture(scope="module")
def scripted(scripted_model: Path) -> Iterator[Server]:
    with serving(scripted_model, max_body_bytes=2**20, max_kv_size=CONTEXT_WINDOW) as server:
        yield server


@pytest.fixture
def connection(scripted: Server) -> Iterator[Client]:
    with Client(scripted.port) as client:
        yield client


@pytest.mark.parametrize(("path", "param"), FIELDS_AT_FAULT)
@pytest.mark.sample(12)
def test_a_bad_body_is_refused_by_the_name_of_its_field(connection: Client, path: str, param: str | None):
    for bad in CASES:
        if (bad.path, bad.param) == (path, param):
            reply = connection.ask("POST", path, bad.body)
            assert (reply.status, reply.error["param"]) == (400, param), bad
            assert reply.error["type"] == "invalid_request_error"
            assert names(reply.error["message"], param), bad
    assert connection.ask("POST", path, GOOD[path]).status == 200


def mended() -> Iterator[Case]:
    for name, accepted, fields_with in HISTORY_FIELDS:
        yield from (case(CHAT, name, **fields_with(value)) for value in wrong_values(accepted))
    yield case(CHAT, "messages[1].tool_calls[0].function", **_turn(tool_calls=[{}]))
    for name in (None, ""):
        yield case(CHAT, "messages[1].tool_calls[0].function.name", **_call(name=name))
    lone = "a\ud800b"
    yield case(CHAT, "messages[0].content", messages=[USER | {"content": lone}])
    yield case(CHAT, "messages[0].content", messages=[USER | {"content": "\udc00"}])
    yield case(
        CHAT, "messages[0].content[0].text", messages=[USER | {"content": [{"type": "text", "text": lone}]}]
    )
    yield case(CHAT, "messages[0].name", messages=[USER | {"name": lone}])
    yield case(CHAT, "tools[0].function.name", **_tool(function={"name": lone}))
    yield case(
        CHAT,
        r"tools[0].function.parameters.\ud800",
        **_tool(function={"parameters": {"\ud800": 1}, "name": "f"}),
    )
    yield case(CHAT, "messages[1].tool_calls[0].function.name", **_call(name=lone))
    yield case(CHAT, "messages[1].tool_calls[0].function.arguments.a", **_call(arguments={"a": lone}))
    yield case(CHAT, "chat_template_kwargs.a", chat_template_kwargs={"a": lone})
    yield case(TEXT, "prompt", prompt=lone)
    yield case(TEXT, r"\udfff", **{"\udfff": 1})
    for path in ENDPOINTS:
        yield case(path, "model", model=lone)
        yield case(path, "stop[0]", stop=[lone])


@pytest.mark.parametrize("bad", list(mended()), ids=lambda bad: f"{bad.path} {bad.param}")
def test_what_no_session_can_take_back_is_mended_and_not_refused(connection: Client, bad: Case):
    assert connection.ask("POST", bad.path, bad.body).status == 200


def names(text: str, param: str | None) -> bool:
    """True if a message mentions the field, or says that all of it is too long."""
    return param is None or f"'{param}'" in text or "maximum context length" in text


@pytest.mark.thorough
def test_what_a_chat_template_refuses_is_refused(chain_model: ChainModel):
    template = (
        "{% for message in messages %}"
        "{{ raise_exception('No word about fish') if 'fish' in message.content }}"
        "{{ message.content ~ '\n' }}"
        "{% endfor %}"
    )
    about_fish = {"role": "user", "content": "What is a fish?"}
    with (
        serving(chain_model({"\n": ["Hello"]}, chat_template=template)) as server,
        Client(server.port) as client,
    ):
        refused = client.ask("POST", CHAT, {"messages": [USER, about_fish]})
        assert (refused.status, refused.error["param"]) == (400, "messages")
        assert "No word about fish" in refused.error["message"]
        assert client.ask("POST", CHAT, {"messages": [USER]}).status == 200
        assert client.ask("POST", CHAT, {"messages": [USER, USER]}).status == 200


# --------------------------------------------------------------------------------- what is never an error

UNKNOWN_VALUES = (None, True, -1, 1.5, 10**400, "x", "\U0001f41f", [], [{}], {"a": {"b": [None]}})


FOREIGN = {
    CHAT: {"echo": 1.5, "suffix": [], "best_of": {}},
    TEXT: {"reasoning_effort": 1.5, "thinking": [], "tools": 7},
}
"""Fields of one endpoint that another knows."""


@pytest.mark.parametrize("path", ENDPOINTS)
def test_unknown_fields_are_never_an_error(connection: Client, path: str):
    unknown = {f"unknown_{index}": value for index, value in enumerate(UNKNOWN_VALUES)}
    known_elsewhere = {"user": 7, "metadata": [], "store": "x", "session_id": {}, **FOREIGN[path]}
    body = GOOD[path] | unknown | known_elsewhere
    assert connection.ask("POST", path, body).status == 200
    huge = json.dumps(body)[:-1] + ', "unknown": [1e999, ' + "9" * 5000 + "]}"
    assert connection.ask("POST", path, huge.encode()).status == 200


@pytest.mark.thorough
def test_unknown_fields_inside_messages_and_tools_are_never_an_error(connection: Client):
    for value in UNKNOWN_VALUES:
        strange = {"unknown": value}
        part = {"type": "text", "text": "x", "cache_control": value}
        tool = {"type": "function", "function": {"name": "f", "strict": value} | strange} | strange
        call = {"id": "1", "index": value, "function": {"name": "f", "arguments": "{}"} | strange}
        messages = [USER | strange, {"role": "assistant", "tool_calls": [call]}, USER | {"content": [part]}]
        body = {"messages": messages, "tools": [tool, {"type": "unknown"} | strange], "max_tokens": 1}
        assert connection.ask("POST", CHAT, body).status == 200


@pytest.mark.parametrize(("path", "fields"), [(CHAT, CHAT_FIELDS), (TEXT, TEXT_FIELDS)], ids=ENDPOINTS)
def test_null_means_absent(connection: Client, path: str, fields: dict[str, str]):
    body = GOOD[path] | {"temperature": 0}
    expected = connection.ask("POST", path, body).json
    nulls = {name: None for name in fields if name not in body}
    answer = connection.ask("POST", path, body | nulls | {"session_id": None, "metadata": None}).json
    assert (answer["choices"], answer["model"]) == (expected["choices"], expected["model"])


def test_null_inside_messages_means_absent(connection: Client):
    names = ("content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "refusal")
    turns = [{"role": role} | dict.fromkeys(names) for role in ("system", "user", "assistant", "tool")]
    assert connection.ask("POST", CHAT, {"messages": turns, "max_tokens": 1}).status == 200


# ------------------------------------------------------------------------------------------- HTTP itself

LONG = b"x" * 300_000
MORE_THAN_BUFFERS_HOLD = b"x" * 20_000_000  # its sender is still sending when it is refused
POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
NOT_HTTP: dict[str, tuple[bytes, int]] = {
    "one word": (b"garbage\r\n\r\n", 400),
    "four words": (b"GET / x HTTP/1.1\r\n\r\n", 400),
    "no version": (b"GET /health HTTP\r\n\r\n", 400),
    "version of letters": (b"GET /health HTTP/x.y\r\n\r\n", 400),
    "version with a sign": (b"GET /health HTTP/-1.1\r\n\r\n", 400),
    "endless version": (b"GET /health HTTP/1." + b"1" * 5000 + b"\r\n\r\n", 400),
    "other protocol": (b"GET /health SIP/2.0\r\n\r\n", 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\xc3\x28\n\r\n", 400),
    "POST of HTTP/0.9": (b"POST /v1/completions\r\n\r\n", 400),
    "long line": (b"GET /" + LONG + b" HTTP/1.1\r\n\r\n", 431),
    "long line without end": (LONG, 431),
    "long header": (b"GET /health HTTP/1.1\r\nA: " + LONG + b"\r\n\r\n", 431),
    "endless header": (b"GET /health HTTP/1.1\r\nA: " + MORE_THAN_BUFFERS_HOLD, 431),
    "long header on a POST": (POST + b"A: " + LONG + b"\r\nContent-Length: 300000\r\n\r\n" + LONG, 431),
    "too many headers": (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n", 431),
    "no length": (POST + b"\r\n", 411),
    "no length, and a body": (POST + b"\r\n{}\r\n\r\n", 411),
    "length after a line that is no header": (POST + b"nonsense\r\nContent-Length: 2\r\n\r\n{}", 411),
    "chunked and a length": (
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        400,
    ),
    "chunked twice": (CHUNKED[:-2] + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
    "chunked and compressed on the way": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked with a blank that is none": (POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "chunked in HTTP/1.0": (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk without a size": (CHUNKED + b"\r\n{}\r\n0\r\n\r\n", 400),
    "chunk with a sign": (CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk with a prefix": (CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n", 400),
    "chunk longer than its size": (CHUNKED + b"1\r\n{}\r\n0\r\n\r\n", 400),
    "chunk after a bare line feed": (CHUNKED + b"2\n{}\r\n0\r\n\r\n", 400),
    "chunk with an endless extension": (CHUNKED + b"2;" + LONG, 400),
    "chunk with a size of many digits": (CHUNKED + b"1" * 20 + b"\r\n", 400),
    "endless trailers": (CHUNKED + b"0\r\n" + b"A: b\r\n" * 50_000, 400),
    "chunk longer than allowed": (CHUNKED + b"%x\r\n" % 20_000_000, 413),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "longer than allowed": (POST + b"Content-Length: 20000000\r\n\r\n" + MORE_THAN_BUFFERS_HOLD, 413),
    "longer than allowed, not sent": (POST + b"Content-Length: 2000000\r\n\r\n", 413),
}
BAD_LENGTHS = {"-1": 400, "+2": 400, "2,2": 400, "2.0": 400, "1e1": 400, "0x2": 400, "two": 400, "": 400}
BAD_LENGTHS |= {"\xb2": 400, "2 2": 400, "_2": 400, "1" + "0" * 18: 413, "9" * 60_000: 413}
BAD_PATHS = [
    (method, path) for method in ("GET", "POST", "DELETE") for path in ("/nothing", "/v1", "/v1/x/y")
]
BAD_PATHS += [("GET", "*"), ("GET", "/%00"), ("GET", "/\xff"), ("GET", "/v1/models/other")]
BAD_METHODS = [
    ("GET", CHAT),
    ("HEAD", TEXT),
    ("PUT", CHAT),
    ("DELETE", TEXT),
    ("PATCH", CHAT),
    ("OPTIONS", TEXT),
]
BAD_METHODS += [("POST", "/health"), ("POST", "/v1/models"), ("PUT", "/stats"), ("DELETE", "/v1/models/x")]
BAD_METHODS += [
    ("BREW", "/health"),
    ("post", CHAT),
    ("get", "/health"),
    ("M" * 1000, CHAT),
    ("__init__", "/"),
]


def _answer_to(port: int, raw: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error object for the only request of a connection, which is then closed."""
    with Client(port) as client:
        client.send(raw)
        reply = client.reply()
        assert client.is_closed()
        return reply.status, reply.error


def assert_serves(server: Server) -> None:
    assert ask(server.port, "POST", CHAT, GOOD[CHAT]).status == 200


@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_hardly_http_gets_a_json_refusal_and_a_closed_connection(scripted: Server, name: str):
    raw, status = NOT_HTTP[name]
    assert _answer_to(scripted.port, raw)[0] == status
    assert_serves(scripted)


@pytest.mark.parametrize("length", BAD_LENGTHS, ids=lambda length: repr(length[:20]))
def test_a_length_that_is_no_length_is_refused(scripted: Server, length: str):
    raw = message("POST", TEXT, headers={"Content-Length": length}) + b"{}"
    status, error = _answer_to(scripted.port, raw)
    assert status == BAD_LENGTHS[length]
    assert ("Content-Length" if status == 400 else "MAX_BODY_BYTES") in error["message"]
    assert_serves(scripted)


@pytest.mark.parametrize(("method", "path"), BAD_PATHS)
def test_an_unknown_path_is_404(scripted: Server, method: str, path: str):
    reply = ask(scripted.port, method, path, {} if method == "POST" else None)
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")
    assert_serves(scripted)


@pytest.mark.parametrize(("method", "path"), BAD_METHODS)
def test_a_wrong_method_is_405(scripted: Server, method: str, path: str):
    reply = ask(scripted.port, method, path, {} if method == "POST" else None)
    assert reply.status == 405
    assert method not in reply.headers["allow"]
    assert method == "HEAD" or reply.error["type"] == "invalid_request_error"
    assert_serves(scripted)


def test_the_same_length_twice_is_one_length(scripted: Server):
    body = json.dumps(GOOD[TEXT]).encode()
    twice = b"Content-Length: %d\r\n" % len(body) * 2
    with Client(scripted.port) as client:
        client.send(POST + twice + b"\r\n" + body)
        assert client.reply().status == 200


CHUNKS = {
    "one": lambda data: b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data),
    "many": lambda data: b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n",
    "with extensions and trailers": lambda data: (
        b"0%X ;a=b\r\n%b\r\n0;last\r\nA: b\r\nContent-Length: 9\r\n\r\n" % (len(data), data)
    ),
}


@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_body_in_chunks_is_read_and_the_next_request_too(scripted: Server, chunks: str):
    data = json.dumps(GOOD[TEXT]).encode()
    with Client(scripted.port) as client:
        client.send((CHUNKED + CHUNKS[chunks](data)) * 2)
        replies = [client.reply(), client.reply()]
        assert [reply.status for reply in replies] == [200, 200]
        assert client.ask("GET", "/health").status == 200


def test_a_target_in_absolute_form_is_served_for_its_own_host_alone(scripted: Server):
    raw = message("POST", f"http://localhost:{scripted.port}{TEXT}", GOOD[TEXT])
    other = raw.replace(b"Host: localhost", b"Host: localhost:%d" % scripted.port)
    for sent, status in ((other, 200), (raw.replace(b"Host: localhost\r\n", b""), 200), (raw, 400)):
        with Client(scripted.port) as client:
            client.send(sent)
            assert client.reply().status == status
    assert ask(scripted.port, "GET", "http://evil.example/health").status == 400


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
def test_a_compressed_body_is_read_also_in_chunks(
    scripted: Server, coding: str, compress: Callable[[bytes], bytes]
):
    data = compress(json.dumps(GOOD[TEXT]).encode())
    coded = {"Content-Encoding": coding}
    with Client(scripted.port) as client:
        client.send(message("POST", TEXT, data, coded))
        header = f"Content-Encoding: {coding}\r\n\r\n".encode()
        client.send(CHUNKED[:-2] + header + CHUNKS["one"](data))
        assert [client.reply().status, client.reply().status] == [200, 200]


@pytest.mark.parametrize(
    ("coding", "data", "status"),
    [
        ("br", b"{}", 415),
        ("gzip", b"{}", 400),
        ("zstd", b"{}", 400),
        ("gzip", gzip.compress(b" " * (2**20 + 1)), 413),
        ("zstd", zstd.compress(b" " * (2**20 + 1)), 413),
    ],
)
def test_a_compressed_body_that_cannot_be_read_is_refused(
    scripted: Server, coding: str, data: bytes, status: int
):
    reply = ask(scripted.port, "POST", TEXT, data, {"Content-Encoding": coding})
    assert reply.status == status
    assert coding in reply.error["message"] or status == 413
    assert_serves(scripted)


def test_chunks_may_be_as_long_as_a_body_and_no_longer(scripted: Server):
    for length, status in ((2**20, 200), (2**20 + 1, 413)):
        text = json.dumps(GOOD[TEXT]).encode()
        data = text + b" " * (length - len(text))
        pieces = [data[at : at + 1000] for at in range(0, length, 1000)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        with Client(scripted.port) as client:
            client.send(CHUNKED + chunks)
            assert client.reply().status == status


def test_http_0_9_is_answered_and_closed(scripted: Server):
    with Client(scripted.port) as client:
        client.send(b"GET /health\r\n\r\n")
        assert client.reply().status == 200
        assert client.is_closed()


def test_what_follows_a_refused_body_is_not_taken_for_a_request(scripted: Server):
    smuggled = message("POST", TEXT, GOOD[TEXT])
    for framing in (
        b"",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: x\r\n",
        b"Content-Length: x\r\n",
    ):
        with Client(scripted.port) as client:
            client.send(POST + framing + b"\r\n" + smuggled)
            assert client.reply().status in (400, 411)
            assert client.is_closed()


# --------------------------------------------------------------------------------- requests that never come


@pytest.fixture(scope="module")
def impatient(scripted_model: Path) -> Iterator[Server]:
    with serving(scripted_model, header_s=0.4, body_s=0.4, http_idle_s=0.7) as server:
        yield server


@pytest.mark.sample(3)
@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "Hi"'], ids=["none", "a byte", "half"])
def test_a_half_sent_body_is_408(impatient: Server, body: bytes):
    status, error = _answer_to(impatient.port, POST + b"Content-Length: 1000\r\n\r\n" + body)
    assert (status, error["type"]) == (408, "timeout_error")
    assert "0.4 seconds" in error["message"]
    assert_serves(impatient)


@pytest.mark.parametrize("begun", [b"P", b"POST /v1/completions", POST, POST + b"Host: x\r\nContent-"])
@pytest.mark.sample(3)
def test_half_sent_headers_are_hung_up_on(impatient: Server, begun: bytes):
    with Client(impatient.port) as client:
        client.send(begun)
        assert client.is_closed()
    assert_serves(impatient)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_request_whose_headers_never_end_is_not_carried_out(impatient: Server, method: str):
    """Its end may be the part that matters: a client that has died, or that had to give way."""
    path = "/v1/models/nobody/load" if method == "POST" else "/none"
    refused = len(impatient.get("/activity")["refused"])
    with Client(impatient.port) as client:
        client.send(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nx-api-k".encode())
        client.socket.shutdown(socket.SHUT_WR)
        assert client.is_closed()
    assert len(impatient.get("/activity")["refused"]) == refused


def test_an_idle_connection_is_hung_up_on_after_its_time(impatient: Server):
    for requests in (0, 1):
        with Client(impatient.port) as client:
            assert all(client.ask("GET", "/health").status == 200 for _ in range(requests))
            began = time.monotonic()
            assert client.is_closed()
            assert 0.5 < time.monotonic() - began < 3
    assert_serves(impatient)


@pytest.mark.parametrize("begun", [b"", b"POST /v1", POST, POST + b"Content-Length: 9\r\n\r\n", b"\r\n"])
def test_a_client_that_leaves_in_its_request_harms_nobody(impatient: Server, begun: bytes):
    for leave in (Client.close, Client.reset):
        client = Client(impatient.port)
        client.send(begun)
        leave(client)
    assert_serves(impatient)
