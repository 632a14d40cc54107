"""Requests load the model that they name."""

from __future__ import annotations

import gc
import random
import shutil
import statistics
import threading
import time
import urllib.error
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from start_llm.app import App
from start_llm.core.errors import InternalError, ModelError, SettingsError
from start_llm.engine.start_measurements import PrefillMemoryCost, measure_work
from start_llm.hosting.model_memory import MemoryNeeds, together
from start_llm.hosting.model_runtime import ModelRuntime, start_model
from start_llm.wiring.memory_plan import usable_share
from tests.conftest import TinyModel
from tests.http.continued import Conversation, echoes
from tests.http.test_conversations import system
from tests.server.client import CHAT, TEXT, Client, ask, wait_until
from tests.serving import Server, serving, tried_once
from tests.slices import rounds

ASKED: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "Fish?", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "Fish?"}], "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "Fish?"}], "max_tokens": 4},
    "/v1/responses": {"input": "Fish?", "max_output_tokens": 4},
}
FAMILIES = ("qwen3", "llama", "gemma3_text", "glm4_moe_lite", "qwen3_5")


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five models."""
    place = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        shutil.copytree(tiny_model(family, hidden=128, layers=2), place / family)
    return place


@contextmanager
def hosting(folder: Path, first: str = "qwen3", **settings: Any) -> Generator[Server]:
    """A model that is loaded again is not tried again."""
    with tried_once(), serving(Path(first), model_dir=str(folder), max_kv_size=4096, **settings) as server:
        yield server


def completion(server: Server, model: str, prompt: str, length: int = 8) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": length, "temperature": 0}
    return server.post("/v1/completions", body)


def completed(server: Server, model: str, prompt: str, length: int = 8) -> str:
    return completion(server, model, prompt, length)["choices"][0]["text"]


def states(server: Server) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.get("/v1/models")["data"]}


def loaded(server: Server) -> set[str]:
    return {name for name, state in states(server).items() if state == "loaded"}


def prompts(count: int) -> list[str]:
    words = random.Random(3)
    return [
        " ".join(words.choices(["fish", "sea", "boat", "cod"], k=words.randint(5, 60))) for _ in range(count)
    ]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[str, str], str]:
    """What each model says when it is the only one."""
    texts: dict[tuple[str, str], str] = {}
    for family in FAMILIES:
        with serving(folder / family, max_kv_size=4096) as server:
            texts |= {(family, prompt): completed(server, family, prompt) for prompt in prompts(6)}
    return texts


@pytest.mark.thorough
def test_a_model_is_loaded_when_it_is_named(folder: Path, alone: dict[tuple[str, str], str]):
    with hosting(folder) as server:
        assert states(server) == {"qwen3": "loaded"} | dict.fromkeys(
            sorted(set(FAMILIES) - {"qwen3"}), "available"
        )
        (prompt, *_) = prompts(6)
        for family in FAMILIES:
            assert completed(server, family, prompt) == alone[family, prompt]
        assert loaded(server) == set(FAMILIES), "there is room for all"
        created = {listed["created"] for listed in server.get("/v1/models")["data"]}
        assert created == {server.get("/stats")["server"]["started_at"]}, "the server's, not the last load's"


@pytest.mark.thorough
def test_a_name_that_no_model_has_loads_nothing(folder: Path, alone: dict[tuple[str, str], str]):
    (prompt, *_) = prompts(6)
    with hosting(folder) as server:
        assert completed(server, "claude-haiku", prompt) == alone["qwen3", prompt]
        assert completed(server, "llama", prompt) == alone["llama", prompt]
        assert completed(server, "claude-haiku", prompt) == alone["llama", prompt], (
            "the one that was used last"
        )
        listed = server.get("/v1/models")["data"]
        assert [row["id"] for row in listed][:2] == ["llama", "qwen3"], "clients take the first one's window"
        assert listed[0]["context_window"] == 4096
        assert loaded(server) == {"qwen3", "llama"}


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.long
def test_eight_clients_and_five_models_get_what_each_would_get_alone(
    folder: Path, alone: dict[tuple[str, str], str], limit: int
):
    asked = [key for key in alone for _ in range(rounds(2, checked=1))]
    random.Random(limit).shuffle(asked)
    with hosting(folder, max_loaded=limit) as server, ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda key: completed(server, *key), asked))
        assert answers == [alone[key] for key in asked]
        assert len(loaded(server)) <= limit


@pytest.fixture
def steady_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the same memory at each load; measured peaks differ by a third on a busy machine."""
    cost = PrefillMemoryCost(token_bytes=12_000)
    monkeypatch.setattr(
        "start_llm.hosting.model_loading.measure_work",
        lambda *given, **how: replace(measure_work(*given, **how), cost=cost),
    )


def needs_where_memory_is_short(folder: Path) -> MemoryNeeds:
    with hosting(folder, memory=70_000_000) as server:
        return server.app.runtime.needs


def budget_between(less: int, more: int) -> int:
    """A budget of which what is counted lies in the middle."""
    return int((less + more) / 2 / (usable_share(1000) / 1000))


@pytest.mark.long
@pytest.mark.usefixtures("steady_work")
def test_where_memory_has_room_for_one_the_other_goes(folder: Path, alone: dict[tuple[str, str], str]):
    (prompt, *_) = prompts(6)
    needs = needs_where_memory_is_short(folder)
    memory = budget_between(together([needs]), together([needs, needs]))
    with hosting(folder, memory=memory) as server:
        needs = server.app.runtime.needs
        assert together([needs]) < usable_share(memory) < together([needs, needs])
        for family in ("llama", "qwen3", "llama"):
            assert completed(server, family, prompt) == alone[family, prompt]
            assert loaded(server) == {family}


def test_models_compute_in_turns_so_they_need_the_memory_for_it_once():
    small = MemoryNeeds(kept_bytes=10, window_bytes=3, computing_bytes=5)
    large = MemoryNeeds(kept_bytes=100, window_bytes=30, computing_bytes=50)
    assert together([]) == 0
    assert together([small]) == 18
    assert together([small, large, small]) == 13 + 130 + 13 + 50


@pytest.mark.long
@pytest.mark.usefixtures("steady_work")
def test_two_models_stay_where_there_is_room_for_one_step(folder: Path, alone: dict[tuple[str, str], str]):
    """Their own needs are small; the memory of a step, twice, would be too much."""
    (prompt, *_) = prompts(6)
    needs = needs_where_memory_is_short(folder)
    memory = budget_between(together([needs, needs]), 2 * together([needs]))
    with hosting(folder, memory=memory) as server:
        needs = server.app.runtime.needs
        assert together([needs, needs]) < usable_share(memory) < 2 * together([needs])
        for family in ("llama", "qwen3", "llama"):
            assert completed(server, family, prompt) == alone[family, prompt]
        assert loaded(server) == {"qwen3", "llama"}


@pytest.mark.long
def test_an_alias_is_another_name_of_a_model(folder: Path, alone: dict[tuple[str, str], str]):
    (prompt, *_) = prompts(6)
    aliases = ("claude-haiku-4-5=llama", "small = llama", "a/b=qwen3")
    with hosting(folder, aliases=aliases, max_loaded=1) as server:
        listed = {model["id"]: model.get("aliases") for model in server.get("/v1/models")["data"]}
        assert listed["llama"] == ["claude-haiku-4-5", "small"]
        assert listed["qwen3"] == ["a/b"]
        assert listed["gemma3_text"] is None
        for name, family in (("claude-haiku-4-5", "llama"), ("a/b", "qwen3"), ("small", "llama")):
            reply = completion(server, name, prompt)
            assert reply["choices"][0]["text"] == alone[family, prompt]
            assert reply["model"] == name
            assert loaded(server) == {family}
        assert server.get("/v1/models/small")["id"] == "llama"
        assert server.post("/v1/models/a%2Fb/load", {})["id"] == "qwen3"


@pytest.mark.parametrize(
    ("alias", "problem"),
    [("x=nobody", "there is no model 'nobody'"), ("llama=qwen3", "'llama' is a model itself")],
)
def test_an_alias_that_cannot_be_ends_the_start(folder: Path, alias: str, problem: str):
    with pytest.raises(SettingsError, match=f"MODEL_ALIASES: {problem}"), hosting(folder, aliases=(alias,)):
        pass


@pytest.mark.long
def test_a_stream_is_finished_before_its_model_goes(folder: Path, alone: dict[tuple[str, str], str]):
    (prompt, *_) = prompts(6)
    with hosting(folder, max_loaded=1) as server:
        whole = completed(server, "qwen3", prompt, 300)
        with ThreadPoolExecutor(2) as clients:
            long = clients.submit(completed, server, "qwen3", prompt, 300)
            while not server.get("/stats")["models"][0]["in_flight"] and not long.done():
                pass
            assert clients.submit(completed, server, "llama", prompt).result() == alone["llama", prompt]
            assert long.result() == whole
        assert loaded(server) == {"llama"}


@pytest.mark.thorough
def test_what_was_computed_is_there_when_a_model_that_stayed_is_asked_again(folder: Path):
    prompt = " ".join(prompts(6)) * 3
    with hosting(folder) as server:
        first = completion(server, "qwen3", prompt)["usage"]
        completed(server, "llama", prompt)
        again = completion(server, "qwen3", prompt)["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == first["prompt_tokens"] - 1


@pytest.mark.long
def test_a_model_that_went_finds_its_pages_on_the_disk(folder: Path, tmp_path: Path):
    prompt = " ".join(prompts(6)) * 8
    with hosting(folder, max_loaded=1, ssd_folder=str(tmp_path), drain_s=10) as server:
        first = completion(server, "qwen3", prompt)["usage"]
        completed(server, "llama", prompt)
        again = completion(server, "qwen3", prompt)["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 8


@pytest.mark.long
def test_a_model_that_is_loaded_again_at_once_finds_its_conversations(folder: Path, tmp_path: Path):
    with hosting(folder, ssd_folder=str(tmp_path)) as server:
        assert server.post(CHAT, ASKED[CHAT] | {"model": "llama"})["choices"]
        server.app._hosting.result().default.shared.disk._database_thread.submit(lambda: time.sleep(1))
        server.post("/v1/models/llama/unload", {})
        server.post("/v1/models/llama/load", {})
        assert "cannot be used" not in server.printed()


def posting(server: Server, model: str) -> Callable[[str, Any], Any]:
    return lambda path, body: server.post(path, {**body, "model": model})


@pytest.mark.long
def test_two_models_with_equal_weights_keep_their_conversations(tiny_model: TinyModel, tmp_path: Path):
    models, kept, names = tmp_path / "models", tmp_path / "kept", ("one", "two")
    for name in names:
        shutil.copytree(tiny_model("qwen3"), models / name)
    talks = {name: Conversation([system(f"I am {name}.")], echoes, name) for name in names}
    for question in ("Fish?", "Boats?"):
        with hosting(models, "one", ssd_folder=str(kept), drain_s=10) as server:
            for name, talk in talks.items():
                talk.ask(posting(server, name), question)
                stats = server.get("/stats")
                assert stats["server"]["model"] == name
                assert stats["ssd"]["conversations"]["kept"]
                assert stats["transcripts"]["bound"] == (question == "Boats?"), "each counts for itself"
            server.post("/v1/models/one/unload", {})
            assert server.get("/stats")["ssd"]["conversations"]["kept"], "the other one still uses the file"
            talks["one"].ask(posting(server, "two"), "And there?")
            assert server.get("/stats")["transcripts"]["bound"] == 1 + (question == "Boats?"), (
                "it goes on from the other's"
            )
            assert "cannot be used" not in server.printed()


@pytest.mark.long
def test_memory_comes_back_over_many_switches(folder: Path):
    (prompt, *_) = prompts(6)
    with serving(Path("qwen3"), model_dir=str(folder), max_kv_size=4096, max_loaded=1) as server:
        sizes = []
        for number in range(rounds(50, checked=12)):
            completed(server, ("qwen3", "llama")[number % 2], prompt)
            if number % 2 == 0:
                gc.collect()
                sizes.append(mx.get_active_memory())
        # Single ones have arrays of the step behind the last token, which nobody waits for.
        half = len(sizes) // 2
        assert statistics.median(sizes[half:]) <= statistics.median(sizes[:half]) * 1.01


@pytest.mark.thorough
def test_while_a_model_takes_the_place_of_another_one_the_pages_say_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, go = threading.Event(), threading.Event()
    with hosting(folder, max_loaded=1) as server, ThreadPoolExecutor(2) as clients:

        def slow(*arguments: Any) -> Any:
            begun.set()
            assert go.wait(30)
            return start_model(*arguments)

        monkeypatch.setattr("start_llm.hosting.model_switcher.start_model", slow)
        named = clients.submit(completed, server, "llama", "Fish?")
        assert begun.wait(30)
        unknown = clients.submit(completed, server, "claude-haiku", "Fish?")
        assert server.get("/health") == {"status": "loading", "model": "llama", "loading": "llama"}
        assert server.get("/")["model"] == "llama"
        assert states(server) | {"llama": "loading"} == states(server)
        assert loaded(server) == set()
        assert server.get("/stats")["server"]["model"] == "qwen3", "the one that was used last"
        assert not named.done()
        assert not unknown.done(), "it waits, and loads nothing"
        go.set()
        assert named.result() == unknown.result()


@pytest.mark.thorough
def test_models_are_loaded_and_unloaded_by_request(folder: Path):
    with hosting(folder) as server:
        assert server.post("/v1/models/llama/load", {})["state"] == "loaded"
        assert loaded(server) == {"qwen3", "llama"}
        assert server.post("/v1/models/qwen3/unload", {})["state"] == "available"
        assert loaded(server) == {"llama"}
        for action in ("load", "unload"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.post(f"/v1/models/nobody/{action}", {})
            assert refused.value.code == 404
            assert "There is no model 'nobody'" in refused.value.read().decode()


@pytest.mark.long
def test_the_last_model_goes_too_and_the_next_request_loads_it_again(folder: Path):
    """Meanwhile all pages answer, and clients still find its window."""
    with hosting(folder) as server:
        before = completed(server, "llama", "Fish?")
        for family in ("qwen3", "llama"):
            assert server.post(f"/v1/models/{family}/unload", {})["state"] == "available"
        assert loaded(server) == set()
        assert server.get("/health") == {"status": "ok", "model": "llama"}
        assert server.get("/")["model"] == "llama"
        assert server.get("/stats")["prompt_cache"]["bytes"] == 0
        assert server.get("/activity")["memory"]["parts"]["weights"] == 0
        first = server.get("/v1/models")["data"][0]
        assert (first["id"], first["context_window"]) == ("llama", 4096)
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.get("/v1/responses/resp_none")
        assert refused.value.code == 404
        assert completed(server, "any-name", "Fish?") == before, "an unknown name brings the last one back"
        assert loaded(server) == {"llama"}


def replies(server: Server, model: str) -> Iterator[tuple[str, Any]]:
    """The kind of a request for this model, and its reply: each protocol, whole and streamed."""
    for path, asked in ASKED.items():
        for stream in (False, True):
            reply = ask(server.port, "POST", path, asked | {"model": model, "stream": stream})
            yield f"{path} {'streamed' if stream else 'whole'}", reply


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt-5"])
def test_a_header_and_the_terminal_say_who_has_answered(folder: Path, name: str):
    with hosting(folder, first="llama") as server:
        for kind, reply in replies(server, name):
            assert (reply.status, reply.headers.get("x-start-llm-model")) == (200, "llama"), kind
        assert "x-start-llm-model" not in ask(server.port, "GET", "/v1/models").headers
        counted = ask(server.port, "POST", "/v1/messages/count_tokens", ASKED["/v1/messages"])
        assert counted.headers["x-start-llm-model"] == "llama"
        ending = "model llama" if name == "llama" else "model llama for gpt-5"
        wait_until(lambda: server.printed().count(" written ") == 8, within_s=5)
        lines = [line for line in server.printed().splitlines() if " written " in line]
        assert [line.rstrip().endswith(ending) for line in lines] == [True] * 8


@pytest.mark.thorough
def test_a_single_model_is_not_named_in_each_line(folder: Path):
    with serving(folder / "llama") as server:
        completed(server, "llama", "Fish?")
        completed(server, "gpt-5", "Fish?")
        wait_until(lambda: server.printed().count(" written ") == 2, within_s=5)
        lines = [line for line in server.printed().splitlines() if " written " in line]
    assert ["model llama" in line for line in lines] == [False, True]


@pytest.mark.thorough
def test_with_strict_names_an_unknown_one_is_refused_with_those_that_there_are(folder: Path):
    with hosting(folder, strict_names=True, aliases=("small=llama",)) as server:
        for kind, reply in replies(server, "gpt-5"):
            assert reply.status == 404, kind
            message = reply.json["error"]["message"]
            assert message.startswith("There is no model 'gpt-5'; there is "), kind
            assert all(f"{family}" in message for family in FAMILIES), kind
        for name in ("qwen3", "small"):
            assert completed(server, name, "Fish?")
        assert server.post("/v1/completions", {"prompt": "Fish?", "max_tokens": 2})["choices"]


def held_loads(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let loads wait from now on. Returns what tells that one has begun, and what lets them go on."""
    begun, go = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(30)
        return start_model(*arguments)

    monkeypatch.setattr("start_llm.hosting.model_switcher.start_model", slow)
    return begun, go


def test_a_request_that_cannot_show_signs_of_life_is_asked_to_come_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The model is loaded all the same."""
    with hosting(folder, load_wait_s=0.2) as server:
        begun, go = held_loads(monkeypatch)
        reply = ask(server.port, "POST", TEXT, ASKED[TEXT] | {"model": "llama"})
        assert (reply.status, reply.headers["retry-after"]) == (503, "10")
        assert "'llama' is still being loaded" in reply.json["error"]["message"]
        assert begun.wait(10)
        go.set()
        wait_until(lambda: loaded(server) == {"qwen3", "llama"}, within_s=20)
        assert completed(server, "llama", "Fish?")


@pytest.mark.thorough
def test_a_model_that_was_promised_while_another_one_was_loaded_comes_in_its_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with hosting(folder, load_wait_s=0.2) as server, Client(server.port) as first:
        begun, go = held_loads(monkeypatch)
        first.request("POST", TEXT, ASKED[TEXT] | {"model": "llama", "stream": True})
        assert begun.wait(10)
        reply = ask(server.port, "POST", TEXT, ASKED[TEXT] | {"model": "gemma3_text"})
        assert reply.status == 503
        assert "'gemma3_text' is still being loaded" in reply.json["error"]["message"]
        go.set()
        wait_until(lambda: loaded(server) == {"qwen3", "llama", "gemma3_text"}, within_s=20)
        assert first.reply().status == 200


def test_a_stream_says_that_its_model_waits_for_another_one(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with (
        hosting(folder, keep_alive_s=0.02) as server,
        Client(server.port) as first,
        Client(server.port) as second,
    ):
        begun, go = held_loads(monkeypatch)
        first.request("POST", TEXT, ASKED[TEXT] | {"model": "llama", "stream": True})
        assert begun.wait(10)
        second.request("POST", TEXT, ASKED[TEXT] | {"model": "gemma3_text", "stream": True})
        signs = [(client.head()[0], next(client.chunks())) for client in (first, second)]
        go.set()
    assert [status for status, _ in signs] == [200, 200]
    assert signs[0][1].startswith(b": the model is being loaded, for ")
    assert signs[1][1].startswith(b": the model waits until another one is loaded or unloaded, for ")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_load_that_breaks_is_reported_and_ends_its_promise(folder: Path, monkeypatch: pytest.MonkeyPatch):
    begun, go = list[str](), threading.Event()

    def broken(name: str, *_: Any) -> MemoryNeeds:
        begun.append(name)
        assert go.wait(30)
        raise InternalError("broken on purpose")

    monkeypatch.setattr("start_llm.hosting.model_switcher.estimated_needs", broken)
    with hosting(folder, load_wait_s=0.2) as server, Client(server.port) as waiting:
        waiting.request("POST", TEXT, ASKED[TEXT] | {"model": "llama", "stream": True})
        assert ask(server.port, "POST", TEXT, ASKED[TEXT] | {"model": "llama"}).status == 503
        go.set()
        refused = waiting.reply()
        assert (refused.status, "broken on purpose" in refused.json["error"]["message"]) == (500, True)
        switcher = server.app._hosting.result().switcher
        wait_until(lambda: switcher._residents.change is None, within_s=5)
        time.sleep(0.2)
        assert begun == ["llama"], "nobody asks for it any more"


def test_who_unloads_a_model_and_leaves_while_another_one_is_loaded_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with hosting(folder) as server, Client(server.port) as first:
        begun, go = held_loads(monkeypatch)
        first.request("POST", TEXT, ASKED[TEXT] | {"model": "llama", "stream": True})
        assert begun.wait(10)
        others = set(threading.enumerate())
        try:
            with Client(server.port) as leaver:
                leaver.request("POST", "/v1/models/qwen3/unload", {})
                wait_until(lambda: not set(threading.enumerate()) <= others, within_s=5)
                threading.Event().wait(0.2)
            wait_until(lambda: set(threading.enumerate()) <= others, within_s=5)
        finally:
            go.set()
        assert first.reply().status == 200
        assert loaded(server) == {"qwen3", "llama"}


@pytest.mark.long
def test_where_a_model_does_not_end_no_other_one_is_loaded_beside_its_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("start_llm.hosting.model_switcher._STOP_S", 0.1)
    monkeypatch.setattr("start_llm.engine.engine_thread._COLLECT_S", 0.1)
    go = threading.Event()
    with hosting(folder, max_loaded=1, drain_s=0.1) as server:
        before = completed(server, "qwen3", "Fish?")
        server.app._hosting.result().default.engine._thread.submit(lambda: assert_set(go))
        try:
            for path, body in ((TEXT, ASKED[TEXT] | {"model": "llama"}), ("/v1/models/qwen3/unload", {})):
                refused = ask(server.port, "POST", path, body)
                assert refused.status == 500
                assert "'qwen3' does not end, so its memory is not free." in refused.json["error"]["message"]
        finally:
            go.set()
            monkeypatch.undo()  # from here on models have their usual time to end
        assert completed(server, "qwen3", "Fish?") == before, "it is loaded anew once it has ended"
        assert completed(server, "llama", "Fish?")
        assert loaded(server) == {"llama"}


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


@pytest.mark.long
def test_a_model_whose_engine_has_ended_is_loaded_anew(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(_: Any) -> None:
        raise SystemError("out of order")

    with hosting(folder, stall_s=0.1) as server:
        before = completed(server, "qwen3", "Fish?")
        with monkeypatch.context() as patched:
            patched.setattr("start_llm.engine.loop.EngineLoop.step", broken)
            assert ask(server.port, "POST", TEXT, ASKED[TEXT]).status == 500
        server.app._hosting.result().default.status.engine.step_began = time.monotonic() - 1
        health = ask(server.port, "GET", "/health")
        assert health.json["reason"] == "the engine of this model has ended"
        assert server.app._hosting.result().stuck_reason() == "", "what has ended does not hang"
        assert completed(server, "qwen3", "Fish?") == before
        assert ask(server.port, "GET", "/health").status == 200


@pytest.mark.thorough
def test_all_models_together_have_the_time_for_writing_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    given: list[float] = []

    def slow(_: ModelRuntime, timeout_s: float, flush_s: float) -> bool:
        given.append(flush_s)
        time.sleep(0.2)
        return True

    with hosting(folder) as server:
        assert completed(server, "llama", "Fish?")
        with monkeypatch.context() as patched:
            patched.setattr(ModelRuntime, "stop", slow)
            server.app._hosting.result().switcher.stop(0, 0.3)
            server.app._hosting.result().switcher.stop(0, 0.1)
    assert given[0] > 0.2 and 0 < given[1] <= 0.1
    assert given[3] == 0


def test_a_load_that_breaks_for_an_unknown_reason_is_reported_and_not_tried_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    tried = list[int]()

    def broken(*_: Any) -> Any:
        tried.append(1)
        raise ZeroDivisionError("by zero")

    with hosting(folder) as server, monkeypatch.context() as patched:
        patched.setattr("start_llm.hosting.model_switcher.start_model", broken)
        patched.setattr("threading.excepthook", lambda _: None)
        with pytest.raises(urllib.error.HTTPError) as refused:
            completed(server, "llama", "Fish?")
        assert "cannot be loaded. ZeroDivisionError: by zero" in refused.value.read().decode()
        assert tried == [1]


@pytest.mark.long
def test_the_first_model_stays_until_the_server_has_started(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine may take longer to open its port than a model may be idle."""
    opened = App._open

    def slowly(*arguments: Any) -> None:
        time.sleep(0.3)
        opened(*arguments)

    monkeypatch.setattr(App, "_open", slowly)
    with hosting(folder, model_idle_s=0.1) as server:
        wait_until(lambda: not loaded(server), within_s=10)


@pytest.mark.long
def test_a_pinned_model_stays(folder: Path):
    with hosting(folder, max_loaded=2, pinned=("qwen3",)) as server:
        for family in FAMILIES[1:]:
            completed(server, family, "Fish?")
            assert "qwen3" in loaded(server)
            assert len(loaded(server)) == 2


@pytest.mark.thorough
def test_beside_pinned_models_without_room_a_request_is_refused_with_the_reason(folder: Path):
    with hosting(folder, max_loaded=1, pinned=("qwen3",)) as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            completed(server, "llama", "Fish?")
        assert "does not fit beside the pinned models: qwen3" in refused.value.read().decode()
        assert completed(server, "qwen3", "Fish?")


@pytest.mark.long
def test_no_model_is_unloaded_for_one_that_does_not_fit_beside_pinned_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    large = MemoryNeeds(kept_bytes=2**60, window_bytes=0, computing_bytes=0)
    with hosting(folder, pinned=("qwen3",)) as server:
        assert completed(server, "llama", "Fish?")
        monkeypatch.setattr("start_llm.hosting.model_switcher.estimated_needs", lambda *_: large)
        with pytest.raises(urllib.error.HTTPError) as refused:
            completed(server, "gemma3_text", "Fish?")
        assert "does not fit beside the pinned models: qwen3." in refused.value.read().decode()
        assert loaded(server) == {"qwen3", "llama"}


@pytest.mark.thorough
def test_a_model_that_is_broken_leaves_the_one_that_was_there(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "models")
    (tmp_path / "models" / "llama" / "model.safetensors").write_bytes(b"no weights")
    with hosting(tmp_path / "models", max_loaded=1) as server:
        before = completed(server, "qwen3", "Fish?")
        with pytest.raises(urllib.error.HTTPError) as refused:
            completed(server, "llama", "Fish?")
        assert refused.value.code == 500
        assert "'llama' cannot be loaded" in refused.value.read().decode()
        assert completed(server, "qwen3", "Fish?") == before


@pytest.mark.thorough
def test_if_nothing_can_be_loaded_any_more_requests_say_so_and_a_good_model_comes_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any) -> Any:
        raise ModelError("the disk is gone")

    with hosting(folder, max_loaded=1) as server:
        before = completed(server, "qwen3", "Fish?")
        with monkeypatch.context() as patched:
            patched.setattr("start_llm.hosting.model_switcher.start_model", broken)
            for model, words in (("llama", "the disk is gone"), ("claude-haiku", "'qwen3' cannot be loaded")):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    completed(server, model, "Fish?")
                assert words in refused.value.read().decode()
        assert completed(server, "qwen3", "Fish?") == before


@pytest.mark.thorough
@pytest.mark.parametrize("several", [False, True])
def test_models_that_nobody_uses_go_the_last_one_too_and_come_back(folder: Path, several: bool):
    first = hosting(folder, model_idle_s=0.3) if several else serving(folder / "qwen3", model_idle_s=0.3)
    with first as server:
        wait_until(lambda: loaded(server) == set(), within_s=10)
        assert completed(server, "qwen3", "Fish?")


@pytest.mark.long
def test_a_pinned_model_stays_although_nobody_uses_it(folder: Path):
    with hosting(folder, model_idle_s=0.2, pinned=("llama",)) as server:
        completed(server, "llama", "Fish?")
        wait_until(lambda: loaded(server) == {"llama"}, within_s=10)
        time.sleep(0.5)
        assert loaded(server) == {"llama"}
