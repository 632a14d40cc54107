"""The server's access policy on real sockets: hosts, pages, keys, bodies, paths, and nothing that is
fetched.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from start_llm.access.access_policy import AccessPolicy
from start_llm.app import App
from start_llm.config.server_variables import HttpSettings
from start_llm.core.errors import Forbidden, SettingsError
from start_llm.server.handler import Handler
from start_llm.server.listener import Listener, ServerContext
from start_llm.telemetry.terminal import Terminal
from start_llm.wiring.from_settings import access_policy
from tests.conftest import TinyModel
from tests.flat_settings import settings_of
from tests.server.breakable import OneModel
from tests.server.client import CHAT, Client, Reply, ask, message
from tests.server.paths import GET_PATHS, NAMED_ROUTES, POST_PATHS, with_name
from tests.serving import Server, serving

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
KEY = "open-sesame"
EVERY_PATH = [("POST", path) for path in POST_PATHS] + [("GET", path) for path in GET_PATHS]
EVERY_PATH += [(method, with_name(template, "x")) for method, template in NAMED_ROUTES] + [("GET", "/none")]
OPEN = ("/", "/api/hello", "/health")
CONVERSATION = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: CONVERSATION,
    MESSAGES: CONVERSATION,
    RESPONSES: {"input": "Hello", "max_output_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
}


def refusal(reply: Reply, path: str) -> dict[str, Any]:
    """The error object, in the form of the protocol that the path belongs to."""
    if path.startswith(MESSAGES):
        assert reply.json["type"] == "error"
        assert reply.json["error"].keys() == {"type", "message"}
        return reply.json["error"]
    return reply.error


def own_address() -> str:
    """One of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: this asks the routing table alone.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.fixture(scope="module")
def guarded(scripted_model: Path) -> Iterator[Server]:
    """Listens everywhere, so it asks for a key."""
    with serving(scripted_model, server_host="0.0.0.0", access_keys=(KEY, "another")) as server:
        yield server


# ------------------------------------------------------------------------------------------ hosts and pages


@pytest.mark.product
@pytest.mark.parametrize(("method", "path"), EVERY_PATH)
@pytest.mark.parametrize(
    "lie", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}], ids=str
)
def test_web_pages_and_foreign_names_are_403_everywhere(
    scripted: Server, method: str, path: str, lie: dict[str, str]
):
    reply = ask(scripted.port, method, path, {} if method == "POST" else None, lie)
    assert reply.status == 403
    assert refusal(reply, path)["type"] == "permission_error"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/health", "/none"])
def test_a_preflight_is_refused_and_allows_nothing(scripted: Server, path: str):
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for origin in ({}, {"Origin": "http://evil.example"}, {"Origin": f"http://localhost:{scripted.port}"}):
        reply = ask(scripted.port, "OPTIONS", path, headers={**wish, **origin})
        assert reply.status in (403, 404, 405)
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.fixture(scope="module")
def with_pages(tiny_model: TinyModel) -> Generator[Server]:
    with serving(tiny_model("qwen3"), origins=("http://localhost:3000",), access_keys=(KEY,)) as server:
        yield server


def test_a_listed_page_may_ask_before_it_has_a_key(with_pages: Server):
    page = {"Origin": "http://localhost:3000"}
    wish = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-a"}
    with Client(with_pages.port) as client:
        reply = client.ask("OPTIONS", CHAT, headers=page | wish)
        assert (reply.status, reply.body) == (204, b"")
        assert reply.headers["access-control-allow-origin"] == page["Origin"]
        assert reply.headers["access-control-allow-headers"] == "content-type,x-a"
        refused = client.ask("POST", CHAT, BODIES[CHAT], page)
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == page["Origin"], "it can read why"


@pytest.mark.parametrize("stream", [False, True])
def test_a_listed_page_may_read_its_reply(with_pages: Server, stream: bool):
    page = {"Origin": "http://localhost:3000", "Authorization": f"Bearer {KEY}"}
    reply = ask(with_pages.port, "POST", CHAT, BODIES[CHAT] | {"stream": stream}, page)
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, page["Origin"])
    assert reply.headers["vary"] == "Origin"


def test_a_page_that_is_not_listed_may_nothing_although_others_may(with_pages: Server):
    page = {"Origin": "http://localhost:3001", "Authorization": f"Bearer {KEY}"}
    for method, body in (("POST", BODIES[CHAT]), ("OPTIONS", None)):
        wish = {"Access-Control-Request-Method": "POST"} if method == "OPTIONS" else {}
        reply = ask(with_pages.port, method, CHAT, body, page | wish)
        assert reply.status == 403
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize("path", BODIES)
def test_no_reply_allows_a_page_anything(scripted: Server, path: str):
    own = {"Origin": "http://localhost", "Host": "localhost"}
    for stream in (False, True):
        reply = ask(scripted.port, "POST", path, BODIES[path] | {"stream": stream}, own)
        assert reply.status == 200
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
@pytest.mark.parametrize("path", POST_PATHS)
def test_a_body_that_a_page_could_send_is_415(scripted: Server, path: str, kind: str):
    headers = {"Content-Type": kind}
    reply = ask(scripted.port, "POST", path, BODIES.get(path, CONVERSATION), headers)
    assert reply.status == 415
    assert "application/json" in refusal(reply, path)["message"]


def test_a_body_without_a_type_is_415(scripted: Server):
    body = json.dumps(CONVERSATION).encode()
    with Client(scripted.port) as client:
        client.send(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
        )
        client.send(body)
        assert client.reply().status == 415


def test_a_host_that_is_there_twice_is_400(scripted: Server):
    with Client(scripted.port) as client:
        client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert client.reply().status == 400


def test_the_name_that_the_server_listens_as_is_its_own():
    settings = settings_of(server_host="MyBox.local", access_keys=(KEY,))
    own, other = (
        [("Host", f"{name}:8080"), ("Authorization", f"Bearer {KEY}")] for name in ("mybox.local", "evil")
    )
    access_policy(settings, "of the proxy").admit(own, "192.168.1.5")
    with pytest.raises(Forbidden):
        access_policy(settings, "of the proxy").admit(other, "192.168.1.5")


# ------------------------------------------------------------------------------------------------------ keys


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_off_loopback_nothing_starts_without_a_key(host: str):
    with pytest.raises(SettingsError, match=re.escape(f"MLX_HOST={host!r} is not loopback")) as refused:
        App(settings_of(server_host=host, server_port=0, proxy_is_on=False), Terminal())
    assert "MLX_API_KEY" in str(refused.value)


@pytest.mark.product
@pytest.mark.parametrize(("method", "path"), EVERY_PATH)
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"x-api-key": KEY.upper()}], ids=str
)
def test_without_a_key_nothing_but_a_sign_of_life_is_sent(
    guarded: Server, method: str, path: str, headers: dict[str, str]
):
    reply = ask(guarded.port, method, path, {} if method == "POST" else None, headers)
    if path in OPEN:
        assert reply.status == 200
        return
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert refusal(reply, path)["type"] == "authentication_error"


@pytest.mark.parametrize("key", [{"Authorization": f"Bearer {KEY}"}, {"x-api-key": "another"}], ids=str)
@pytest.mark.parametrize("path", BODIES)
def test_a_key_opens_in_either_header(guarded: Server, path: str, key: dict[str, str]):
    assert ask(guarded.port, "POST", path, BODIES[path], key).status == 200


def test_a_body_is_not_read_before_there_is_a_key(guarded: Server):
    with Client(guarded.port) as client:
        client.send(
            message("POST", CHAT, headers={"Content-Length": "1000000", "Content-Type": "application/json"})
        )
        assert client.reply().status == 401, "although nothing of the body has come"


def test_others_on_the_network_are_served_by_address_with_a_key(guarded: Server):
    address = own_address()
    for headers, status in (({}, 401), ({"x-api-key": KEY}, 200)):
        for host in (address, f"{address}:{guarded.port}"):
            with socket.create_connection((address, guarded.port), timeout=20) as connection:
                connection.sendall(message("GET", "/v1/models", headers={"Host": host, **headers}))
                assert connection.recv(100).startswith(b"HTTP/1.1 %d " % status)
    with socket.create_connection((address, guarded.port), timeout=20) as connection:
        connection.sendall(message("GET", "/v1/models", headers={"Host": "evil.example", "x-api-key": KEY}))
        assert connection.recv(100).startswith(b"HTTP/1.1 403 ")


def test_keys_are_never_printed(guarded: Server):
    printed = guarded.printed()
    assert KEY not in printed
    assert '-H "Authorization: Bearer $MLX_API_KEY"' in printed
    assert 'export OPENAI_API_KEY="$MLX_API_KEY"' in printed
    assert f"http://127.0.0.1:{guarded.port}/v1" in printed, "0.0.0.0 is no name to call it by"


# ------------------------------------------------------------------------------------ nothing is ever fetched


@contextmanager
def trap() -> Generator[tuple[str, list[object]]]:
    """A server that nobody should call: its address, and who called."""
    caught: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def catch() -> None:
            try:
                while True:
                    connection, who = listener.accept()
                    caught.append(who)
                    connection.close()
            except OSError:
                return

        thread = threading.Thread(target=catch)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/image.png", caught
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def with_images(path: str, url: str) -> Iterator[dict[str, Any]]:
    """Bodies with an image in the newest question, and in one before it."""
    parts: dict[str, list[dict[str, Any]]] = {
        CHAT: [{"type": "image_url", "image_url": {"url": url}}],
        MESSAGES: [
            {"type": "image", "source": {"type": "url", "url": url}},
            {"type": "document", "source": {"type": "url", "url": url}},
        ],
        RESPONSES: [{"type": "input_image", "image_url": url}, {"type": "input_file", "file_url": url}],
    }
    field = "input" if path == RESPONSES else "messages"
    for part in parts[path]:
        new = {"role": "user", "content": [part]}
        old = [new, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "And?"}]
        limits = {"max_tokens": 1, "max_output_tokens": 1}
        yield {field: [new], **limits}
        yield {field: old, **limits}


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_no_address_in_a_request_is_ever_asked(scripted: Server, path: str, tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("xyzzy-secret")
    with trap() as (url, caught):
        for target in (url, secret.as_uri(), str(secret), "http://169.254.169.254/", "http://[::1]:1/"):
            for body in with_images(path, target):
                reply = ask(scripted.port, "POST", path, body)
                assert reply.status in (200, 400)
                assert b"xyzzy-secret" not in reply.body
        assert not caught


# ------------------------------------------------------------------------------------ paths, sizes and depths

TRICKS = [
    "/v1/models/../..",
    "/v1/models/%2e%2e/%2e%2e",
    "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/models/%00",
    "/v1/models/%ff%fe",
    "/v1/models/" + "x" * 60_000,
    "/v1/models/" + "%2e" * 20_000,
    "/v1/responses/../../stats",
    "/v1/responses/%2e%2e%2f%2e%2e%2fstats",
    "/v1/responses/%00",
    "/v1/responses/" + "x" * 60_000,
    "/./health",
    "/v1/../health",
    "/health/..",
    "/health;x",
    "/%68ealth",
    "/v1//models",
]


@pytest.mark.parametrize("path", TRICKS, ids=lambda path: path[:40])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_path_is_only_ever_a_name(scripted: Server, path: str, method: str):
    reply = ask(scripted.port, method, path, {} if method == "POST" else None)
    assert reply.status in (404, 405)
    assert b"passwd" not in reply.body or b"root:" not in reply.body


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_absolute_target_of_another_host_is_refused(scripted: Server, method: str):
    reply = ask(scripted.port, method, "http://evil.example/health", {} if method == "POST" else None)
    assert (reply.status, reply.error["message"]) == (400, "host is given twice, and not the same.")


def test_a_path_trick_does_not_get_around_the_key(guarded: Server):
    for path in (
        "/health/../v1/models",
        "/health%2f..%2fv1/models",
        "//v1/models",
        "/v1/models/%2e",
        "/HEALTH",
        "/x",
    ):
        assert ask(guarded.port, "GET", path).status == 401


OVERSIZED: dict[str, dict[str, Any]] = {
    "nesting of arrays": {"messages": "[" * 200_000},
    "20,000 messages": {"messages": [{"role": "user", "content": "x"}] * 20_000},
    "20,000 parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 20_000}]},
    "a long model": {"model": "m" * 1_000_000, **CONVERSATION},
    "a long session": {"session_id": "s" * 1_000_000, **CONVERSATION},
    "a long role": {"messages": [{"role": "r" * 1_000_000, "content": "x"}]},
    "10,000 stop strings": {"stop": ["x" * 100] * 10_000, **CONVERSATION},
    "5,000 tools": {
        "tools": [{"type": "function", "function": {"name": f"t{n}"}} for n in range(5_000)],
        **CONVERSATION,
    },
    "a deep schema": {
        "tools": [{"type": "function", "function": {"name": "t", "parameters": "["}}],
        **CONVERSATION,
    },
}


def deep(text: str, depth: int) -> bytes:
    return text.replace('"["', '{"a":' * depth + "1" + "}" * depth).encode()


@pytest.mark.thorough
@pytest.mark.parametrize("name", OVERSIZED)
def test_what_is_too_much_is_answered_and_holds_nobody_up(scripted: Server, name: str):
    text = json.dumps(OVERSIZED[name])
    body = deep(text, 900) if '"["' in text else text.replace('"[[', "[[").replace('[["', "[[").encode()
    reply = ask(scripted.port, "POST", CHAT, body)
    assert reply.status in (200, 400), reply.body[:200]
    assert ask(scripted.port, "POST", CHAT, CONVERSATION).status == 200


def test_a_body_beyond_the_limit_is_413_before_it_is_read(scripted_model: Path):
    with serving(scripted_model, max_body_bytes=2**20) as server:
        for path in BODIES:
            reply = ask(server.port, "POST", path, b" " * (2**20 + 1))
            assert reply.status == 413
            assert refusal(reply, path)["type"] in ("invalid_request_error", "request_too_large")


# ------------------------------------------------------------------------------ the handler, and no model yet


@pytest.fixture(scope="module")
def listener_alone() -> Iterator[Listener]:
    """A listener with nothing behind it: whatever gets through fails."""
    listener = Listener("127.0.0.1", 0, Handler, HttpSettings(max_body_bytes=1000))
    nothing: Any = None
    listener.open(
        ServerContext(
            models=OneModel(nothing),
            library=nothing,
            seal=nothing,
            access_policy=AccessPolicy((KEY,)),
        )
    )
    yield listener
    listener.stop_accepting()
    listener.connections.close_all()


@pytest.mark.parametrize(("method", "path"), EVERY_PATH)
def test_every_path_has_the_access_policy(listener_alone: Listener, method: str, path: str):
    lies: list[tuple[dict[str, str], int]] = [({"Host": "evil.example", "x-api-key": KEY}, 403)]
    lies += [({"Origin": "null", "x-api-key": KEY}, 403)]
    lies += [] if path in OPEN else [({}, 401), ({"x-api-key": "x"}, 401)]
    for headers, status in lies:
        reply = ask(listener_alone.port, method, path, {} if method == "POST" else None, headers)
        assert (reply.status, refusal(reply, path)["type"][:4]) == (
            status,
            "perm" if status == 403 else "auth",
        )


@pytest.mark.parametrize("path", POST_PATHS)
def test_every_body_has_to_be_json_of_bounded_size(listener_alone: Listener, path: str):
    key = {"x-api-key": KEY}
    assert ask(listener_alone.port, "POST", path, {}, key | {"Content-Type": "text/plain"}).status == 415
    assert ask(listener_alone.port, "POST", path, b" " * 1001, key).status == 413
    assert ask(listener_alone.port, "POST", path, b"{", key).status == 400


@pytest.mark.parametrize("path", POST_PATHS)
def test_nothing_is_begun_while_the_server_stops(path: str):
    listener = Listener("127.0.0.1", 0, Handler, HttpSettings())
    nothing: Any = None
    context = ServerContext(models=OneModel(nothing), library=nothing, seal=nothing)
    listener.open(context)
    context.drain.begin(7)
    try:
        reply = ask(listener.port, "POST", path, {})
    finally:
        listener.stop_accepting()
        listener.connections.close_all()
    assert (reply.status, refusal(reply, path)["type"]) == (503, "overloaded_error")
    assert 6 <= int(reply.headers["retry-after"]) <= 7
