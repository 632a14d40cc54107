"""What the proxy learns of servers, from real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import AsyncExitStack

import pytest

from start_llm.access.backend_secret import BackendSecret
from start_llm.proxy.backend import Backend, WholeAnswer
from start_llm.proxy.server_group import ServerGroup
from tests.conftest import TinyModel
from tests.serving import Server, serving

SECRET = BackendSecret("s" * 24)
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel) -> Generator[Server]:
    with serving(tiny_model("qwen3"), backend_secret=SECRET.text, access_keys=("of the server",)) as running:
        yield running


def watched_group(*backends: Backend) -> ServerGroup:
    group = ServerGroup(backends, notices.append)

    async def look() -> None:
        async with AsyncExitStack() as stack:
            for backend in backends:
                await stack.enter_async_context(backend.connected())
            await stack.enter_async_context(group.watched())

    notices.clear()
    asyncio.run(look())
    return group


notices: list[str] = []
"""What the user read about the last group."""


def test_a_server_that_shares_the_secret_takes_requests_whatever_its_key(server: Server):
    group = watched_group(Backend(server.url, SECRET), Backend(NOBODY, SECRET))
    assert [(entry.state, entry.is_able) for entry in group.servers] == [("ok", True), ("unreachable", False)]
    assert group.servers[0].models[0] == group.servers[0].default_model == server.get("/health")["model"]
    assert {*notices} == {f"{server.url} takes requests.", f"{NOBODY} is unreachable."}


def test_each_connection_ends_when_the_machine_of_a_server_is_silent(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    watched: list[int] = []
    monkeypatch.setattr(
        "start_llm.proxy.backend.end_when_silent", lambda _, silence_s: watched.append(silence_s)
    )
    watched_group(Backend(server.url, SECRET))
    assert watched == [12, 12], "for /health and for /v1/models"


@pytest.mark.parametrize("keys", [(), ("of the server",)], ids=["open", "with a key"])
def test_a_server_with_another_secret_gets_no_requests(tiny_model: TinyModel, keys: tuple[str, ...]):
    """An open one would answer, and take all clients of the proxy for one tenant."""
    with serving(tiny_model("qwen3"), backend_secret="o" * 24, access_keys=keys) as other:
        (server,) = watched_group(Backend(other.url, SECRET)).servers
        assert not server.is_able
        assert "BACKEND_SECRET" in server.state


def test_a_server_that_is_stopping_gets_no_requests(tiny_model: TinyModel):
    with serving(tiny_model("qwen3"), backend_secret=SECRET.text) as stopping:
        stopping.app._drain.begin(1)
        (server,) = watched_group(Backend(stopping.url, SECRET)).servers
        assert (server.state, server.is_able) == ("draining", False)


@pytest.mark.parametrize(("secret", "path", "is_own"), [("s", "/v1/models", True), ("o", "/health", False)])
def test_an_answer_shows_whether_its_server_has_the_secret(
    server: Server, secret: str, path: str, is_own: bool
):
    async def answer() -> WholeAnswer | None:
        backend = Backend(server.url, BackendSecret(secret * 24))
        async with backend.connected():
            return await backend.whole("GET", path, within_s=10)

    answered = asyncio.run(answer())
    assert answered is not None
    assert (answered.status, answered.is_own) == (200, is_own)
