"""Servers for tests: the real application in this process, on a free port."""

from __future__ import annotations

import io
import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from start_llm.app import App
from start_llm.audit.subject import AuditedModel
from start_llm.config.setting_types import OFF
from start_llm.config.settings import Settings
from start_llm.hosting import model_loading
from start_llm.hosting.startup_summary import unsuited_by
from start_llm.hosting.template_trial import files_with_templates
from start_llm.models.trial import TemplateTrials
from start_llm.prompt.template_audit.audit import audit
from start_llm.prompt.template_audit.samples import rendered_samples
from start_llm.proxy.launcher import Proxy
from start_llm.telemetry.terminal import Terminal
from tests.flat_settings import settings_of

_TRIED: dict[tuple[Any, ...], Any] = {}


class _TrialsOfTexts(TemplateTrials):
    """Tries a template once, not in each folder with another config: a trial is a process of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: set[tuple[bytes, ...]] = set()

    def check(self, folder: Path) -> None:
        texts = (*(path.read_bytes() for path in files_with_templates(folder)),)
        if texts not in self._texts:
            super().check(folder)
            self._texts.add(texts)


_TRIALS = _TrialsOfTexts()
"""Of all servers of this process: a template is tried once."""
AS_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Server:
    """A running server. `printed()` is what its terminal shows so far."""

    app: App
    output: io.StringIO
    proxy: Proxy | None = None

    @property
    def url(self) -> str:
        return self.app.url

    @property
    def port(self) -> int:
        return self.app.port

    def printed(self) -> str:
        return self.output.getvalue()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.load(reply)

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {**AS_JSON, **(headers or {})}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)


def _judged_once(model: AuditedModel, window: int) -> dict[str, str]:
    tokenizer = model.tokenizer
    key = "clients", tokenizer.definition(), tokenizer.chat_template, model.family.name, window
    if key not in _TRIED:
        _TRIED[key] = unsuited_by(model, window)
    return _TRIED[key]


@contextmanager
def tried_once() -> Generator[None]:
    """Try each model once in this process, not at each load: the trials take most of it, and come to the
    same each time. `tests/engine` has the tests of the trials themselves.

    What a test has put in place of a trial is called in its place. A copy of a folder is the same model.
    """
    loading = threading.local()  # its files, in the engine thread that goes on to try the model
    load = model_loading.load

    def loaded(folder: Path, **options: Any) -> Any:
        files = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
        loading.key = *((name, file.st_mtime_ns, file.st_size) for name, file in files), *options.items()
        return load(folder, **options)

    def once(trial: Callable[..., Any]) -> Callable[..., Any]:
        def result(network: Any, *rest: Any, **how: Any) -> Any:
            key = trial, *loading.key, *rest[1:], *how.items()
            if key not in _TRIED:
                _TRIED[key] = trial(network, *rest, **how)
            return _TRIED[key]

        return result

    def once_for_a_template(trial: Callable[..., Any]) -> Callable[..., Any]:
        def result(tokenizer: Any, *how: Any) -> Any:
            key = trial.__name__, tokenizer.chat_template, tokenizer.added_tokens, *how
            if key not in _TRIED:
                _TRIED[key] = trial(tokenizer, *how)
            return _TRIED[key]

        return result

    with (
        patch("start_llm.app.unsuited_by", _judged_once),
        patch("start_llm.hosting.model_loading.load", loaded),
        patch("start_llm.hosting.model_loading.measure_work", once(model_loading.measure_work)),
        patch("start_llm.hosting.model_loading.check_batching", once(model_loading.check_batching)),
        patch("start_llm.hosting.model_loading.measure_passes", once(model_loading.measure_passes)),
        patch("start_llm.prompt.prepare.audit", once_for_a_template(audit)),
        patch("start_llm.wiring.from_settings.rendered_samples", once_for_a_template(rendered_samples)),
        patch("start_llm.prompt.client_marks.rendered_samples", once_for_a_template(rendered_samples)),
        patch("start_llm.hosting.model_loading.measure_tower", once(model_loading.measure_tower)),
        patch("start_llm.hosting.model_switcher.TemplateTrials", lambda: _TRIALS),
    ):
        yield


@contextmanager
def serving(
    folder: Path, make: Callable[[Settings, Terminal], App] = App, /, **settings: Any
) -> Generator[Server]:
    """Serve the model in `folder` without proxy and trace; `settings` are those of `settings_of`."""
    output = io.StringIO()
    state = os.environ["STATE_ROOT"]
    settings = {
        "server_port": 0,
        "proxy_is_on": False,
        "traces": False,
        "state_root": state,
        "ssd_folder": OFF,
        "drain_s": 1.5,
        "idle_work": "off",  # what is counted depends on no clock
    } | settings
    app, proxies = make(settings_of(model_path=str(folder), **settings), Terminal(output)), list[Proxy]()

    def proxy(*arguments: Any, **options: Any) -> Proxy:
        proxies.append(Proxy(*arguments, **options))
        return proxies[-1]

    with tried_once(), patch("start_llm.app.Proxy", proxy):
        app.start()
    try:
        yield Server(app, output, *proxies)
    finally:
        assert app.close(), "the engine thread did not end"


def wait_for_health(process: subprocess.Popen[Any], port: int, seconds: float = 60) -> None:
    """Wait until the server in another process answers; fail if it ends before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with status {process.returncode}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                assert reply.status == 200
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"no answer on port {port} within {seconds} seconds")
