"""Clients that ask while a server starts: it serves, whatever they ask for when it opens."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from scripts import tiny_models
from start_llm.app import App
from start_llm.config.settings import Settings
from start_llm.hosting import model_loading, model_switcher
from start_llm.models.device import Device
from start_llm.proxy.launcher import answers
from start_llm.telemetry import terminal
from start_llm.telemetry.terminal import Terminal
from tests.engine.harness import Wrapped
from tests.flat_settings import settings_of
from tests.proxy.conftest import free_port
from tests.server.client import wait_until
from tests.serving import AS_JSON, Server, serving, tried_once
from tests.slices import rounds

pytestmark = pytest.mark.thorough

STARTS = rounds(50, checked=8)
FIRST, OTHER = "qwen3", "llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for family in (FIRST, OTHER):
        (place / family).mkdir()
        tiny_models.build(family, place / family, hidden=64, layers=1)
    return place


def ask(url: str, model: str) -> str:
    body = {"model": model, "prompt": "Fish?", "max_tokens": 2, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), AS_JSON)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["model"]


class Impatient(App):
    """A server that is asked for the model that it does not load first, from its birth on.

    Attributes:
        heard: the models that answered, and what else came.
    """

    def __init__(self, settings: Settings, terminal: Terminal) -> None:
        super().__init__(settings, terminal)
        self.heard: list[str] = []
        self._clients = [threading.Thread(target=self._hammer, args=(arg,)) for arg in (OTHER, OTHER, FIRST)]
        self._is_over = threading.Event()
        for client in self._clients:
            client.start()

    def _hammer(self, model: str) -> None:
        while not self._is_over.is_set():
            try:
                self.heard.append(ask(self.url, model))
            except OSError as error:
                self._is_over.wait(0.005)
                if isinstance(error, urllib.error.HTTPError):
                    self.heard.append(str(error.code))

    def let_go(self) -> None:
        self._is_over.set()
        for client in self._clients:
            client.join()

    def close(self) -> bool:
        self.let_go()
        return super().close()


@contextmanager
def starting(folder: Path, make: Any) -> Generator[Server]:
    settings: dict[str, Any] = {"model_dir": str(folder), "max_kv_size": 4096, "max_loaded": 1}
    with tried_once(), serving(Path(FIRST), make, **settings) as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize("start", range(STARTS))
def test_a_server_that_is_asked_for_another_model_while_it_opens_serves(start: int, folder: Path):
    with starting(folder, Impatient) as server:
        app: Any = server.app
        assert f"{server.url}/v1" in server.printed(), "it says what it serves"
        wait_until(lambda: {FIRST, OTHER} <= set(app.heard), within_s=60)
        app.let_go()
        assert {*app.heard} == {FIRST, OTHER}, start
        assert [ask(server.url, name) for name in (OTHER, FIRST)] == [OTHER, FIRST]
        assert server.get("/health")["status"] == "ok"


class Overtaken(App):
    """A server whose first model has gone before it does anything else behind the opening of its port."""

    def __init__(self, settings: Settings, terminal: Terminal) -> None:
        super().__init__(settings, terminal)
        listener, opened = self._listener, self._listener.open

        def open_and_wait(context: Any) -> None:
            opened(context)
            threading.Thread(target=ask, args=(self.url, OTHER), daemon=True).start()
            wait_until(lambda: FIRST not in dict(self._hosting.result().loaded), within_s=60)

        listener.open = open_and_wait


def test_the_first_model_may_have_gone_when_the_port_has_opened(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STATE_ROOT", str(tmp_path))
    with starting(folder, Overtaken) as server:
        assert f"  model     {FIRST}" in server.printed(), "it introduces the model that it has loaded first"
        assert ask(server.url, OTHER) == OTHER


class Held(App):
    """A server that does not get to its first model before it is let go."""

    def __init__(self, settings: Settings, terminal: Terminal) -> None:
        super().__init__(settings, terminal)
        self.may_go_on = threading.Event()

    def _find_models(self) -> tuple[str, dict[str, Path]]:
        assert self.may_go_on.wait(60)
        return super()._find_models()


@contextmanager
def started(app: App, may_go_on: threading.Event) -> Generator[threading.Thread]:
    """The app starts on a thread meanwhile. At the end it may go on, and is closed."""
    start = threading.Thread(target=app.start)
    start.start()
    try:
        yield start
    finally:
        may_go_on.set()
        start.join(60)
        app.close()


@contextmanager
def held(folder: Path) -> Generator[tuple[Held, threading.Thread]]:
    state = str(folder / "state")
    settings: Any = {
        "server_port": 0,
        "proxy_is_on": False,
        "traces": False,
        "drain_s": 0.5,
        "state_root": state,
    }
    app = Held(settings_of(model_path=str(folder / FIRST), **settings), Terminal(io.StringIO()))
    with started(app, app.may_go_on) as start:
        yield app, start


def health(app: App, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"{app.url}/health", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.load(reply)["status"]
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.load(refusal).get("status", "")


def test_a_server_says_that_it_starts_and_lets_all_other_requests_wait(folder: Path):
    with held(folder) as (app, start):
        assert health(app) == (503, "starting")
        assert health(app, Host="evil.example") == (403, ""), "its access policy is there from the beginning"
        heard: list[str] = []
        client = threading.Thread(target=lambda: heard.append(ask(app.url, FIRST)))
        client.start()
        client.join(0.3)
        assert client.is_alive()
        app.may_go_on.set()
        start.join(60)
        client.join(60)
        assert (heard, health(app)) == ([FIRST], (200, "ok"))


class Loading(NamedTuple):
    """A server that loads its model."""

    app: App
    proxy_url: str
    output: io.StringIO
    may_load: threading.Event


class SlowNetwork(Wrapped):
    """A network that computes nothing more until it is let go, as one that takes minutes for a token."""

    def __init__(self, network: Any) -> None:
        super().__init__(network, lambda _: self._wait())
        self.is_asked, self.may_compute = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.is_asked.set()
        assert self.may_compute.wait(60)


@pytest.mark.parametrize("step", ["measure_work", "measure_sequence", "check_batching"])
def test_a_server_says_that_it_starts_and_what_it_does_while_it_measures(
    step: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    notice = (
        "Trying several sequences at once" if step == "check_batching" else "Measuring what computing takes"
    )
    slow, real = list[SlowNetwork](), getattr(model_loading, step)

    def measure(network: Any, *rest: Any, **how: Any) -> Any:
        slow.append(SlowNetwork(network))
        return real(slow[0], *rest, **how)

    monkeypatch.setattr(model_loading, step, measure)
    monkeypatch.setattr(terminal, "MOMENT_S", 0.05)
    output, state = io.StringIO(), {"state_root": str(tmp_path), "drain_s": 0.5}
    settings: Any = {"server_port": 0, "proxy_is_on": False, "traces": False, **state}
    app = App(settings_of(model_path=str(folder / FIRST), **settings), Terminal(output))
    start = threading.Thread(target=app.start)
    start.start()
    try:
        wait_until(lambda: bool(slow) and slow[0].is_asked.is_set(), within_s=60)
        for _ in range(20):
            assert health(app) == (503, "starting")
        wait_until(lambda: notice in output.getvalue(), within_s=20)
        slow[0].may_compute.set()
        start.join(60)
        assert health(app) == (200, "ok")
    finally:
        if slow:
            slow[0].may_compute.set()
        start.join(60)
        app.close()


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("M5", {"max_recommended_working_set_size": 2**34})
    monkeypatch.setattr("start_llm.app.this_device", lambda: device)


@contextmanager
def loading(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Generator[Loading]:
    """A server with a proxy that is not done with loading its model before it may."""
    may_load, real = threading.Event(), model_switcher.start_model

    def load(*arguments: Any) -> Any:
        assert may_load.wait(60)
        return real(*arguments)

    monkeypatch.setattr(model_switcher, "start_model", load)
    output = io.StringIO()
    settings |= {"server_port": 0, "proxy_port": free_port(), "traces": False, "drain_s": 0.5}
    app = App(settings_of(model_path=str(folder / FIRST), **settings), Terminal(output))
    with started(app, may_load):
        yield Loading(app, f"http://127.0.0.1:{settings['proxy_port']}", output, may_load)


def test_the_proxy_is_started_while_the_model_is_loaded_and_missed_only_afterwards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program, started = tmp_path / "proxy", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch {started}\nexec sleep 60\n")
    program.chmod(0o700)
    settings = {"state_root": str(tmp_path), "proxy_python": str(program), "wait_s": 0.3}
    on_a_gpu(monkeypatch)
    with loading(folder, monkeypatch, **settings) as server:
        wait_until(started.exists, within_s=30)
        assert health(server.app) == (503, "starting")
        time.sleep(1)
        assert "proxy" not in server.output.getvalue(), "no proxy can answer for a server that does not"
        server.may_load.set()
        wait_until(lambda: "The proxy does not answer" in server.output.getvalue(), within_s=60)


@pytest.mark.parametrize(
    ("is_on_gpu", "backends"), [(False, ()), (True, ("http://127.0.0.1:9",))], ids=["cpu", "other servers"]
)
def test_the_proxy_waits_for_the_model_where_it_would_disturb_its_measurements_or_ask_others(
    is_on_gpu: bool,
    backends: tuple[str, ...],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if is_on_gpu:
        on_a_gpu(monkeypatch)
    settings = {"state_root": str(tmp_path), "backends": backends, "backend_secret": "a secret of both"}
    with loading(folder, monkeypatch, proxy_python="/no/such/python", **settings) as server:
        time.sleep(1)
        assert "/no/such/python" not in server.output.getvalue()
        server.may_load.set()
        wait_until(lambda: "/no/such/python" in server.output.getvalue(), within_s=60)


@pytest.mark.long
def test_who_comes_through_the_proxy_while_the_model_is_loaded_waits_for_the_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    on_a_gpu(monkeypatch)
    with loading(folder, monkeypatch, state_root=str(tmp_path)) as server:
        wait_until(lambda: answers(urlsplit(server.proxy_url).port or 0, 5), within_s=60)
        heard: list[str] = []
        client = threading.Thread(target=lambda: heard.append(ask(server.proxy_url, FIRST)))
        client.start()
        client.join(0.5)
        assert client.is_alive()
        server.may_load.set()
        client.join(60)
        assert heard == [FIRST]
        wait_until(lambda: "The proxy answers on" in server.output.getvalue(), within_s=30)


def test_who_waits_for_a_server_that_is_stopped_while_it_starts_is_hung_up_on(folder: Path):
    with held(folder) as (app, _):
        ends: list[Exception] = []

        def wait() -> None:
            try:
                ask(app.url, FIRST)
            except (OSError, http.client.HTTPException) as error:
                ends.append(error)

        client = threading.Thread(target=wait)
        client.start()
        client.join(0.3)
        assert client.is_alive()
        app._listener.stop_accepting()
        client.join(30)
        assert not client.is_alive() and ends
