"""The proxy leads a browser to the server's status page, and nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from start_llm.proxy.to_status_page import ToStatusPage

BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


def location(
    host: str | None = "localhost:4000",
    *,
    accept: str = BROWSER,
    path: str = "/",
    method: str = "GET",
    server: str = "http://127.0.0.1:8080",
) -> str | None:
    """Return where a request is led; None if it is passed on."""
    passed, sent = [], []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope)

    async def send(event: Any) -> None:
        sent.append(event)

    headers = [(b"host", host.encode())] if host is not None else []
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [*headers, (b"accept", accept.encode())],
    }
    receive: Any = None
    asyncio.run(ToStatusPage(inside, server)(scope, receive, send))
    if passed:
        assert not sent
        return None
    start, body = sent
    assert (start["status"], body["body"]) == (307, b"")
    return dict(start["headers"])[b"location"].decode()


@pytest.mark.parametrize(
    ("host", "led_to"),
    [
        ("localhost:4000", "http://localhost:8080/"),
        ("LOCALHOST", "http://localhost:8080/"),
        ("127.0.0.1:4000", "http://127.0.0.1:8080/"),
        ("[::1]:4000", "http://[::1]:8080/"),
        ("mybox:4000", "http://mybox:8080/"),
        (None, "http://127.0.0.1:8080/"),
    ],
)
def test_a_browser_keeps_the_host_name(host: str | None, led_to: str):
    assert location(host) == led_to
    assert location(host, method="HEAD", path="//") == led_to


def test_a_server_with_one_address_is_led_to_there():
    assert location(server="http://192.168.1.5:9000") == "http://192.168.1.5:9000/"
    assert location(server="http://[fe80::1]:9000") == "http://[fe80::1]:9000/"


@pytest.mark.parametrize(
    "asked",
    [{"accept": "*/*"}, {"accept": "application/json"}, {"path": "/v1/models"}, {"method": "POST"}],
)
def test_everything_else_passes(asked: dict[str, str]):
    assert location(**asked) is None
