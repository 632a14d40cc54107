"""The proxy's own access policy, without LiteLLM behind it: what goes through and what does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from start_llm.access.access_policy import AccessPolicy
from start_llm.access.backend_secret import BackendSecret
from start_llm.access.cross_origin import AllowedOrigins
from start_llm.access.tenants import TENANT_HEADER, tenant_of_key
from start_llm.protocols.routes import ROUTES
from start_llm.proxy.proxy_access import ProxyAccessPolicy
from start_llm.proxy.refusals import ProxyRefusal, message_in
from tests.server.paths import with_name

KEY = "open-sesame"
MOST = 1000
SECRET = BackendSecret("what both know")
OWN = {"host": "localhost:4000", "content-type": "application/json", "content-length": "2"}
KEYED = {**OWN, "authorization": f"Bearer {KEY}"}


class Inside:
    """An application that notes what comes in."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.heard: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["type"] == "http":
            self.heard = [await receive() for _ in BODY]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})


BODY = {"type": "http.request", "body": b' {"a":', "more_body": True}, {"type": "http.request", "body": b"1}"}


def knock(
    method: str,
    path: str,
    headers: Mapping[str, str],
    *,
    access_policy: AccessPolicy | None = None,
    kind: str = "http",
    body: Sequence[Any] = BODY,
) -> tuple[list[Any], list[Any]]:
    """Return what came through, and what was sent back."""
    inside, sent = Inside(), []

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        "server": ("127.0.0.1", 4000),
    }
    coming = iter(body)

    async def receive() -> Any:
        return next(coming)

    application = ProxyAccessPolicy(inside, access_policy or AccessPolicy((KEY,)), SECRET, MOST)
    asyncio.run(application(scope, receive, send))
    return inside.scopes, sent


def status(method: str, path: str, headers: Mapping[str, str] = KEYED, **more: Any) -> int:
    scopes, (start, _) = knock(method, path, headers, **more)
    assert bool(scopes) == (start["status"] == 200)
    return start["status"]


OPEN = [(route.method, path) for route in ROUTES if route.on_proxy for path in route.paths]
POSTED = ["/v1/messages/", *(path for method, path in OPEN if method == "POST")]
SERVED = [(method, with_name(template, name)) for method, template in OPEN for name in ("a", "resp_a-b.c==")]
SERVED += [("POST", "/v1/messages/"), ("GET", "/v1/models/openai/a-b.c"), ("HEAD", "/"), ("HEAD", "/health/")]
SERVED += [("GET", "/health/liveliness"), ("GET", "/health/liveness")]
SERVED = [*dict.fromkeys(SERVED)]


@pytest.mark.parametrize(("method", "path"), SERVED)
def test_what_clients_need_goes_through(method, path):
    assert status(method, path) == 200


CLOSED = """
    /library /fit /downloads /downloads/x /downloads/x/pause /activity
    /health/readiness /health/drain /health/services /routes /model/info
    /v1/model/info /v2/model/info /get/config/callbacks /get/ui_settings /public/model_hub
    /public/providers /ui /ui/ /_next/x /login /v2/login /sso/key/generate /sso/debug/login
    /key/generate /key/info /user/new /team/new /spend/logs /global/spend /config/update
    /config/yaml /model/new /model/update /model/delete /mcp /mcp/ /x/mcp /toolset/x/mcp
    /v1/mcp/registry.json /authorize /token /register /callback /.well-known/jwks.json
    /gemini/v1beta/models /vertex_ai/x /langfuse/x /openai/v1/files /anthropic/v1/messages /v1/files
    /v1/batches /v1/images/generations /v1/audio/speech /v1/realtime /v1/traces
    /v1/logs /lens/worker/claim /api/event_logging/batch /claude_code_gateway/oauth/token
    /engines/m/chat/completions /openai/deployments/m/chat/completions /cache/ping /cache/flushall
    /debug/asyncio-tasks /fallback/login /docs /redoc /openapi.json /robots.txt /favicon.ico
    /get_image /swagger/x /v1/messages/batches /v1/responses/a/cancel /v1/responses/compact/x
    /v1/chat/completions/x /v1 /v1/ /x
""".split()
TRICKS = [
    "/v1/models/..",
    "/v1/models/../../health",
    "/v1/models/a/../..",
    "/v1/responses/..",
    "/v1/responses/../../health",
    "/v1/responses/\0",
    "/v1/responses/a\n",
    "/v1/responses/a b",
    "/v1/responses/%2e%2e",
    "/v1/responses/" + "x" * 2001,
    "/v1/models/" + "x" * 60_000,
    "//v1/models",
    "/v1//models",
    "/V1/models",
    "/v1/models;x",
    "/health/liveliness/../drain",
    "/./health",
    "/v1/chat/completions\n",
]


@pytest.mark.parametrize("path", CLOSED + TRICKS, ids=lambda path: repr(path[:30]))
def test_everything_else_is_not_there(path):
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        assert status(method, path) in (404, 405), method


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "PUT", "post", "TRACE"])
def test_another_method_is_405(method):
    _, (start, _) = knock(method, "/v1/chat/completions", KEYED)
    assert (start["status"], dict(start["headers"])[b"allow"]) == (405, b"POST")


@pytest.mark.parametrize(("method", "path"), SERVED)
def test_without_a_key_only_a_sign_of_life_is_given(method, path):
    is_open = path in ("/", "/api/hello") or path.startswith("/health")
    for headers in (OWN, {**OWN, "authorization": "Bearer wrong"}, {**OWN, "x-api-key": "wrong"}):
        assert status(method, path, headers) == (200 if is_open else 401)
    assert status(method, path, OWN, access_policy=AccessPolicy()) == 200


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        ({"host": "evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"transfer-encoding": "gzip, chunked"}, 400),
        ({"transfer-encoding": "chunked", "content-length": "2"}, 400),
        ({"content-length": str(MOST + 1)}, 413),
        ({"content-length": "9" * 50}, 413),
        ({"content-length": "x"}, 400),
        ({"content-length": "-1"}, 400),
    ],
)
def test_what_is_wrong_is_reported_in_the_words_of_the_protocol(lie, expected):
    for path in POSTED:
        scopes, (start, body) = knock("POST", path, KEYED | lie)
        assert (start["status"], scopes) == (expected, []), path
        refusal = json.loads(body["body"])
        if path.startswith("/v1/messages"):
            assert (refusal["type"], refusal["error"].keys()) == ("error", {"type", "message"})
        else:
            assert refusal["error"].keys() == {"message", "type", "param", "code"}
        headers = dict(start["headers"])
        assert headers[b"connection"] == b"close", "its body is not taken for a request"
        assert not any(name.startswith(b"access-control") for name in headers)


@pytest.mark.parametrize(
    ("path", "kind", "id_header"),
    [
        ("/v1/chat/completions", "invalid_request_error", b"x-request-id"),
        ("/v1/responses", "invalid_request_error", b"x-request-id"),
        ("/v1/messages", "request_too_large", b"request-id"),
    ],
)
def test_a_refusal_has_the_type_and_the_id_that_port_8080_gives_it(path: str, kind: str, id_header: bytes):
    _, (start, body) = knock("POST", path, KEYED | {"content-length": str(MOST + 1)})
    name = dict(start["headers"])[id_header].decode()
    refused = json.loads(body["body"])
    assert refused["error"]["type"] == kind
    assert name.startswith("req_")
    assert refused.get("request_id") == (name if path == "/v1/messages" else None)


@pytest.mark.parametrize(
    ("site", "host", "expected"),
    [
        ("cross-site", "localhost:4000", 403),
        ("same-site", "localhost:4000", 200),
        ("same-site", "studio.local", 403),
        ("none", "studio.local", 200),
    ],
)
def test_what_a_browser_says_of_the_site_is_obeyed_on_every_path(site, host, expected):
    headers = KEYED | {"host": host, "sec-fetch-site": site}
    policy = AccessPolicy((KEY,), frozenset({"studio.local"}))
    for method, path in SERVED:
        assert status(method, path, headers, access_policy=policy) == expected, path


PAGE = {"origin": "http://localhost:3000"}
PAGES = AccessPolicy((KEY,), origins=AllowedOrigins((PAGE["origin"],)))


def test_a_listed_page_may_ask_what_it_may_send_without_a_key():
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    scopes, (start, body) = knock("OPTIONS", "/v1/messages", OWN | PAGE | wish, access_policy=PAGES)
    headers = dict(start["headers"])
    assert (start["status"], scopes, body["body"]) == (204, [], b"")
    assert headers[b"access-control-allow-origin"] == PAGE["origin"].encode()
    assert headers[b"access-control-allow-headers"] == b"x-a"


@pytest.mark.parametrize(("more", "expected"), [({}, 401), ({"authorization": f"Bearer {KEY}"}, 200)])
def test_a_listed_page_may_read_what_it_gets(more, expected):
    _, (start, _) = knock("POST", "/v1/messages", OWN | PAGE | more, access_policy=PAGES)
    assert start["status"] == expected
    assert dict(start["headers"])[b"access-control-allow-origin"] == PAGE["origin"].encode()


def test_a_page_that_is_not_listed_may_not_ask():
    wish = {"access-control-request-method": "POST", "origin": "http://localhost:3001"}
    scopes, (start, _) = knock("OPTIONS", "/v1/messages", OWN | wish, access_policy=PAGES)
    assert (start["status"], scopes) == (403, [])
    assert not any(name.startswith(b"access-control") for name, _ in start["headers"])


@pytest.mark.parametrize("key", [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}], ids=str)
def test_the_endpoint_says_whose_request_it_is_and_nobody_else_does(key):
    lie = {TENANT_HEADER: "somebody", TENANT_HEADER.title(): "else"}
    ((scope,), _) = knock("POST", "/v1/messages", OWN | key | lie)
    tenants = [value for name, value in scope["headers"] if name.lower() == TENANT_HEADER.encode()]
    assert tenants == [tenant_of_key(KEY).encode()]
    assert KEY not in str(scope["headers"])


def test_who_has_no_key_is_one_tenant_whatever_they_say():
    ((scope,), _) = knock(
        "POST", "/v1/messages", OWN | {TENANT_HEADER: tenant_of_key("b")}, access_policy=AccessPolicy()
    )
    assert dict(scope["headers"])[TENANT_HEADER.encode()] == b""


def test_a_web_socket_is_closed_before_it_is_one():
    scopes, sent = knock("GET", "/v1/realtime", KEYED, kind="websocket")
    assert (scopes, sent) == ([], [{"type": "websocket.close", "code": 1008}])


def test_the_life_of_the_application_goes_through():
    scopes, _ = knock("", "", {}, kind="lifespan")
    assert [scope["type"] for scope in scopes] == ["lifespan"]


@pytest.mark.parametrize("body", [BODY, [{"type": "http.disconnect"}, {"type": "http.disconnect"}]])
def test_what_comes_of_a_body_goes_through_as_it_came(body):
    inside = Inside()

    async def send(_: Any) -> None:
        pass

    async def receive() -> Any:
        return next(coming)

    coming = iter(body)
    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "server": ("127.0.0.1", 4000)}
    headers = [(name.encode(), value.encode()) for name, value in OWN.items()]
    asyncio.run(
        ProxyAccessPolicy(inside, AccessPolicy(), SECRET, MOST)(scope | {"headers": headers}, receive, send)
    )
    assert inside.heard == list(body)


def test_what_the_proxy_refuses_it_tells_in_a_line_without_the_key(capsys):
    evil = "/v1/x\x1b[2J\nforged" + "y" * 5000
    assert status("GET", evil, OWN | {"authorization": "Bearer guess"}) == 401
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) < 1000
    assert "\x1b" not in line
    assert "guess" not in line
    refusal = message_in(line)
    assert isinstance(refusal, ProxyRefusal)
    assert (refusal.method, refusal.status, refusal.path[:8]) == ("GET", 401, "/v1/x\x1b[2")
    assert status("POST", "/v1/messages", KEYED) == 200
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "line", ["LiteLLM: hello", "start_llm tells {", 'start_llm tells {"a": 1}', "start_llm tells 1", ""]
)
def test_another_line_of_the_proxy_tells_nothing(line):
    assert message_in(line) is None


def test_only_headers_that_the_server_reads_go_on():
    more = {
        "anthropic-version": "2023-06-01",
        "x-litellm-timeout": "1",
        "x-session-id": "s",
        "session-id": "t",
        "x-amz-security-token": "u",
        "cookie": "v",
        "api-key": KEY,
    }
    ((scope,), _) = knock("POST", "/v1/messages", KEYED | more)
    sent = {name.decode() for name, _ in scope["headers"] if not name.startswith(b"x-start-llm-")}
    assert sent == {
        "host",
        "content-type",
        "content-length",
        "anthropic-version",
        "x-session-id",
        "session-id",
    }


def test_of_a_header_that_is_there_twice_both_go_on():
    """The server, too, knows of no body that is encoded twice."""
    codings = {"content-encoding": "gzip", "Content-Encoding": "zstd"}
    ((scope,), _) = knock("POST", "/v1/messages", KEYED | codings)
    assert [value for name, value in scope["headers"] if name == b"content-encoding"] == [b"gzip", b"zstd"]


def test_a_target_in_absolute_form_goes_on_without_its_host():
    scopes, _ = knock("POST", "http://127.0.0.1:4000/v1/messages", KEYED | {"host": "127.0.0.1:4000"})
    assert (scopes[0]["path"], scopes[0]["raw_path"]) == ("/v1/messages", b"/v1/messages")


def test_the_host_of_a_target_counts_like_the_header():
    assert status("POST", "http://evil.example/v1/messages", KEYED) == 400
    assert status("GET", "http://evil.example/health", {}) == 403


def test_a_base_url_that_ends_in_v1_is_reported_in_the_words_of_the_protocol():
    _, (start, body) = knock("POST", "/v1/v1/messages", KEYED)
    refusal = json.loads(body["body"])
    assert (start["status"], refusal["type"]) == (404, "error")
    assert "leave /v1 out" in refusal["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses/compact", "/responses/compact"])
def test_who_wants_a_conversation_compacted_learns_what_to_set(path: str):
    _, (start, body) = knock("POST", path, KEYED)
    assert start["status"] == 404
    assert "Codex" in json.loads(body["body"])["error"]["message"]
