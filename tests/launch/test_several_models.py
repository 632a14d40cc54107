"""A server with several models: clients with a list get all of them, and `--model` says which one is used."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.commands.client_commands import take_own_options
from start_llm.core.errors import LaunchError
from start_llm.launch.clients import CLIENTS
from start_llm.launch.http_requests import NO_KEY, Address
from start_llm.launch.server_info import OfferedModel, ServerInfo, find
from tests.conftest import TinyModel
from tests.launch.home import Home, answering, page
from tests.serving import Server, serving

SMALL = OfferedModel(name="small", window=8192, reply=2048)
BIG = OfferedModel(name="lab/big", window=40_000, reply=10_000, sees=True)
SERVED = ServerInfo(
    url="http://127.0.0.1:8080", key="k", model="lab/used", window=131_072, reply=32_000, others=(SMALL, BIG)
)
FOLDER = Path("/private/folder")
USED = {"id": "lab/used", "context_window": 30_000, "state": "loaded"}
LISTED = [
    USED,
    {"id": "lab/seeing", "context_window": 9000, "vision": True, "state": "loaded", "aliases": ["eyes"]},
    {"id": "unknown", "state": "available"},
]


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "llama"):
        shutil.copytree(tiny_model(family), folder / family)
    with serving(Path("qwen3"), model_dir=str(folder), max_kv_size=5000) as server:
        yield server


def files(name: str) -> Any:
    return CLIENTS[name].files(SERVED, FOLDER)


def ids(entries: object) -> list[str]:
    assert isinstance(entries, list)
    return [entry["id"] for entry in entries]


def served(*listed: object, model: str | None = None) -> ServerInfo:
    with answering(page(json.dumps({"data": listed}))) as url:
        return find([Address(url, NO_KEY)], model)


def test_pi_and_openclaw_list_all_models_and_begin_with_the_one_in_use() -> None:
    pi = files("pi")
    entries = pi["models.json"]["providers"]["start_llm"]["models"]
    assert ids(entries) == ["lab/used", "small", "lab/big"]
    assert [entry["contextWindow"] for entry in entries] == [131_072, 8192, 40_000]
    assert [entry["input"] for entry in entries] == [["text"], ["text"], ["text", "image"]]
    assert pi["settings.json"]["defaultModel"] == "lab/used"
    claw = files("openclaw")["openclaw.json"]
    assert ids(claw["models"]["providers"]["start_llm"]["models"]) == ["lab/used", "small", "lab/big"]
    assert claw["agents"]["defaults"]["model"] == {"primary": "start_llm/lab/used"}


def test_opencode_lists_all_models_with_their_windows() -> None:
    provider = files("opencode")["opencode.json"]["provider"]
    models = provider["start_llm"]["models"]
    assert {name: model["limit"]["context"] for name, model in models.items()} == {
        "lab/used": 131_072,
        "small": 8192,
        "lab/big": 40_000,
    }


def test_qwen_cline_and_continue_list_all_models_and_begin_with_the_one_in_use() -> None:
    qwen = files("qwen")["settings.json"]
    assert ids(qwen["modelProviders"]["openai"]) == ["lab/used", "small", "lab/big"]
    assert qwen["model"] == {"name": "lab/used"}
    cline = files("cline")
    listed = cline["data/settings/models.json"]["providers"]["openai-compatible"]["models"]
    assert {name: model["contextWindow"] for name, model in listed.items()} == {
        "lab/used": 131_072,
        "small": 8192,
        "lab/big": 40_000,
    }
    chosen = cline["data/settings/providers.json"]["providers"]["openai-compatible"]["settings"]
    assert chosen["model"] == "lab/used"
    models = files("continue")["config.yaml"]["models"]
    assert [model["model"] for model in models] == ["lab/used", "small", "lab/big"]


def test_the_first_of_the_list_is_used_and_the_others_are_offered() -> None:
    info = served(*LISTED)
    assert (info.model, info.window) == ("lab/used", 30_000)
    assert info.others == (
        OfferedModel(name="lab/seeing", window=9000, reply=2250, sees=True),
        OfferedModel(name="unknown", window=9000, reply=2250),
    ), "of a model that was never loaded the smallest window is taken"


@pytest.mark.parametrize("name", ["lab/seeing", "seeing", "eyes"])
def test_a_model_is_named_by_its_id_its_end_or_an_alias(name: str) -> None:
    info = served(*LISTED, model=name)
    assert (info.model, info.window, info.sees) == ("lab/seeing", 9000, True)
    assert [other.name for other in info.others] == ["lab/used", "unknown"]


@pytest.mark.parametrize(
    ("name", "more"), [("nothing", ()), ("used", ({"id": "other/used", "context_window": 5},)), ("", ())]
)
def test_a_name_that_no_model_has_or_two_have_is_refused_with_all_names(
    name: str, more: tuple[object]
) -> None:
    with pytest.raises(LaunchError, match=rf"has no model '{name}'. It has: lab/used, lab/seeing, unknown"):
        served(*LISTED, *more, model=name)


def test_a_server_of_others_is_not_asked_to_load_a_model() -> None:
    with pytest.raises(LaunchError, match="names no model with a context window"):
        served(USED, {"id": "windowless"}, model="windowless")


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [["launch", "--model", "llama", "pi", "-p"], ["launch", "pi", "--model=llama", "-p"]]
)
def test_the_model_that_is_named_is_loaded_and_used(words: list[str], home: Home, server: Server) -> None:
    if "llama" in {model["id"] for model in server.get("/v1/models")["data"] if model["state"] == "loaded"}:
        server.post("/v1/models/llama/unload", {})
    done = home.run(words[0], "--base-url", server.url, *words[1:])
    assert done.returncode == 0
    assert "The server loads llama ..." in done.stderr
    start = home.client_start()
    assert start.arguments == ["-p"], "the client gets the rest"
    assert json.loads(start.files[str(home.state / "clients/pi/settings.json")])["defaultModel"] == "llama"
    listed = json.loads(start.files[str(home.state / "clients/pi/models.json")])
    assert ids(listed["providers"]["start_llm"]["models"]) == ["llama", "qwen3"]
    (entry,) = (model for model in listed["providers"]["start_llm"]["models"] if model["id"] == "llama")
    assert entry["contextWindow"] == 5000


@pytest.mark.thorough
def test_a_model_that_is_not_there_is_reported_before_anything_is_written(home: Home, server: Server) -> None:
    done = home.run("launch", "--base-url", server.url, "--model", "big", "pi")
    assert done.returncode == 2
    assert f"The server at {server.url} has no model 'big'. It has: " in done.stderr
    assert not home.state.exists()


@pytest.mark.parametrize(
    ("words", "base_url", "model", "left"),
    [
        (["--model", "m", "--base-url=u", "-p"], "u", "m", ["-p"]),
        (["--base-url", "u", "--model=m"], "u", "m", []),
        (["-p", "--model", "m"], None, None, ["-p", "--model", "m"]),
        (["--model", "m", "--model", "theirs"], None, "m", ["--model", "theirs"]),
        (["--models", "m"], None, None, ["--models", "m"]),
    ],
)
def test_options_right_behind_the_clients_name_are_ours(
    words: list[str], base_url: str | None, model: str | None, left: list[str]
) -> None:
    options = argparse.Namespace(base_url=None, model=None, arguments=words)
    take_own_options(options)
    assert (options.base_url, options.model, options.arguments) == (base_url, model, left)


def test_an_option_of_ours_without_a_value_is_refused() -> None:
    options = argparse.Namespace(base_url=None, model=None, arguments=["--model"])
    with pytest.raises(LaunchError, match="--model expects a value"):
        take_own_options(options)
