"""Requests out of a seed: every tenth is right, most of the others are wrong in one way or another."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from start_llm.protocols.routes import ROUTES
from tests.fuzz.bodies import (
    CHAT,
    DOWNLOAD,
    EXPECTED,
    MESSAGES,
    RESPONSES,
    TEXT,
    Body,
    Expected,
    scripted,
    valid,
)
from tests.fuzz.changes import mutated
from tests.fuzz.pictures import SEEING, with_pictures
from tests.server.client import message
from tests.server.paths import GET_PATHS

type Ending = Literal["read", "read once", "half close", "leave", "reset"]
"""The client's next step after sending: read; read, and use the connection for nothing else; say
that it sends no more, and read; go."""

EVERY_NORMAL = 10
PROTOCOLS = (CHAT, TEXT, MESSAGES, RESPONSES)
_PATHS = {
    CHAT: "/v1/chat/completions",
    TEXT: "/v1/completions",
    MESSAGES: "/v1/messages",
    RESPONSES: "/v1/responses",
}
_BODIES = {"chat": CHAT, "text": TEXT, "messages": MESSAGES, "responses": RESPONSES}
_TAKING_BODIES = [route for route in ROUTES if route.body]
PROTOCOL_AT = {
    path: _BODIES.get(route.body or "", DOWNLOAD) for route in _TAKING_BODIES for path in route.paths
}
"""Which bodies a path takes."""
_ASKED = {
    path: _BODIES[route.body or ""]
    for route in _TAKING_BODIES
    for path in route.paths
    if route.body in _BODIES and route.path not in _PATHS.values()
}
"""Paths that take the body of another one, and generate nothing."""
_METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE CONNECT PRI get POSTÄ".split()
_READS = (
    *GET_PATHS,
    "/v1/models/",
    "/v1/models/nobody",
    "/nothing",
    "/v1/responses/resp_none",
    "/responses/x/y",
    "/fit?model=nothing",
    "/downloads/x",
    "/downloads/x/pause",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        kind: what is wrong with it, for counts.
        target: of its line.
        body: as JSON, where nothing but that may be wrong with it; None: it cannot be made smaller.
        sent: all bytes of it.
        ending: what its client does then.
        expected: of a normal one that generates.
        may_get_nothing: it need not be answered.
    """

    kind: str
    method: str = "POST"
    target: str
    body: Any = None
    sent: bytes = b""
    ending: Ending = "read"
    expected: Expected | None = None
    may_get_nothing: bool = False

    @property
    def is_normal(self) -> bool:
        return self.kind.startswith("normal")

    def with_body(self, body: Any) -> Request:
        return replace(self, body=body, sent=message(self.method, self.target, written(body)))


def written(body: Any) -> bytes:
    """As JSON: half a surrogate pair as an escape, and infinity as a number that is too large."""
    return json.dumps(body).replace("Infinity", "1e999").encode()


def request(seed: int, index: int, kept: Sequence[str]) -> Request:
    """Request `index` of a seed.

    Args:
        kept: ids of responses that the server may know.
    """
    random = Random(f"{seed} {index}")
    if index % EVERY_NORMAL == 0:
        return _normal(random)
    return random.choices(_ABNORMAL, _WEIGHTS)[0](random, kept)


def request_with_images(seed: int, index: int, kept: Sequence[str]) -> Request:
    """Request `index` of a seed, for a model that sees: every tenth has images that it can be shown."""
    random = Random(f"images {seed} {index}")
    if index % EVERY_NORMAL == 0:
        return _pictures(random, (), sound=True)
    return _pictures(random, kept)


# ------------------------------------------------------------------------------------------------ normal ones


def _normal(random: Random) -> Request:
    if random.random() < 0.2:
        return _normal_question(random)
    protocol = random.choice(PROTOCOLS)
    script = "answer" if protocol == TEXT else random.choice([*EXPECTED])
    body = scripted(protocol, script, random)
    plain = Request(kind=f"normal {protocol}", target=_PATHS[protocol], expected=EXPECTED[script])
    return plain.with_body(body)


def _normal_question(random: Random) -> Request:
    path = random.choice([*GET_PATHS, *_ASKED])
    if path in GET_PATHS:
        return Request(kind="normal page", method="GET", target=path, sent=message("GET", path))
    body = valid(_ASKED[path], random)
    return Request(kind="normal question", target=path).with_body(body)


# ------------------------------------------------------------------------------------------------- other ones


def _target(random: Random) -> str:
    path = random.choice([*PROTOCOL_AT]) if random.random() < 0.4 else _PATHS[random.choice(PROTOCOLS)]
    return path + random.choice(("",) * 8 + ("?beta=true", "/"))


def _protocol_of(target: str) -> str:
    return PROTOCOL_AT[target.partition("?")[0].rstrip("/")]


def _valid(random: Random, kept: Sequence[str]) -> tuple[str, Body]:
    target = _target(random)
    protocol = _protocol_of(target)
    body = valid(protocol, random)
    if protocol == RESPONSES and kept and random.random() < 0.3:
        body["previous_response_id"] = random.choice(kept)
    return target, body


def _wrong_values(random: Random, kept: Sequence[str]) -> Request:
    target, body = _valid(random, kept)
    return Request(kind="wrong values", target=target).with_body(mutated(body, random))


def _as_it_is(random: Random, kept: Sequence[str]) -> Request:
    target, body = _valid(random, kept)
    return Request(kind="valid", target=target).with_body(body)


def _of_another_protocol(random: Random, kept: Sequence[str]) -> Request:
    _, body = _valid(random, kept)
    return Request(kind="of another protocol", target=_target(random)).with_body(body)


def _pictures(random: Random, kept: Sequence[str], *, sound: bool = False) -> Request:
    """Images of all kinds; some bodies are wrong in other ways too."""
    protocol = random.choice(SEEING)
    target = random.choice([path for path, spoken in PROTOCOL_AT.items() if spoken == protocol])
    body = with_pictures(valid(protocol, random), protocol, random, sound=sound)
    if sound:
        return Request(kind="normal pictures", target=target).with_body(body)
    if protocol == RESPONSES and kept and random.random() < 0.3:
        body["previous_response_id"] = random.choice(kept)
    if random.random() < 0.3:
        body = mutated(body, random)
    return Request(kind="pictures", target=target).with_body(body)


_NUMBER = re.compile(rb"(?<=[:\[] )\d+")


def _wrong_text(random: Random, kept: Sequence[str]) -> Request:
    """The body is no JSON, or not what JSON should be."""
    target, body = _valid(random, kept)
    text = written(body)
    at = random.randrange(len(text))
    made: tuple[Callable[[], bytes], ...] = (
        lambda: text[:at],
        lambda: text[:at] + random.randbytes(3) + text[at:],
        lambda: text[:at] + text[at + 1 :],
        lambda: text + random.choice((b"}", b"\x00", b"{}", b"\n\n", b"x" * 3000)),
        lambda: _with_a_key_twice(body, random),
        lambda: json.dumps(body).encode(random.choice(("utf-16", "utf-32", "utf-8-sig"))),
        lambda: json.dumps(mutated(body, random), ensure_ascii=False).encode("utf-8", "surrogatepass"),
        lambda: random.choice(
            (b"", b" ", b"null", b"[]", b'"x"', b"5", b"NaN", b"{", b"\xff\xfe", b"{'a': 1}")
        ),
        lambda: _NUMBER.sub(random.choice((b"NaN", b"-Infinity", b"1e", b"01", b".5")), text, count=1),
        lambda: b"[" * 100_000 + b"]" * 100_000,
        lambda: b'{"messages":' * 3000,
        lambda: b'{"max_tokens":' + b"9" * random.choice((30, 5000)) + b"," + text[1:],
    )
    sent = message("POST", target, random.choice(made)())
    return Request(kind="wrong text", target=target, sent=sent)


def _with_a_key_twice(body: Body, random: Random) -> bytes:
    name = random.choice([*body])
    value = random.choice((body[name], None, [], "x"))
    return b"{" + json.dumps(name).encode() + b":" + json.dumps(value).encode() + b"," + written(body)[1:]


_HEADERS = (
    {"Host": "evil.example"},
    {"Host": ""},
    {"Host": "localhost:99999"},
    {"Host": "[::1"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Content-Type": "text/plain"},
    {"Content-Type": ""},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Accept": "application/xml"},
    {"Expect": "100-continue"},
    {"Connection": "close"},
    {"Connection": "upgrade", "Upgrade": "websocket"},
    {"Authorization": "Bearer \xff\xfe"},
    {"Authorization": "Basic"},
    {"x-api-key": "k" * 5000},
    {"x-session-id": "\x7f" * 300, "anthropic-beta": "all,of,them"},
    {"Cookie": "a=b; " * 2000},
    {"X-Forwarded-For": "evil", "Forwarded": "for=evil"},
    {"Content-Encoding": "gzip"},
    {"X-Long": "y" * 70_000},
    {f"X-{number}": "z" for number in range(120)},
    {"X Y": "blank in a name"},
    {" X": "folded"},
    {"": "no name"},
)


def _odd_headers(random: Random, kept: Sequence[str]) -> Request:
    target, body = _valid(random, kept)
    headers: dict[str, str] = {}
    for _ in range(random.choice((1, 2))):
        headers |= random.choice(_HEADERS)
    sent = message("POST", target, written(body), headers, version=random.choice(("1.1", "1.1", "1.0")))
    return Request(kind="headers", target=target, sent=sent, ending="read once")


def _wrong_length(random: Random, kept: Sequence[str]) -> Request:
    target, body = _valid(random, kept)
    text = written(body)
    length = len(text)
    lines = random.choice(
        (
            [f"Content-Length: {random.randrange(length)}"],
            [f"Content-Length: {length + random.randint(1, 10_000)}"],
            [f"Content-Length: {random.choice((-1, '', 'x', '1.5', '+3', '0x10', '٣', 10**30, 2**40))}"],
            [f"Content-Length: {length}", f"Content-Length: {length - 1}"],
            ["Transfer-Encoding: chunked"],
            ["Transfer-Encoding: chunked", f"Content-Length: {length}"],
            [],
        )
    )
    head = "\r\n".join(
        [f"POST {target} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines]
    )
    sent = f"{head}\r\n\r\n".encode() + text
    return Request(kind="length", target=target, sent=sent, ending="half close", may_get_nothing=True)


def _odd_line(random: Random, kept: Sequence[str]) -> Request:
    names = [*PROTOCOL_AT, *_READS, *(f"/v1/responses/{name}" for name in kept[-3:])]
    target = random.choice(names) + random.choice(
        ("",) * 4 + ("/", "//", "/../..", "?x=%ff&limit=-1", "%00", "/\xff", "?" + "a=b&" * 500, "#x", ";x")
    )
    method = random.choice(_METHODS)
    line = random.choice((f"{method} {target} HTTP/1.1",) * 12 + _broken_lines(method, target))
    sent = f"{line}\r\nHost: localhost\r\n\r\n".encode("latin-1", "replace")
    return Request(kind="line", method=method, target=target, sent=sent, ending="read once")


def _broken_lines(method: str, target: str) -> tuple[str, ...]:
    return (
        f"{method} {target}",
        f"{method} {target} HTTP/2.0",
        f"{method} {target} HTTP/x.y",
        f"{method}  {target} HTTP/1.1 more",
        target,
        "\x16\x03\x01\x02\x00",
        f"{method} {target}{'a' * 70_000} HTTP/1.1",
    )


def _of_a_response(random: Random, kept: Sequence[str]) -> Request:
    """GET and DELETE of what may be kept, and its items."""
    name = random.choice(kept) if kept and random.random() < 0.8 else random.choice(("resp_x", "%2e%2e", "ü"))
    query = random.choice(
        ("",) * 3
        + ("?limit=1", "?limit=0", "?order=asc&limit=2", "?after=x", "?order=%F0%9F", "?limit=" + "9" * 40)
    )
    tail = random.choice(("", "/input_items" + query, "/input_items" + query))
    method = random.choice(("GET", "GET", "GET", "HEAD", "DELETE"))
    target = f"{random.choice(('/v1/responses/', '/responses/'))}{name}{tail}"
    return Request(kind="of a response", method=method, target=target, sent=message(method, target))


def _gone(random: Random, kept: Sequence[str]) -> Request:
    """The client goes: in the middle of its request, or of the reply."""
    target, body = _valid(random, kept)
    sent = message("POST", target, written(body))
    cut = random.choice((len(sent), random.randrange(len(sent)), random.randrange(len(sent))))
    ending: Ending = random.choice(("half close", "leave", "reset"))
    return Request(kind="gone", target=target, sent=sent[:cut], ending=ending, may_get_nothing=True)


_TABLE: tuple[tuple[int, Callable[[Random, Sequence[str]], Request]], ...] = (
    (56, _wrong_values),
    (6, _as_it_is),
    (6, _pictures),
    (3, _of_another_protocol),
    (9, _wrong_text),
    (6, _odd_headers),
    (4, _wrong_length),
    (5, _odd_line),
    (4, _of_a_response),
    (7, _gone),
)
_ABNORMAL = [make for _, make in _TABLE]
_WEIGHTS = [weight for weight, _ in _TABLE]
