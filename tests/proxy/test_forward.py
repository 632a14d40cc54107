"""Requests reach the server as they are, and its replies reach the client as they are, and at once."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from start_llm.proxy.backend import Backend
from start_llm.proxy.bodies import Body
from start_llm.proxy.forward import Forward
from tests.proxy.conftest import KEY, MODEL, SECRET, Answer, Proxied
from tests.server.client import ask

type Pieces = Callable[[list[Any]], AsyncIterator[bytes]]

PIECES = [b"data: one\n\n", b"data: tw", b"o\n\ndata: three\n\n", b"data: [DONE]\n\n"]
STREAM = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nx-start-llm-model: m\r\nx-other: no\r\n"
IN_CHUNKS = f"{STREAM}Transfer-Encoding: chunked\r\n\r\n".encode()
CHAT = "/v1/chat/completions"
NOBODY = "http://127.0.0.1:1"


async def silent() -> Any:
    """A client that has said all and waits."""
    await asyncio.Event().wait()


async def forwarded(
    url: str,
    path: str,
    sent: list[Any],
    receive: Any = silent,
    method: str = "POST",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send a request through the proxy's innermost part to a server, and note what its client is sent."""

    async def send(message: Any) -> None:
        sent.append(message)

    async def litellm(scope: Any, _receive: Any, send: Any) -> None:
        await send(scope["type"])

    async def find(_: Body) -> Backend:
        return backend

    backend = Backend(url, SECRET)
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    async with backend.connected():
        await Forward(litellm, find)(scope, receive, send)


def answered(pieces: Pieces, path: str = CHAT, receive: Any = silent) -> list[Any]:
    """What the client is sent, if the server writes these pieces and then hangs up."""
    sent: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError, asyncio.CancelledError):
            async for piece in pieces(sent):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def play() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await asyncio.wait_for(forwarded(f"http://127.0.0.1:{port}", path, sent, receive), 5)

    asyncio.run(play())
    return sent


def written(*pieces: bytes) -> Pieces:
    async def write(_: list[Any]) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return write


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def body_of(sent: list[Any]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


def is_ended(sent: list[Any]) -> bool:
    return sent[-1]["type"] == "http.response.body" and not sent[-1].get("more_body")


def test_a_stream_reaches_the_client_byte_for_byte_and_no_piece_waits_for_the_next():
    async def pieces(sent: list[Any]) -> AsyncIterator[bytes]:
        yield IN_CHUNKS
        for number, piece in enumerate(PIECES):
            while body_of(sent) != b"".join(PIECES[:number]):
                await asyncio.sleep(0)
            yield chunk(piece)
        yield chunk(b"")

    sent = answered(pieces)
    head = {"type": "http.response.start", "status": 200}
    headers = [(b"content-type", b"text/event-stream"), (b"x-start-llm-model", b"m")]
    assert sent[0] == {**head, "headers": headers}
    assert (body_of(sent), is_ended(sent)) == (b"".join(PIECES), True)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/v1/messages", "/v1/responses", "/responses"])
def test_a_stream_that_the_server_does_not_end_ends_with_an_error(path: str):
    sent = answered(written(IN_CHUNKS, chunk(b"data: 1\n\n")), path)
    first, event = body_of(sent).decode().split("\n\n", 1)
    assert first == "data: 1"
    assert "the server ended in the middle of this reply" in message_of(path, event)
    assert event.endswith("\n\n")
    assert is_ended(sent)


@pytest.mark.parametrize(
    ("path", "kind"),
    [(CHAT, "server_error"), ("/v1/messages", "api_error"), ("/v1/responses", "server_error")],
)
def test_a_cut_is_the_servers_fault_and_may_be_tried_again(path: str, kind: str):
    """`invalid_request_error` would tell a client not to send it again."""
    event = body_of(answered(written(IN_CHUNKS, chunk(b"data: 1\n\n")), path)).decode()
    error = json.loads(event.rpartition("data: ")[2])
    error = error["response"]["error"] if path == "/v1/responses" else error["error"]
    assert error.get("type", error.get("code")) == kind


def test_a_stream_of_responses_that_is_cut_before_its_first_event_has_one_to_begin_with():
    """OpenAI's clients raise if anything but `response.created` comes first."""
    sent = answered(written(IN_CHUNKS, chunk(b": reading\n\n")), "/v1/responses")
    comment, *events = body_of(sent).decode().rstrip().split("\n\n")
    assert comment == ": reading"
    kinds = [event.partition("\n")[0] for event in events]
    assert kinds == ["event: response.created", "event: response.failed"]
    assert "the server ended in the middle of this reply" in message_of("/v1/responses", events[1])


def message_of(path: str, event: str) -> str:
    """The message of an error event, in the protocol of a path."""
    named, _, data = event.rpartition("data: ")
    body = json.loads(data)
    if path.endswith("/responses"):
        assert named == "event: response.failed\n"
        return body["response"]["error"]["message"]
    assert named == ("event: error\n" if path == "/v1/messages" else "")
    return body["error"]["message"]


@pytest.mark.parametrize(
    "pieces", [[], [chunk(b"data: 1\n"), chunk(b"\n")]], ids=["no event", "an event in pieces"]
)
def test_between_two_events_a_cut_ends_with_an_error_wherever_the_pieces_end(pieces: list[bytes]):
    async def one_by_one(sent: list[Any]) -> AsyncIterator[bytes]:
        yield IN_CHUNKS
        for number, piece in enumerate(pieces):
            while len(sent) < 1 + number:
                await asyncio.sleep(0)
            yield piece

    sent = answered(one_by_one)
    assert "the server ended in the middle of this reply" in body_of(sent).decode()
    assert is_ended(sent)


def test_a_whole_reply_that_is_cut_stays_cut():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    assert not is_ended(answered(written(head)))


def test_in_the_middle_of_an_event_a_cut_stays_a_cut():
    sent = answered(written(IN_CHUNKS, chunk(b"data: 1\n\ndata: {")))
    assert body_of(sent) == b"data: 1\n\ndata: {"
    assert not is_ended(sent), "uvicorn closes the connection, so that the client sees the cut"


@pytest.mark.parametrize(("status", "retry"), [(200, ""), (400, ""), (503, "Retry-After: 7\r\n")])
def test_a_whole_reply_is_the_servers_errors_too(status: int, retry: str):
    raw = f'HTTP/1.1 {status} Any\r\nContent-Length: 9\r\nx-start-llm-model: m\r\n{retry}\r\n{{"a":  1}}'
    sent = answered(written(raw.encode()))
    fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    later = {"retry-after": "7"} if retry else {}
    assert (sent[0]["status"], fields) == (status, {"content-length": "9", "x-start-llm-model": "m", **later})
    assert (body_of(sent), is_ended(sent)) == (b'{"a":  1}', True)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_server_that_is_not_there_is_503_in_the_form_of_the_protocol(
    path: str, capsys: pytest.CaptureFixture[str]
):
    sent: list[Any] = []
    asyncio.run(forwarded(NOBODY, path, sent))
    refusal = json.loads(body_of(sent))
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"retry-after"]) == (503, b"2")
    assert "does not answer: ClientConnectorError" in refusal["error"]["message"]
    assert refusal.get("type") == ("error" if path == "/v1/messages" else None)
    assert '"status": 503' in capsys.readouterr().out, "the terminal shows it"


def test_control_characters_in_headers_reach_the_server_as_spaces():
    """The client of HTTP sends none, and `x-session-id` is a hint that fails no request."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def play() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            headers = [(b"x-session-id", b"a\x01b\x7fc\td")]
            await asyncio.wait_for(forwarded(url, CHAT, [], headers=headers), 5)

    asyncio.run(play())
    assert "x-session-id: a b c d\r\n" in heads[0]


def test_a_client_that_leaves_ends_the_request_to_the_server():
    heard: list[Any] = []

    async def leaves() -> Any:
        while not heard:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def endless(sent: list[Any]) -> AsyncIterator[bytes]:
        yield IN_CHUNKS
        while True:
            heard.extend(sent)
            yield chunk(b"data: 1\n\n")
            await asyncio.sleep(0.001)

    assert not is_ended(answered(endless, receive=leaves)), "the reply would never end by itself"


@pytest.mark.parametrize("path", ["/health/liveliness", "/health/liveness"])
def test_litellm_answers_what_is_its_own(path: str):
    sent: list[Any] = []
    asyncio.run(forwarded(NOBODY, path, sent, method="GET"))
    assert sent == ["http"]


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
    assert len(proxied.tunnel.heard(path)) == 2


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
    assert "the server ended in the middle of this reply" in message_of(path, event)
    connection.close()
