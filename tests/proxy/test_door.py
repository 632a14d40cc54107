"""Who may use the proxy, and what it shows to nobody."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from start_llm.core.errors import LaunchError
from start_llm.launch.served import find
from tests.proxy.conftest import KEY, MODEL, WINDOW, Proxied

LOOPBACK = "0100007F"
"""127.0.0.1, as the kernel's tables write it."""
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def serves(proxied: Proxied) -> bool:
    return proxied.ask(CHAT, BODY).status == 200


def test_a_wrong_key_is_401(proxied: Proxied):
    answer = proxied.ask(CHAT, BODY, headers={"Authorization": "Bearer wrong"})
    assert answer.status == 401
    assert "Wrong API key" in answer.json["error"]["message"]


@pytest.mark.parametrize("headers", [{"x-api-key": "open-sesame", "Authorization": ""}])
def test_the_key_may_come_as_anthropic_clients_send_it(proxied: Proxied, headers: dict[str, str]):
    assert proxied.ask(CHAT, BODY, headers=headers).status == 200


def test_a_web_page_is_refused(proxied: Proxied):
    answer = proxied.ask(CHAT, BODY, headers={"Origin": "http://evil.example"})
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


def test_a_foreign_host_name_is_refused(proxied: Proxied):
    assert proxied.ask(CHAT, BODY, headers={"Host": "evil.example"}).status == 403


def test_a_preflight_gets_no_star(proxied: Proxied):
    wish = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = proxied.ask(CHAT, method="OPTIONS", headers=wish)
    assert answer.status >= 400
    assert answer.headers.get("access-control-allow-origin") not in ("*", "http://evil.example")


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_there_are_no_pages_about_the_interface(proxied: Proxied, path: str):
    assert proxied.ask(path).status == 404


def test_only_the_configured_model_is_listed(proxied: Proxied):
    assert [model["id"] for model in proxied.ask("/v1/models").json["data"]] == ["openai/tiny"]


def test_the_listed_model_tells_its_window_as_the_launcher_reads_it(proxied: Proxied):
    served = find([f"http://127.0.0.1:{proxied.port}"], KEY)
    assert (served.model, served.window, served.reply) == (MODEL, WINDOW, WINDOW // 4)


def test_the_launcher_is_told_of_a_wrong_key(proxied: Proxied):
    with pytest.raises(LaunchError, match=r"does not take the key: set PROXY_API_KEY.*\(401\)"):
        find([f"http://127.0.0.1:{proxied.port}"], None)


def test_it_listens_on_loopback_only(proxied: Proxied):
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((own, proxied.port), timeout=5).close()


def test_twenty_refused_requests_in_a_row_do_not_block_it(proxied: Proxied):
    for _ in range(20):
        assert proxied.ask(CHAT, BODY, headers={"Origin": "http://evil.example"}).status == 403
    assert serves(proxied)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc to see the sockets of the proxy")
def test_it_talks_to_nobody_beyond_this_machine(proxied: Proxied):
    for _ in range(10):
        assert serves(proxied)
    assert proxied.partners == {LOOPBACK}
