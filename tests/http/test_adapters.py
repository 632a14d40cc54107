"""Requests choose adapters, and nothing that was computed or recorded under one is used under another."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.errors import SettingsError
from tests import tiny_adapters
from tests.conftest import TinyModel
from tests.images.files import data_url, picture
from tests.server.client import Client, Reply, ask, engine_is_free, wait_until
from tests.serving import Server, serving, tried_once

PATH = "/v1/adapters"
NAMES = ("a", "b", "c")
SPECS = ("none", "a", "b", "c", "a+b", "b+a")
TALK = [
    {"role": "system", "content": "Answer in few words. " * 40},
    {"role": "user", "content": "Of the sea?"},
]


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", hidden=128, layers=2)


@pytest.fixture(scope="module")
def root(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters."""
    place = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        tiny_adapters.build(folder, place / name, seed)
    return place


@contextmanager
def adapting(folder: Path, root: Path, *names: str, **settings: Any) -> Generator[Server]:
    """A server with these adapters."""
    with tried_once(), serving(folder, adapter_dir=str(root), max_kv_size=4096, **settings) as server:
        for name in names:
            assert mount(server, name).status == 200
        yield server


def mount(server: Server, name: str, **more: Any) -> Reply:
    return ask(server.port, "POST", PATH, {"id": name, **more})


def unmount(server: Server, name: str) -> Reply:
    return ask(server.port, "DELETE", f"{PATH}/{name}")


def completion(server: Server, prompt: str, adapter: str = "none", length: int = 12) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "adapter": adapter}
    return server.post("/v1/completions", body)


def completed(server: Server, prompt: str, adapter: str = "none", length: int = 12) -> str:
    return completion(server, prompt, adapter, length)["choices"][0]["text"]


def cached(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def chat(server: Server, adapter: str, messages: list[Any] = TALK, path: str = "chat/completions") -> Any:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "adapter": adapter}
    return server.post(f"/v1/{path}", body)


def prompts(count: int) -> list[str]:
    words = random.Random(3)
    return [
        " ".join(words.choices(["fish", "sea", "boat", "cod"], k=words.randint(5, 400))) for _ in range(count)
    ]


@pytest.fixture(scope="module")
def alone(folder: Path, root: Path) -> dict[tuple[str, str], str]:
    """What is said without a cache, one request after another, by a server that has these adapters alone."""
    texts: dict[tuple[str, str], str] = {}
    for spec in SPECS:
        with adapting(folder, root, *(name for name in NAMES if name in spec), cache_is_on=False) as server:
            texts |= {(spec, prompt): completed(server, prompt, spec) for prompt in prompts(6)}
    assert len({texts[spec, prompts(6)[0]] for spec in SPECS}) >= 4, "the adapters make a difference"
    return texts


# -------------------------------------------------------------------------------------- replies and the cache


@pytest.mark.long
def test_eight_clients_and_six_choices_get_what_each_would_get_alone(
    folder: Path, root: Path, alone: dict[tuple[str, str], str]
):
    asked = [key for key in alone for _ in range(2)]
    random.Random(5).shuffle(asked)
    with adapting(folder, root, *NAMES, batch=8) as server, ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda key: completed(server, key[1], key[0]), asked))
    assert answers == [alone[key] for key in asked]


@pytest.mark.thorough
def test_what_was_computed_under_an_adapter_is_used_under_it_alone(folder: Path, root: Path):
    prompt = "fish sea boat cod " * 200
    with adapting(folder, root, *NAMES) as server:
        for spec in SPECS:
            assert cached(completion(server, prompt, spec)) == 0, spec
        for spec in SPECS:
            again = completion(server, prompt, spec)
            assert cached(again) >= again["usage"]["prompt_tokens"] - 1, spec


@pytest.mark.thorough
def test_a_conversation_is_bound_under_its_adapter_alone(folder: Path, root: Path):
    with adapting(folder, root, "a", "b") as server:
        first = chat(server, "a")
        longer = [*TALK, first["choices"][0]["message"], {"role": "user", "content": "And of boats?"}]
        read = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        assert cached(chat(server, "b", longer)) == 0
        assert cached(chat(server, "none", longer)) == 0
        assert cached(chat(server, "a", longer)) >= read - 1


@pytest.mark.thorough
def test_an_explanation_is_that_of_the_adapter(folder: Path, root: Path):
    with adapting(folder, root, "a") as server:
        chat(server, "a")
        assert chat(server, "a", path="cache/explain")["cached_tokens"] > 100
        assert chat(server, "none", path="cache/explain")["cached_tokens"] == 0


@pytest.mark.thorough
def test_another_adapter_of_the_same_name_finds_nothing(folder: Path, root: Path, tmp_path: Path):
    shutil.copytree(root / "a", tmp_path / "x")
    prompt = "fish sea boat cod " * 200
    with adapting(folder, tmp_path, "x") as server:
        before = completed(server, prompt, "x")
        shutil.rmtree(tmp_path / "x")
        shutil.copytree(root / "b", tmp_path / "x")
        assert completed(server, prompt, "x") == before, "files that change do not change what is mounted"
        assert mount(server, "x").status == 200
        after = completion(server, prompt, "x")
        assert cached(after) == 0
        assert after["choices"][0]["text"] != before


@pytest.mark.thorough
def test_pages_of_an_adapter_outlive_the_server_for_it_alone(folder: Path, root: Path, tmp_path: Path):
    prompt = "fish sea boat cod " * 200
    disk = {"ssd_folder": str(tmp_path / "ssd"), "state_root": str(tmp_path / "state")}
    with adapting(folder, root, "a", **disk) as server:
        before = completion(server, prompt, "a")
    with adapting(folder, root, "a", "b", **disk) as server:
        assert cached(completion(server, prompt, "b")) == 0
        assert cached(completion(server, prompt)) == 0
        after = completion(server, prompt, "a")
    assert cached(after) >= after["usage"]["prompt_tokens"] - 1
    assert after["choices"][0]["text"] == before["choices"][0]["text"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 8}),
    ],
)
def test_every_protocol_has_the_choice(folder: Path, root: Path, path: str, body: dict[str, Any]):
    def text(server: Server, adapter: str) -> str:
        reply = server.post(path, body | {"adapter": adapter, "temperature": 0, "model": "m"})
        return json.dumps([reply.get(name) for name in ("choices", "content")]) + output_of(reply)

    with adapting(folder, root, "a") as server:
        assert text(server, "a") == text(server, "a")
        assert text(server, "a") != text(server, "none")
        for wrong, problem in (("x", "names 'x', and there is 'a'"), (1, "must be a string")):
            reply = ask(server.port, "POST", path, body | {"adapter": wrong, "model": "m"})
            assert reply.status == 400
            assert problem in reply.json["error"]["message"]


def output_of(reply: dict[str, Any]) -> str:
    return json.dumps([item.get("content") for item in reply.get("output", ())])


# --------------------------------------------------------------------------------------- mounting, unmounting


def test_what_is_mounted_is_listed(folder: Path, root: Path):
    with adapting(folder, root, "a") as server:
        (listed,) = server.get(PATH)["adapters"]
        assert sorted(listed) == ["id", "mounted_layers", "path", "rank", "scale", "size_bytes"]
        assert listed["id"] == "a"
        assert listed["path"] == str(root / "a")
        assert (listed["rank"], listed["scale"], listed["mounted_layers"]) == (4, 20.0, 14)
        assert mount(server, "other", path=str(root / "b")).json["path"] == str(root / "b")
        assert unmount(server, "a").json == {"id": "a", "deleted": True}
        assert [adapter["id"] for adapter in server.get(PATH)["adapters"]] == ["other"]
        assert unmount(server, "a").status == 404
        assert ask(server.port, "POST", "/v1/completions", {"prompt": "Hi", "adapter": "a"}).status == 400


@pytest.mark.thorough
def test_trace_terminal_and_stats_name_them(folder: Path, root: Path, tmp_path: Path):
    with adapting(folder, root, "a", "b", traces=True, log_root=str(tmp_path)) as server:
        mounted = {adapter["id"]: adapter["size_bytes"] for adapter in server.get(PATH)["adapters"]}
        stats = server.get("/stats")["adapters"]
        assert stats["mounted"] == [{"id": name, "bytes": size} for name, size in mounted.items()]
        assert stats["bytes"] == sum(mounted.values()) > 0
        unmount(server, "b")
        assert [adapter["id"] for adapter in server.get("/stats")["adapters"]["mounted"]] == ["a"]
        mount(server, "b")
        for spec in ("none", "a", "a+b"):
            completed(server, "Fish?", spec)
        wait_until(lambda: server.get("/stats")["requests"]["in_flight"] == 0, within_s=5)
        files = list(tmp_path.glob("*/cache-session-*.log"))
        traced = {json.loads(line)["adapter"] for file in files for line in file.read_text().splitlines()}
        assert traced == {None, "a", "a+b"}
        assert len(files) == 3, "a session of its own for each"
        shown = [line for line in server.printed().splitlines() if " written " in line]
        assert [line.partition("  adapter ")[2] for line in shown] == ["", "a", "a+b"]


@pytest.mark.long
def test_a_reply_is_finished_under_the_adapter_with_which_it_began(
    folder: Path, root: Path, alone: dict[tuple[str, str], str]
):
    prompt = prompts(6)[0]
    with adapting(folder, root, "a") as server:
        whole = completed(server, prompt, "a", 400)
        began, texts = threading.Event(), list[str]()

        def stream() -> None:
            body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "adapter": "a", "stream": True}
            with Client(server.port) as client:
                client.request("POST", "/v1/completions", body)
                client.head()
                for event in client.events():
                    if event != "[DONE]" and event["choices"]:
                        texts.append(event["choices"][0]["text"])
                        began.set()

        thread = threading.Thread(target=stream)
        thread.start()
        assert began.wait(10)
        assert unmount(server, "a").status == 200
        assert mount(server, "b").status == 200
        assert completed(server, prompt, "b") == alone["b", prompt]
        assert completed(server, prompt) == alone["none", prompt]
        thread.join(30)
    assert "".join(texts) == whole


@pytest.mark.thorough
def test_memory_comes_back_when_it_is_unmounted(folder: Path, root: Path):
    with adapting(folder, root, cache_is_on=False) as server:
        completed(server, "fish")
        runtime = server.app.runtime
        gc.collect()  # what other tests' servers have left is not to go meanwhile
        before, kept = mx.get_active_memory(), runtime.needs.kept_bytes
        for _ in range(3):
            assert mount(server, "a").status == 200
            size = server.get(PATH)["adapters"][0]["size_bytes"]
            completed(server, "fish", "a")
            assert runtime.needs.kept_bytes == kept + size
            assert mx.get_active_memory() >= before + size
            unmount(server, "a")
            wait_until(lambda: engine_is_free(server.port), within_s=5)
        assert runtime.needs.kept_bytes == kept
        assert mx.get_active_memory() <= before * 1.01


def test_one_for_which_memory_has_no_room_is_refused(folder: Path, tmp_path: Path):
    big = tiny_adapters.build(folder, tmp_path / "big", 1)
    os.truncate(big / "adapters.safetensors", 2**40)  # takes no room on the disk
    with adapting(folder, tmp_path) as server:
        refused = mount(server, "big")
        assert refused.status == 400
        assert "are free beside a prompt of the whole context window" in refused.error["message"]
        assert server.get(PATH)["adapters"] == []


@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        ({}, "id", "is required"),
        ({"id": 3}, "id", "must be a string"),
        ({"id": "none", "path": "a"}, "id", "and not 'none'"),
        ({"id": "a+b", "path": "a"}, "id", "must be 1 to 64 letters"),
        ({"id": "x" * 65, "path": "a"}, "id", "must be 1 to 64 letters"),
        ({"id": "x"}, "path", "is no folder below ADAPTER_DIR"),
        ({"id": "x", "path": "../"}, "path", "is no folder below ADAPTER_DIR"),
        ({"id": "x", "path": "/etc"}, "path", "is no folder below ADAPTER_DIR"),
        ({"id": "x", "path": "link"}, "path", "is no folder below ADAPTER_DIR"),
        ({"id": "x", "path": "a\0"}, "path", "is no folder below ADAPTER_DIR"),
        ({"id": "x", "path": "a/adapter_config.json"}, "path", "is no folder below ADAPTER_DIR"),
        ({"id": "x", "path": "."}, "path", "adapter_config.json cannot be read"),
        ({"id": "x", "path": 1}, "path", "must be a string"),
        ({"id": "x", "path": "a", "model": 1}, "model", "must be a string"),
    ],
)
@pytest.mark.sample(12)
def test_what_cannot_be_mounted_is_refused_by_its_field(
    folder: Path, root: Path, tmp_path: Path, body: dict[str, Any], param: str, problem: str
):
    (root / "link").unlink(missing_ok=True)
    (root / "link").symlink_to(tmp_path)
    with adapting(folder, root, "b") as server:
        refused = ask(server.port, "POST", PATH, body)
        assert refused.status == 400
        assert refused.error["param"] == param
        assert problem in refused.error["message"]
        assert [adapter["id"] for adapter in server.get(PATH)["adapters"]] == ["b"]


def test_without_a_folder_nobody_mounts_any(folder: Path, root: Path):
    with serving(folder) as server:
        refused = mount(server, "a", path=str(root / "a"))
        assert refused.status == 400
        assert "ADAPTER_DIR, which is not set" in refused.error["message"]
        assert server.get(PATH) == {"adapters": []}


def test_a_folder_that_is_not_there_ends_the_start(folder: Path):
    with (
        pytest.raises(SettingsError, match="ADAPTER_DIR='/not/there': no such folder"),
        serving(folder, adapter_dir="/not/there"),
    ):
        pass


def test_another_method_is_refused_with_those_that_there_are(folder: Path, root: Path):
    with adapting(folder, root, "a") as server:
        assert ask(server.port, "PUT", PATH, {}).headers["allow"] == "GET, HEAD, POST"
        assert ask(server.port, "GET", f"{PATH}/a").status == 405


# --------------------------------------------------------------------------------------------- several models


@pytest.mark.long
def test_each_model_has_its_adapters_and_has_them_again_when_it_comes_back(
    folder: Path, root: Path, tiny_model: TinyModel, tmp_path: Path, alone: dict[tuple[str, str], str]
):
    models, prompt = tmp_path / "models", prompts(6)[0]
    for name, place in (("one", folder), ("two", tiny_model("llama", hidden=128, layers=2))):
        shutil.copytree(place, models / name)
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "model": "one", "adapter": "a"}
    with adapting(Path("one"), root, "a", "b", model_dir=str(models), max_loaded=1) as server:
        assert ask(server.port, "POST", "/v1/completions", body | {"model": "two"}).status == 400
        assert server.get(PATH)["adapters"] == [], "those of the model that was used last"
        shutil.move(root / "b", tmp_path / "gone")
        try:
            reply = server.post("/v1/completions", body)
        finally:
            shutil.move(tmp_path / "gone", root / "b")
        assert reply["choices"][0]["text"] == alone["a", prompt]
        assert [adapter["id"] for adapter in server.get(PATH)["adapters"]] == ["a"]
        assert "The adapter 'b' is no longer mounted." in server.printed()


@pytest.mark.long
def test_images_are_not_read_half_under_an_adapter(tiny_vision_model: TinyModel, tmp_path: Path):
    model = tiny_vision_model("qwen3_vl")
    tiny_adapters.build(model, tmp_path / "a", 1)
    part = {"type": "image_url", "image_url": {"url": data_url(picture())}}
    seen = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    with adapting(model, tmp_path, "a") as server:
        body = {"messages": seen, "max_tokens": 4, "adapter": "a"}
        refused = ask(server.port, "POST", "/v1/chat/completions", body)
        assert (refused.status, refused.error["param"]) == (400, "adapter")
        assert "cannot be used with images" in refused.error["message"]
        assert chat(server, "none", seen)["usage"]["completion_tokens"] >= 1
        assert chat(server, "a")["usage"]["completion_tokens"] >= 1
