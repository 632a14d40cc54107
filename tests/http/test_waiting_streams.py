"""A stream whose model has to be loaded shows signs of life, and tells errors in itself afterwards."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from start_llm.core.errors import ModelError
from start_llm.hosting.model_host import ModelHost
from start_llm.hosting.model_runtime import start_model
from tests.conftest import TinyModel
from tests.grammar import completions, messages, responses, wire
from tests.http.test_several_models import ASKED, completed, hosting, loaded, states
from tests.server.client import CHAT, TEXT, Client, ask, wait_until
from tests.serving import Server

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
READERS: dict[str, Callable[[bytes], Any]] = {
    path: lambda stream, read=read: read(list(wire.events_in(stream))).body
    for path, read in (
        (TEXT, completions.read),
        (CHAT, completions.read),
        (MESSAGES, messages.read),
        (RESPONSES, responses.read),
    )
}
every_protocol = pytest.mark.parametrize("path", ASKED)


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("two")
    for family in ("qwen3", "llama"):
        shutil.copytree(tiny_model(family, hidden=128, layers=2), place / family)
    return place


class Loading:
    """Loads models when a test lets it."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.failure: Exception | None = None

    def __call__(self, *arguments: Any) -> Any:
        self.begun.set()
        assert self.go.wait(30)
        if self.failure:
            raise self.failure
        return start_model(*arguments)


@pytest.fixture
def loading() -> Loading:
    return Loading()


@contextmanager
def slowly_loading(
    folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch, keep_alive_s: float = 0.05
) -> Generator[Server]:
    """A server with `qwen3` loaded, which loads `llama` when `loading` may go on."""
    with hosting(folder, keep_alive_s=keep_alive_s, cache_is_on=False) as server:
        monkeypatch.setattr("start_llm.hosting.model_switcher.start_model", loading)
        try:
            yield server
        finally:
            loading.go.set()


def body_behind(client: Client, comments: int) -> bytes:
    """Read the head and so many comments, and return the rest of the stream."""
    status, headers = client.head()
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["x-start-llm-model"] == "llama"
    chunks = client.chunks()
    for _ in range(comments):
        assert re.fullmatch(rb": the model is being loaded, for \d s so far\n\n", next(chunks))
    return b"".join(behind_comments(chunks))


def behind_comments(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks that are no comments."""
    return (chunk for chunk in chunks if not chunk.startswith(b":"))


@pytest.mark.thorough
@every_protocol
def test_a_stream_shows_signs_of_life_while_its_model_is_loaded(
    path: str, folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
):
    asked = ASKED[path] | {"model": "llama", "temperature": 0, "stream": True}
    with slowly_loading(folder, loading, monkeypatch) as server, Client(server.port) as client:
        client.request("POST", path, asked)
        timer = threading.Timer(0.3, loading.go.set)
        timer.start()
        late = body_behind(client, 3)
        assert client.ask("GET", "/health").status == 200, "the connection goes on"
        usual = ask(server.port, "POST", path, asked).body
        read = READERS[path]
        assert wire.bare(read(late)) == wire.bare(read(usual))


@pytest.mark.sample(4)
@every_protocol
def test_what_is_refused_after_signs_of_life_is_reported_in_the_stream(
    path: str, folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
):
    asked = ASKED[path] | {"model": "llama", "temperature": "hot", "stream": True}
    with slowly_loading(folder, loading, monkeypatch) as server, Client(server.port) as client:
        client.request("POST", path, asked)
        assert client.head()[0] == 200
        chunks = client.chunks()
        assert next(chunks).startswith(b":")
        loading.go.set()
        *opening, event = wire.events_in(b"".join(behind_comments(chunks)))
        refusal = ask(server.port, "POST", path, asked)
        assert refusal.status == 400, "the model is there now, so it is refused before the status line"
        if path == RESPONSES:
            (created,) = opening
            assert (created["type"], created["response"]["status"]) == ("response.created", "in_progress")
            assert (created["response"]["error"], created["sequence_number"]) == (None, 0)
            assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
            assert (event["response"]["id"], event["sequence_number"]) == (created["response"]["id"], 1)
            assert event["response"]["error"]["message"] == refusal.json["error"]["message"]
            assert event["response"]["error"]["code"] == "invalid_prompt"
        else:
            assert (opening, event["error"]) == ([], refusal.json["error"])
        assert client.ask("GET", "/health").status == 200, "the connection goes on"


@pytest.mark.thorough
def test_a_model_that_cannot_be_loaded_is_reported_in_the_stream_too(
    folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
):
    loading.failure = ModelError("The disk is gone.")
    with slowly_loading(folder, loading, monkeypatch) as server, Client(server.port) as client:
        client.request("POST", CHAT, ASKED[CHAT] | {"model": "llama", "stream": True})
        assert client.head()[0] == 200
        chunks = client.chunks()
        assert next(chunks).startswith(b":")
        loading.go.set()
        (event,) = wire.events_in(b"".join(behind_comments(chunks)))
        assert event["error"]["message"] == "The model 'llama' cannot be loaded. The disk is gone."


@pytest.mark.thorough
def test_a_stream_whose_model_goes_in_the_moment_in_which_it_comes_shows_signs_of_life_too(
    folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
):
    answering = ModelHost.answering

    def unloads_it(host: ModelHost, name: object) -> str:
        host.unload("qwen3")
        return answering(host, name)

    with slowly_loading(folder, loading, monkeypatch) as server, Client(server.port) as client:
        monkeypatch.setattr(ModelHost, "answering", unloads_it)
        client.request("POST", CHAT, ASKED[CHAT] | {"model": "qwen3", "stream": True})
        assert client.head()[0] == 200
        assert next(client.chunks()).startswith(b": the model is being loaded")


@pytest.mark.sample(2)
@pytest.mark.parametrize("wish", [{"stream": False}, {"stream": True}, {"stream": "yes"}])
def test_what_does_not_wait_for_long_is_refused_before_the_status_line(
    wish: dict[str, Any], folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
):
    loading.go.set()
    with slowly_loading(folder, loading, monkeypatch, keep_alive_s=8) as server:
        refused = ask(server.port, "POST", CHAT, {"model": "llama", "messages": "none"} | wish)
        assert refused.status == 400
        assert refused.error["param"] == ("stream" if wish["stream"] == "yes" else "messages")


@pytest.mark.thorough
def test_a_whole_reply_waits_in_silence(folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch):
    with slowly_loading(folder, loading, monkeypatch) as server, Client(server.port) as client:
        client.request("POST", CHAT, ASKED[CHAT] | {"model": "llama"})
        threading.Timer(0.3, loading.go.set).start()
        assert client.reply().json["choices"]


@pytest.mark.thorough
def test_a_client_that_leaves_while_its_model_is_loaded_asks_for_nothing(
    folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
):
    with slowly_loading(folder, loading, monkeypatch) as server:
        with Client(server.port) as client:
            client.request("POST", CHAT, ASKED[CHAT] | {"model": "llama", "stream": True})
            assert client.head()[0] == 200
            client.reset()
        threading.Event().wait(0.2)
        loading.go.set()
        wait_until(lambda: loaded(server) == {"qwen3", "llama"}, within_s=20)
        assert completed(server, "llama", "Fish?")
        assert server.get("/stats")["requests"]["endings"] == {"length": 1}, "the one of this test alone"


def test_a_client_that_leaves_while_another_loads_its_model_is_let_go(
    folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
):
    with slowly_loading(folder, loading, monkeypatch) as server, Client(server.port) as first:
        first.request("POST", CHAT, ASKED[CHAT] | {"model": "llama"})
        assert loading.begun.wait(10)
        others = set(threading.enumerate())
        with Client(server.port) as second:
            second.request("POST", CHAT, ASKED[CHAT] | {"model": "llama"})
            wait_until(lambda: not set(threading.enumerate()) <= others, within_s=5)
            threading.Event().wait(0.2)
        wait_until(lambda: set(threading.enumerate()) <= others, within_s=5)
        loading.go.set()
        assert first.reply().json["choices"]


@pytest.mark.thorough
def test_a_client_that_leaves_while_its_model_waits_for_room_takes_nothing_from_others(folder: Path):
    with hosting(folder, max_loaded=1) as server, Client(server.port) as busy:
        busy.request("POST", TEXT, ASKED[TEXT] | {"model": "qwen3", "max_tokens": 3500, "stream": True})
        assert busy.head()[0] == 200
        with Client(server.port) as leaver:
            leaver.request("POST", CHAT, ASKED[CHAT] | {"model": "llama"})
            wait_until(lambda: states(server)["llama"] == "loading", within_s=5)
        wait_until(lambda: states(server)["llama"] == "available", within_s=5)
        assert completed(server, "qwen3", "Fish?")
        flying = {model["id"]: model["in_flight"] for model in server.get("/stats")["models"]}
        assert flying["qwen3"] == 1, "the busy one goes on"


@pytest.mark.thorough
def test_the_clients_of_both_makers_wait_and_understand_errors(
    folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch
):
    loading.failure = ModelError("The disk is gone.")
    message: Any = {"role": "user", "content": "Fish?"}
    with slowly_loading(folder, loading, monkeypatch) as server:
        ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        theirs = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)

        def from_openai() -> list[Any]:
            return list(ours.chat.completions.create(model="llama", messages=[message], stream=True))

        def from_responses() -> list[Any]:
            return list(ours.responses.create(model="llama", input="Fish?", stream=True))

        def from_the_helper_of_responses() -> list[Any]:
            with ours.responses.stream(model="llama", input="Fish?") as stream:
                return list(stream)

        def from_anthropic() -> list[Any]:
            stream = theirs.messages.create(model="llama", messages=[message], max_tokens=4, stream=True)
            return list(stream)

        for ask_all, error in ((from_openai, openai.APIError), (from_anthropic, anthropic.APIError)):
            loading.go.clear()
            threading.Timer(0.3, loading.go.set).start()
            with pytest.raises(error, match="The disk is gone"):
                ask_all()
        for ask_all in (from_responses, from_the_helper_of_responses):
            loading.go.clear()
            threading.Timer(0.3, loading.go.set).start()
            _, failed = ask_all()
            assert "The disk is gone" in failed.response.error.message
        loading.failure = None
        loading.go.clear()
        threading.Timer(0.3, loading.go.set).start()
        assert from_anthropic()[-1].type == "message_stop"
