"""The server's replies reach clients as they are, and at once, however LiteLLM reads them."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from start_llm.proxy.relay import Relay, watch_replies
from tests.proxy.conftest import KEY, MODEL, Answer, Proxied
from tests.server.client import ask

type LiteLLM = Callable[[httpx.AsyncClient, Any], Awaitable[None]]

PIECES = [b"data: one\n\n", b"data: tw", b"o\n\ndata: three\n\n", b"data: [DONE]\n\n"]
STREAM = {"content-type": "text/event-stream", "x-start-llm-model": "m", "x-other": "dropped"}


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx.AsyncClient, "send", httpx.AsyncClient.send)
    watch_replies()


def relayed(litellm: LiteLLM, server: Callable[[list[Any]], httpx.Response]) -> list[Any]:
    """What the client is sent, if LiteLLM acts like this and the server answers so."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is asked for")

    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        transport = httpx.MockTransport(lambda _: server(sent))
        async with httpx.AsyncClient(transport=transport) as client:
            await litellm(client, send)

    asyncio.run(Relay(application)({"type": "http"}, receive, send))
    return sent


async def passes_on(client: httpx.AsyncClient, send: Any, path: str = "/v1/x") -> None:
    """LiteLLM: reads a stream in a task of its own, rewrites what it sees, and has words for errors."""

    async def read() -> bytes:
        async with client.stream("POST", f"http://server{path}") as reply:
            try:
                return b"".join([piece async for piece in reply.aiter_bytes()]).upper()
            except httpx.ReadError as error:
                return str(error).encode()

    body = await asyncio.create_task(read())
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-litellm", b"1")]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def body_of(sent: list[Any]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


def is_ended(sent: list[Any]) -> bool:
    return sent[-1]["type"] == "http.response.body" and not sent[-1].get("more_body")


def test_a_stream_reaches_the_client_byte_for_byte_and_no_piece_waits_for_the_next():
    async def pieces(sent: list[Any]) -> AsyncIterator[bytes]:
        for number, piece in enumerate(PIECES):
            assert body_of(sent) == b"".join(PIECES[:number])
            yield piece

    sent = relayed(passes_on, lambda sent: httpx.Response(200, headers=STREAM, content=pieces(sent)))
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert (sent[0]["status"], told) == (200, {name: STREAM[name] for name in STREAM if name != "x-other"})
    assert body_of(sent) == b"".join(PIECES)
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert is_ended(sent)


@pytest.mark.parametrize("path", ["/v1/x", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_that_the_server_does_not_end_ends_with_an_error(path: str):
    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise httpx.ReadError("Response payload is not completed")

    sent = relayed(
        partial(passes_on, path=path), lambda _: httpx.Response(200, headers=STREAM, content=pieces())
    )
    first, event = body_of(sent).decode().split("\n\n", 1)
    assert first == "data: 1"
    assert "the server ended in the middle of this reply" in told_by(path, event)
    assert event.endswith("\n\n")
    assert is_ended(sent)


def told_by(path: str, event: str) -> str:
    """The message of an error event, in the protocol of a path."""
    named, _, data = event.rpartition("data: ")
    told = json.loads(data)
    if path == "/v1/responses":
        assert named == "event: response.failed\n"
        return told["response"]["error"]["message"]
    assert named == ("event: error\n" if path == "/v1/messages" else "")
    return told["error"]["message"]


def test_in_the_middle_of_an_event_a_cut_stays_a_cut():
    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: 1\n\ndata: {"
        raise httpx.ReadError("Response payload is not completed")

    sent = relayed(passes_on, lambda _: httpx.Response(200, headers=STREAM, content=pieces()))
    assert body_of(sent) == b"data: 1\n\ndata: {"
    assert not is_ended(sent), "uvicorn closes the connection, so that the client sees the cut"


async def whole(client: httpx.AsyncClient, send: Any) -> None:
    reply = await client.post("http://server/v1/x")
    refused = reply.status_code >= 400
    await send({"type": "http.response.start", "status": 500 if refused else 200, "headers": []})
    await send({"type": "http.response.body", "body": b"LiteLLM's"})


def test_a_whole_reply_is_the_servers():
    sent = relayed(whole, lambda _: httpx.Response(200, content=b'{"a":  1}'))
    assert (body_of(sent), is_ended(sent)) == (b'{"a":  1}', True)
    assert (b"content-length", b"9") in sent[0]["headers"]


def test_an_error_is_told_by_litellm_with_the_servers_headers():
    refusal = {"retry-after": "7", "x-start-llm-model": "m"}
    sent = relayed(whole, lambda _: httpx.Response(400, headers=refusal, content=b"no"))
    assert (sent[0]["status"], sent[0]["headers"]) == (500, [(b"x-start-llm-model", b"m")])
    assert body_of(sent) == b"LiteLLM's"


@pytest.mark.parametrize(("told", "moment"), [({"retry-after": "7"}, b"7"), ({}, b"2")])
def test_a_full_server_says_when_to_come_again(told: dict[str, str], moment: bytes):
    async def full(client: httpx.AsyncClient, send: Any) -> None:
        await client.post("http://server/v1/x")
        headers = [(b"llm_provider-retry-after", b"9")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})

    (start,) = relayed(full, lambda _: httpx.Response(503, headers=told))
    assert start["headers"] == [(b"retry-after", moment)]


def test_what_litellm_answers_without_the_server_is_its_own():
    async def alone(_: httpx.AsyncClient, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"alive"})

    sent = relayed(alone, lambda _: httpx.Response(200))
    assert (sent[0]["headers"], body_of(sent)) == ([(b"a", b"b")], b"alive")


def test_what_the_proxy_asks_about_an_error_is_no_reply():
    async def refused(client: httpx.AsyncClient, send: Any) -> None:
        await client.post("http://server/v1/x")
        await send({"type": "http.response.start", "status": 500, "headers": []})
        async with client.stream("POST", "http://server/v1/x/count_tokens"):
            await send({"type": "http.response.body", "body": b"why"})

    async def counted() -> AsyncIterator[bytes]:
        yield b"{}"

    answers = [httpx.Response(200, content=counted()), httpx.Response(400)]
    sent = relayed(refused, lambda _: answers.pop())
    assert ([message.get("status") for message in sent], body_of(sent)) == ([500, None], b"why")


# ------------------------------------------------------------------------------------------ both real servers

MESSAGES = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
}
OF_ONE_REPLY = re.compile(
    r'"(?:id|item_id|created|created_at|completed_at|encrypted_content|signature)": ?(?:"[^"]*"|\d+)'
    r'|"(?:logprob|sequence_number)": ?-?[\d.e-]+'
)
OF_ONE_CONNECTION = re.compile(
    r"(?:Date|Server|Connection|.*request-id|Transfer-Encoding|Content-Length)", re.IGNORECASE
)


def without_chance(text: str) -> list[str]:
    """The events of a reply, or its one object, without ids, moments and rounding.

    How a text of several tokens is cut depends on the moment: such events are left out, since a later one of
    the same stream has all of it.
    """
    events = OF_ONE_REPLY.sub('"":""', text).split("\n\n")
    return [event for event in events if not event.startswith("event: response.output_text.delta")]


OF_CHATS = [{"stream_options": {"include_usage": True}}, {"logprobs": True}]


@pytest.mark.parametrize(
    ("path", "more"),
    [*((path, {}) for path in ASKED), *(("/v1/chat/completions", more) for more in OF_CHATS)],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.sample(6)
def test_a_reply_is_the_same_on_both_ports(proxied: Proxied, path: str, more: dict[str, Any], stream: bool):
    answers: list[Answer] = []
    body = {"model": "a-name", "temperature": 0, "stream": stream, **ASKED[path], **more}
    proxied.tunnel.clear()
    for _ in range(2):  # at first, none of it is cached for whoever asks without the proxy's key
        answers = [proxied.ask(path, body), direct(proxied, path, body)]
    first, second = map(heads_and_events, answers)
    assert first == second
    assert len(proxied.tunnel.heard(path)) == 2, "LiteLLM did not ask again"


def direct(proxied: Proxied, path: str, body: Any) -> Answer:
    reply = ask(proxied.server.port, "POST", path, body)
    return Answer(reply.status, reply.headers, reply.body.decode())


def heads_and_events(answer: Answer) -> tuple[dict[str, str], list[str]]:
    headers = {
        name.lower(): value for name, value in answer.headers.items() if not OF_ONE_CONNECTION.fullmatch(name)
    }
    return headers, without_chance(answer.text)


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_whose_server_goes_ends_with_an_error(proxied: Proxied, path: str):
    endless = {"model": MODEL, **ASKED[path], "max_tokens": 4000, "max_output_tokens": 4000, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", proxied.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", path, json.dumps(endless), headers)
    reply = connection.getresponse()
    for _ in range(12):
        assert reply.readline()
    backend = proxied.server.port
    proxied.tunnel.lead_to(1)
    proxied.tunnel.lead_to(backend)
    *_, event = reply.read().decode().rstrip().split("\n\n")
    assert "the server ended in the middle of this reply" in told_by(path, event)
    connection.close()
