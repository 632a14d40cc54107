"""One browser, and two servers with something to show."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scripts.browser import Browser, browsing, find_chromium
from tests.conftest import ChainModel, TinyModel
from tests.server.client import Client, wait_until
from tests.server.conftest import LONG_PROMPT
from tests.serving import Server, serving

KEY = "open-sesame"
INJECTION = "<img src=x onerror=hurt()>"
SCRIPT = "<script>hurt()</script>"
NAME = "<b onload=1>"
"""As long as what is shown of a session's name."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them without a browser."""
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.browser)
            if find_chromium() is None:
                item.add_marker(pytest.mark.skip(reason="there is no Chromium on PATH"))


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with browsing() as running:
        yield running


def post(server: Server, path: str, body: Any, key: str = "") -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def talk(server: Server, first: str, changed: str, session: str, key: str = "") -> None:
    """Ask three questions; with the last one, the first has changed, so that all is read again."""
    messages: list[dict[str, str]] = []
    for question in (first, "two", "three"):
        messages.append({"role": "user", "content": question})
        if question == "three":
            messages[0]["content"] = changed
        body = {"messages": messages, "session_id": session, "max_tokens": 12}
        reply = post(server, "/v1/chat/completions", body, key)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


def refused(server: Server, path: str, key: str = "") -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=30)


@pytest.fixture(scope="module")
def busy(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A server without keys that has answered, refused and forgotten, and now reads and writes."""
    folder = tmp_path_factory.mktemp("disk")
    with serving(tiny_model("qwen3"), batch=3, ssd_folder=str(folder)) as server:
        talk(server, "one " * 20, "another " * 20, "story")
        talk(server, "something else", "something else", "secret-name", "any-key")
        refused(server, "/nothing")
        post(server, "/downloads", {"repo_id": "nobody/nothing"})
        with Client(server.port) as reading, Client(server.port) as writing:
            body = {"max_tokens": 100_000, "stream": True}
            writing.request("POST", "/v1/completions", body | {"prompt": "hi"})
            reading.request("POST", "/v1/completions", body | {"prompt": LONG_PROMPT})
            threading.Thread(target=_read_on, args=(writing,), daemon=True).start()
            wait_until(lambda: _phases(server) == {"reading", "writing"}, within_s=20)
            yield server
            for client in (reading, writing):
                client.socket.shutdown(2)
            time.sleep(0.1)


def _read_on(client: Client) -> None:
    """Read what comes, so that the server does not wait for this client."""
    with suppress(Exception):
        while client.some(65536):
            pass


def _phases(server: Server) -> set[str]:
    return {entry["phase"] for entry in server.get("/activity")["running"]}


@pytest.fixture(scope="module")
def hostile(chain_model: ChainModel) -> Generator[Server]:
    """A server with a key whose model, clients and paths write markup."""
    reply = ["<think>", f"{INJECTION}.", "</think>", SCRIPT, INJECTION, " is", " text."]
    with serving(chain_model({"\n": reply}), access_keys=(KEY,)) as server:
        talk(server, f"{INJECTION} {SCRIPT} " * 3, f"{SCRIPT} {INJECTION} " * 3, NAME, KEY)
        refused(server, "/<img/src=x/onerror=hurt()>", KEY)
        yield server
