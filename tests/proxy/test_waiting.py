"""A stream through the proxy, while the server loads the model that it names."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import ModelError
from start_llm.hosting.model_runtime import start_model
from tests.conftest import TinyModel
from tests.proxy.conftest import PROXIED, Proxied
from tests.sdk.endpoints import Endpoints
from tests.serving import serving, tried_once

pytestmark = pytest.mark.thorough

MESSAGES = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
}


@dataclass
class Loading:
    """Takes a while to load a model, or fails to."""

    fails: bool = False
    began: threading.Event = field(default_factory=threading.Event)

    def __call__(self, *arguments: Any) -> Any:
        self.began.set()
        threading.Event().wait(0.5)
        if self.fails:
            raise ModelError("The disk is gone.")
        return start_model(*arguments)


@pytest.fixture
def loading(
    proxied: Proxied,
    tiny_model: TinyModel,
    endpoints: Endpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Generator[Loading]:
    """A server behind the proxy that has one of two models loaded, for the time of a test."""
    for family in ("qwen3", "llama"):
        shutil.copytree(tiny_model(family, hidden=128, layers=2), tmp_path / family)
    stand_in = Loading()
    settings: dict[str, Any] = {"model_dir": str(tmp_path), "max_kv_size": 4096, "keep_alive_s": 0.05}
    with tried_once(), serving(Path("qwen3"), **settings) as server:
        monkeypatch.setattr("start_llm.hosting.model_switcher.start_model", stand_in)
        endpoints.of(server, PROXIED)
        yield stand_in
    endpoints.of(proxied.server, PROXIED)


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", ASKED)
def test_a_stream_comes_through_once_its_model_is_loaded(path: str, proxied: Proxied, loading: Loading):
    answer = proxied.ask(path, ASKED[path] | {"model": "llama", "stream": True})
    assert (answer.status, loading.began.is_set()) == (200, True)
    assert any(end in answer.text for end in ("[DONE]", "message_stop", "response.incomplete"))
    assert "error" not in answer.text.replace('"error":null', "").replace('"error": null', "")


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", ASKED)
def test_the_reason_comes_through_if_it_cannot_be_loaded(path: str, proxied: Proxied, loading: Loading):
    loading.fails = True
    answer = proxied.ask(path, ASKED[path] | {"model": "llama", "stream": True})
    assert "The disk is gone" in json.dumps(answer.text), (answer.status, answer.text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_header_says_on_this_port_too_who_has_answered(path: str, stream: bool, proxied: Proxied):
    answer = proxied.ask(path, ASKED[path] | {"model": "gpt-5-of-nobody", "stream": stream})
    own = proxied.server.get("/v1/models")["data"][0]["id"]
    assert (answer.status, answer.headers.get("x-start-llm-model")) == (200, own)


@pytest.mark.parametrize("path", ASKED)
def test_with_strict_names_this_port_says_which_models_there_are(
    path: str, proxied: Proxied, monkeypatch: pytest.MonkeyPatch
):
    host = proxied.server.app._hosting.result()
    monkeypatch.setattr(host, "_settings", replace(host._settings, strict_names=True))
    answer = proxied.ask(path, ASKED[path] | {"model": "gpt-5-of-nobody"})
    own = proxied.server.get("/v1/models")["data"][0]["id"]
    assert answer.status == 404
    assert f"there is {own}" in answer.text
    assert proxied.ask(path, ASKED[path] | {"model": own}).status == 200
