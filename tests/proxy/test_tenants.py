"""A client with another key shares nothing, through the proxy or not."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from start_llm.access.backend_secret import CLIENT_HEADER, READINESS_HEADER, Caller
from start_llm.access.request_tenant import Tenants
from start_llm.access.tenants import TENANT_HEADER, tenant_of_key
from start_llm.core.chat import PROGRAM_HEADER
from start_llm.proxy.launcher import answers_end_to_end
from tests.proxy.conftest import KEY, SECRET, Processes, Proxied

CHAT = "/v1/chat/completions"
HISTORY = [{"role": "system", "content": "Be brief. " * 30}, {"role": "user", "content": "Hello"}]


def cached(port: int, key: str, **headers: str) -> int:
    """Tokens of the conversation that were not computed for whoever has this key, or none if it is empty."""
    body = json.dumps({"model": "m", "messages": HISTORY, "max_tokens": 2}).encode()
    sent = {"Content-Type": "application/json"} | headers
    if key:
        sent["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"http://127.0.0.1:{port}{CHAT}", body, sent)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.thorough
def test_two_tenants_with_one_history_share_nothing_on_either_port(both_running: Callable[[], Processes]):
    both = both_running()
    for port in (both.proxy_port, both.port):
        first, second = f"one on {port}", f"two on {port}"
        assert cached(port, first) == 0
        assert cached(port, first) > 0
        assert cached(port, second) == 0
        assert cached(port, second, **{TENANT_HEADER: tenant_of_key(first)}) > 0, "its own, it claims what"
        assert cached(port, f"three on {port}", **{TENANT_HEADER: tenant_of_key(first)}) == 0
    nobody = cached(both.proxy_port, ""), cached(both.port, "") > 0
    assert nobody == (0, True), "nobody is a tenant too"
    assert cached(both.port, f"one on {both.proxy_port}") > 0, "one key is one tenant on both ports"


def test_the_proxy_tells_whose_request_it_is_and_never_the_key(proxied: Proxied):
    proxied.tunnel.clear()
    body = {"model": "m", "messages": HISTORY, "max_tokens": 2}
    assert proxied.ask(CHAT, body, headers={TENANT_HEADER: "somebody else"}).status == 200
    (heard,) = proxied.tunnel.heard(CHAT)
    assert heard.headers[TENANT_HEADER] == tenant_of_key(KEY)
    assert heard.headers["authorization"] == f"Bearer {SECRET.api_key}"


@pytest.mark.parametrize(
    "named", [{"User-Agent": "pi/1.2"}, {"User-Agent": "OpenAI/JS 6.1", PROGRAM_HEADER: "pi"}], ids=str
)
def test_the_proxy_tells_which_program_asks(proxied: Proxied, named: dict[str, str]):
    proxied.tunnel.clear()
    body = {"model": "m", "messages": HISTORY, "max_tokens": 2}
    assert proxied.ask(CHAT, body, headers=named | {CLIENT_HEADER: "else"}).status == 200
    (heard,) = proxied.tunnel.heard(CHAT)
    assert heard.headers[CLIENT_HEADER] == "pi"


def test_the_request_with_which_the_server_tries_the_proxy_is_known_behind_it(proxied: Proxied):
    proxied.tunnel.clear()
    assert answers_end_to_end(proxied.proxy._config)
    (heard,) = proxied.tunnel.heard(CHAT)
    assert heard.headers[READINESS_HEADER] == SECRET.readiness


def test_a_readiness_check_that_a_client_pretends_is_dropped(proxied: Proxied):
    proxied.tunnel.clear()
    body = {"model": "m", "messages": HISTORY, "max_tokens": 2}
    assert proxied.ask(CHAT, body, headers={READINESS_HEADER: SECRET.api_key}).status == 200
    (heard,) = proxied.tunnel.heard(CHAT)
    assert READINESS_HEADER not in heard.headers


PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HISTORY, "max_tokens": 2},
    "/v1/messages": {"messages": HISTORY[1:], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HISTORY[1:]},
    "/v1/cache/warm": {"programs": ["pi"]},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_server_finds_each_request_signed(proxied: Proxied, path: str, stream: bool):
    proxied.tunnel.clear()
    short = path.removeprefix("/v1") if "chat" in path or path == "/v1/responses" else path
    asked = PATHS[path] | {"model": "m"} | ({} if path.endswith("tokens") else {"stream": stream})
    assert proxied.ask(short, asked, headers={"User-Agent": "pi/1.2"}).status == 200
    (heard,) = proxied.tunnel.heard(short)
    method, target, _ = heard.line.split()
    assert Tenants(SECRET).caller(heard.headers, method, target) == Caller(tenant_of_key(KEY), "pi")
    moved = heard.headers | {TENANT_HEADER: tenant_of_key("other")}
    assert Tenants(SECRET).caller(moved, method, target).tenant == tenant_of_key(SECRET.api_key)
