"""Who comes with another key shares nothing, through the proxy or not."""

from __future__ import annotations

import io
import json
import os
import urllib.request
from pathlib import Path

import pytest

from start_llm.app import App
from start_llm.config.settings import Settings
from start_llm.core.tenants import TENANT_HEADER, tenant_of_key
from start_llm.protocols.tenants import Tenants
from start_llm.telemetry.terminal import Terminal
from tests.conftest import TinyModel
from tests.proxy.conftest import KEY, Proxied, free_port, until

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


def test_two_tenants_with_one_history_share_nothing_on_either_port(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("start_llm.app.LOGS", tmp_path)
    proxy_port, screen = free_port(), io.StringIO()
    model = str(tiny_model("qwen3"))
    settings = Settings(
        model_path=model, mlx_port=0, proxy_port=proxy_port, traces=False, state_root=os.environ["STATE_ROOT"]
    )
    app = App(settings, Terminal(screen))
    app.start()
    try:
        until(lambda: f"http://127.0.0.1:{proxy_port}" in screen.getvalue(), within_s=90)
        for port in (proxy_port, app.port):
            first, second = f"one on {port}", f"two on {port}"
            assert cached(port, first) == 0
            assert cached(port, first) > 0
            assert cached(port, second) == 0
            assert cached(port, second, **{TENANT_HEADER: tenant_of_key(first)}) > 0, (
                "its own, it claims what"
            )
            assert cached(port, f"three on {port}", **{TENANT_HEADER: tenant_of_key(first)}) == 0
        assert (cached(proxy_port, ""), cached(app.port, "") > 0) == (0, True), "nobody is a tenant too"
        assert cached(app.port, f"one on {proxy_port}") > 0, "one key is one tenant on both ports"
    finally:
        assert app.close(), "the engine thread did not end"


def test_the_proxy_tells_whose_request_it_is_and_never_the_key(proxied: Proxied):
    proxied.tunnel.clear()
    body = {"model": "m", "messages": HISTORY, "max_tokens": 2}
    assert proxied.ask(CHAT, body, headers={TENANT_HEADER: "somebody else"}).status == 200
    (heard,) = proxied.tunnel.heard(CHAT)
    assert heard.headers[TENANT_HEADER] == tenant_of_key(KEY)
    assert heard.headers["authorization"] == "Bearer backend"


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({}, ""),
        ({"authorization": "Bearer a"}, tenant_of_key("a")),
        ({"authorization": "a"}, tenant_of_key("a")),
        ({"x-api-key": "a"}, tenant_of_key("a")),
        ({"authorization": "Bearer a", TENANT_HEADER: tenant_of_key("b")}, tenant_of_key("a")),
        ({TENANT_HEADER: tenant_of_key("b")}, ""),
        ({"authorization": "Bearer proxy", TENANT_HEADER: tenant_of_key("b")}, tenant_of_key("b")),
        ({"authorization": "Bearer proxy", TENANT_HEADER: ""}, ""),
        ({"authorization": "Bearer \xe9\udc80"}, tenant_of_key("\xe9\udc80")),
    ],
)
def test_a_tenant_is_a_key_and_only_the_proxy_is_believed(headers, tenant):
    assert Tenants("proxy").of(headers) == tenant.encode()
    assert Tenants("proxy", apart=False).of(headers) == b""


def test_without_a_proxy_nobody_is_believed():
    assert Tenants().of({TENANT_HEADER: tenant_of_key("b")}) == b""
