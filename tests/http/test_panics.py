"""A library in Rust panics: the request that caused it fails, in its protocol's form, and no other."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import ModelError
from start_llm.models.loader import read
from start_llm.protocols.openai.chat_completions import ChatReply
from start_llm.serving.service import Service
from tests.conftest import TinyModel
from tests.models.panicking import FATAL, with_panicking_tokenizer
from tests.server.client import CHAT, TEXT, Client, CutOff, ask, engine_is_free, wait_until
from tests.serving import Server, serving

pytestmark = pytest.mark.thorough

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def saying(text: str) -> dict[str, dict[str, Any]]:
    """A request of each path that takes text."""
    messages = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return {
        CHAT: messages,
        TEXT: {"prompt": text, "max_tokens": 4},
        MESSAGES: messages,
        f"{MESSAGES}/count_tokens": messages,
        RESPONSES: {"input": text, "max_output_tokens": 4},
        f"{RESPONSES}/input_tokens": {"input": text},
        "/tokenize": {"prompt": text},
        "/v1/cache/explain": messages,
    }


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = with_panicking_tokenizer(tiny_model("qwen3"), tmp_path_factory.mktemp("models") / "fragile")
    with serving(folder, max_kv_size=4096) as running:
        yield running


@pytest.mark.parametrize("path", saying(""))
@pytest.mark.parametrize("streams", [False, True])
def test_a_panic_of_the_tokenizer_is_a_500_and_the_connection_goes_on(
    server: Server, path: str, streams: bool
):
    more = {"stream": True} if streams else {}
    with Client(server.port) as client:
        reply = client.ask("POST", path, saying(f"Look: {FATAL}")[path] | more)
        assert reply.status == 500
        error = reply.json["error"]
        assert error["type"] == ("api_error" if path.startswith(MESSAGES) else "server_error")
        assert "tokenizer" in error["message"]
        assert (reply.json.get("type") == "error") == path.startswith(MESSAGES)
        assert client.ask("POST", path, saying("Look: a fish")[path]).status == 200
    wait_until(lambda: engine_is_free(server.port), within_s=30)
    assert server.get("/health")["status"] == "ok"


def test_a_reply_that_runs_goes_on_beside_a_panic(server: Server):
    with Client(server.port) as client:
        client.request("POST", TEXT, {"prompt": [1, 2, 3], "max_tokens": 60, "stream": True})
        assert client.head()[0] == 200
        assert ask(server.port, "POST", CHAT, saying(FATAL)[CHAT]).status == 500
        assert list(client.events())[-1] == "[DONE]"


@pytest.mark.long
def test_a_model_whose_tokenizer_panics_while_it_is_loaded_is_reported_and_the_others_serve(
    tiny_model: TinyModel, tmp_path: Path
):
    """The first word that it is asked for is beyond what the library can take."""
    shutil.copytree(tiny_model("llama"), tmp_path / "sound")
    broken = with_panicking_tokenizer(tiny_model("qwen3"), tmp_path / "broken")
    template = broken / "chat_template.jinja"
    template.write_text(FATAL + template.read_text())
    with serving(Path("sound"), model_dir=str(tmp_path), max_loaded=1, max_kv_size=4096) as server:
        reply = ask(server.port, "POST", CHAT, saying("Hi")[CHAT] | {"model": "broken"})
        assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
        assert "tokenizer" in reply.json["error"]["message"]
        assert ask(server.port, "POST", CHAT, saying("Hi")[CHAT] | {"model": "sound"}).status == 200
        assert server.get("/health")["status"] == "ok"


def test_a_tokenizer_that_panics_while_it_is_read_is_a_model_error(tiny_model: TinyModel, tmp_path: Path):
    folder = shutil.copytree(tiny_model("qwen3"), tmp_path / "broken")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = {"type": "Strip", "content": "a", "start": 0, "stop": 5}
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="tokenizers library has failed"):
        read(folder)


def failing(*_: Any, **__: Any) -> Any:
    raise LookupError("a defect of ours")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("streams", [False, True])
def test_a_defect_of_the_server_is_a_500_in_the_form_of_its_protocol(
    server: Server,
    path: str,
    streams: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    more = {"stream": True} if streams else {}
    with monkeypatch.context() as broken:
        broken.setattr(Service, "respond", failing)
        reply = ask(server.port, "POST", path, saying("Look: a fish")[path] | more)
    assert reply.status == 500
    assert "LookupError" in reply.json["error"]["message"]
    assert "a defect of ours" not in reply.json["error"]["message"], "it may hold what others have sent"
    assert (reply.json.get("type") == "error") == (path == MESSAGES)
    assert "a defect of ours" in capfd.readouterr().err
    assert ask(server.port, "POST", path, saying("Look: a fish")[path]).status == 200


def test_a_defect_is_answered_though_nobody_reads_the_output(server: Server, monkeypatch: pytest.MonkeyPatch):
    reads, writes = os.pipe()
    os.close(reads)
    with monkeypatch.context() as broken, os.fdopen(writes, "wb", buffering=0) as pipe:
        broken.setattr(Service, "respond", failing)
        broken.setattr(sys, "stderr", io.TextIOWrapper(pipe, write_through=True))
        reply = ask(server.port, "POST", CHAT, saying("Look: a fish")[CHAT])
    assert reply.status == 500


def test_a_defect_after_the_head_cuts_the_reply(server: Server, monkeypatch: pytest.MonkeyPatch):
    """A second head, or an end, would say that the reply is whole."""
    monkeypatch.setattr(ChatReply, "output", failing)
    with Client(server.port) as client:
        client.request("POST", CHAT, saying("Look: a fish")[CHAT] | {"stream": True})
        assert client.head()[0] == 200
        with pytest.raises(CutOff):
            list(client.events())
