"""A model that cannot be loaded is a clear error, and leaves the others and the memory as they were."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.errors import ModelError
from tests.conftest import TinyModel
from tests.http.test_several_models import completed, completion, hosting, loaded
from tests.server.client import wait_until
from tests.serving import Server

type Change = Callable[[Path], object]

LONG = 200
LOOP = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
GROWTH = (
    "{% set ns = namespace(x='a' * 999) %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
)
MOST_OF_A_MODEL = 3_000_000
"""Bytes; each of the two has about four million."""


def config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def template(text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)

    return change


def shortened(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


BROKEN: dict[str, tuple[Change, str]] = {
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "config is nested too deeply": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        "config.json is missing, or is no JSON object",
    ),
    "no architecture": (config(model_type="wizard"), "of model_type 'wizard'"),
    "a type that is none": (config(model_type=["a"], vision_config={"a": 1}), "of model_type ['a']"),
    "an architecture that ends the process": (config(model_type="olmo"), "SystemExit"),
    "a size of zero": (config(num_attention_heads=0), "ZeroDivisionError"),
    "a number that is none": (config(rope_scaling={"rope_type": "yarn"}), "KeyError"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "it lacks model.safetensors"),
    "weights cut short": (shortened, "is not whole: 1,000 bytes are missing"),
    "wrong shapes": (config(hidden_size=64), "Expected shape"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
}
HOSTILE: dict[str, tuple[Change, str]] = {
    "a template without end": (template(LOOP), "is not rendered to its end"),
    "layers without end": (config(num_hidden_layers=10**8), "says num_hidden_layers=100,000,000"),
    "a side beyond all tensors": (config(hidden_size=10**12), "says hidden_size=1,000,000,000,000"),
    "a template that takes all memory": (
        template("{{ '%9999999999d' % 1 }}"),
        "takes more than a gigabyte of memory",
    ),
    "a template that takes memory bit by bit": (
        template(GROWTH),
        "takes more than a gigabyte of memory",
    ),
}
"""Each was seen to hang the server, with the model that it had displaced, or to fill the memory."""
REFUSED_BEFOREHAND = ("config is no JSON", "no architecture", "no weights", "weights cut short")


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """Two models, of which `llama` is to be broken."""
    for family in ("qwen3", "llama"):
        shutil.copytree(tiny_model(family, hidden=128, layers=2), tmp_path / "models" / family)
    return tmp_path / "models"


def refusal(server: Server, model: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        completed(server, model, "Fish?")
    return refused.value.code, json.load(refused.value)["error"]["message"]


def memory() -> int:
    gc.collect()
    return mx.get_active_memory()


@pytest.mark.thorough
@pytest.mark.parametrize("case", BROKEN)
def test_a_model_that_cannot_be_loaded_is_refused_while_another_one_answers(case: str, folder: Path):
    change, reason = BROKEN[case]
    change(folder / "llama")
    with hosting(folder, max_loaded=2) as server, ThreadPoolExecutor(1) as clients:
        whole = completed(server, "qwen3", "Fish?", LONG)
        before = memory()
        running = clients.submit(completed, server, "qwen3", "Fish?", LONG)
        status, message = refusal(server, "llama")
        assert status == 500
        assert message.startswith("The model 'llama' cannot be loaded. ")
        assert reason in message
        assert running.result() == whole
        assert loaded(server) == {"qwen3"}
        wait_until(lambda: memory() <= before * 1.01, within_s=10)  # behind the step after the last token


@pytest.mark.thorough
@pytest.mark.parametrize("case", REFUSED_BEFOREHAND)
def test_no_model_is_unloaded_for_one_whose_files_are_wrong(case: str, folder: Path):
    BROKEN[case][0](folder / "llama")
    with hosting(folder, max_loaded=1) as server:
        refusal(server, "llama")
        assert "Unloaded" not in server.printed()
        assert loaded(server) == {"qwen3"}


@pytest.mark.parametrize("case", REFUSED_BEFOREHAND)
def test_a_server_does_not_start_with_wrong_files_and_says_what_a_request_gets(case: str, folder: Path):
    change, reason = BROKEN[case]
    change(folder / "llama")
    with pytest.raises(ModelError, match=re.escape(reason)), hosting(folder, first="llama"):
        pass


@pytest.mark.thorough
@pytest.mark.parametrize("case", HOSTILE)
def test_no_model_is_unloaded_for_one_that_would_hang_the_server(case: str, folder: Path):
    change, reason = HOSTILE[case]
    change(folder / "llama")
    with hosting(folder, max_loaded=1) as server, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(refusal, server, "llama")
        assert completed(server, "qwen3", "Fish?"), "meanwhile the other one answers"
        status, message = asked.result(60)
        assert (status, reason in message) == (500, True), message
        assert "Unloaded" not in server.printed()
        assert loaded(server) == {"qwen3"}
        assert server.get("/health")["status"] == "ok"
        assert not trials_left(), "no process is left"


def trials_left() -> list[str]:
    output = subprocess.run(["ps", "-eo", "ppid=,args="], check=True, capture_output=True, text=True).stdout
    own = (line.split(None, 1) for line in output.splitlines())
    return [args for parent, args in own if int(parent) == os.getpid() and "template_trial" in args]


@pytest.mark.thorough
@pytest.mark.parametrize("case", HOSTILE)
def test_a_server_does_not_start_with_a_model_that_would_hang_it(case: str, folder: Path):
    change, reason = HOSTILE[case]
    change(folder / "llama")
    with pytest.raises(ModelError, match=reason), hosting(folder, first="llama"):
        pass
    assert not trials_left()


@pytest.mark.thorough
@pytest.mark.parametrize("failure", [KeyError, ModelError])
@pytest.mark.parametrize("limit", [1, 2])
def test_of_a_model_that_fails_once_it_is_in_memory_nothing_stays_there(
    limit: int, failure: type[Exception], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with hosting(folder, max_loaded=limit) as server:
        text = completed(server, "qwen3", "Fish?")
        before, sizes = memory(), list[int]()

        def broken(*_: Any, **__: Any) -> Any:
            sizes.append(mx.get_active_memory())
            raise failure("no such layer")

        with monkeypatch.context() as patched:
            patched.setattr("start_llm.hosting.model_loading.check_batching", broken)
            with pytest.raises(urllib.error.HTTPError) as refused:
                completed(server, "llama", "Fish?")
        assert "no such layer" in refused.value.read().decode()
        if limit == 2:
            assert sizes[0] > before + MOST_OF_A_MODEL, "the broken model was in memory"
        else:
            assert sizes[1] < sizes[0] + MOST_OF_A_MODEL, (
                "it had gone before the one that was there came back"
            )
        # With room for one, that one was tried as well, and could not be loaded either.
        assert loaded(server) == ({"qwen3"} if limit == 2 else set())
        assert mx.get_active_memory() <= (before * 1.01 if limit == 2 else before - MOST_OF_A_MODEL), (
            "without a search"
        )
        assert completed(server, "qwen3", "Fish?") == text


@pytest.mark.thorough
def test_requests_that_wait_for_a_model_that_fails_do_not_try_it_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    tried, go_on = list[int](), threading.Event()

    def broken(*_: Any, **__: Any) -> Any:
        tried.append(1)
        go_on.wait(30)
        raise ModelError("no such layer")

    with (
        hosting(folder, max_loaded=2) as server,
        ThreadPoolExecutor(8) as clients,
        monkeypatch.context() as patched,
    ):
        patched.setattr("start_llm.hosting.model_loading.check_batching", broken)
        host: Any = server.app._hosting.result()
        asked = [clients.submit(refusal, server, "llama") for _ in range(8)]
        wait_until(lambda: len(host._residents.changed._waiters) == 8, within_s=20)
        go_on.set()
        assert {job.result() for job in asked} == {(500, "The model 'llama' cannot be loaded. no such layer")}
        assert tried == [1]
        assert refusal(server, "llama")[0] == 500
        assert tried == [1, 1], "who comes later tries it again: its files may have been mended"


@pytest.mark.long
def test_the_reason_stands_in_the_protocol_that_was_spoken(folder: Path):
    config(num_attention_heads=0)(folder / "llama")
    with hosting(folder) as server:
        for path, asked in (
            ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "Fish?"}]}),
            ("/v1/responses", {"input": "Fish?"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Fish?"}]}),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.post(path, {"model": "llama", **asked})
            body = json.load(refused.value)
            assert "The model 'llama' cannot be loaded" in body["error"]["message"], path
            assert body.get("type", "error") == "error", path
        assert completion(server, "qwen3", "Fish?")["choices"]
