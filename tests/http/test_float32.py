"""A server on a CPU: weights in float32 where memory allows, and KV of theirs alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts import tiny_vision_models
from start_llm.hosting.model_memory import estimated_needs
from start_llm.models.device import this_device
from start_llm.wiring.memory_plan import float32_bytes
from tests.conftest import TinyModel
from tests.flat_settings import settings_of
from tests.http.test_embeddings import LAST, MODULES, with_pooling
from tests.http.test_images import CAT, body_of
from tests.quantised import halve, quantise
from tests.server.client import CHAT
from tests.serving import Server, serving
from tests.vision.seeing import folder_of

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(this_device().kind != "CPU", reason="weights are converted on a CPU alone"),
]

PROMPT = "The keeper counts the boats. " * 40
CONVERTED, KEPT = "weights were converted to float32", "The weights stay 4-bit"


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("quantised")
    return quantise(tiny_model("qwen3", hidden=128, layers=2), place / "qwen3", halves=True)


def asked(server: Server, **more: Any) -> tuple[str, int]:
    """The reply, and the cached tokens of the prompt."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
    answer = server.post("/v1/completions", body)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.long
def test_the_start_says_what_the_weights_are_computed_with(folder: Path):
    with serving(folder) as server:
        assert server.printed().count(CONVERTED) == 1
    with serving(folder, cpu_dequantize="off") as server:
        assert f"{KEPT}, with which a CPU" in server.printed()
        assert "CPU_DEQUANTIZE is off." in server.printed()


@pytest.mark.long
def test_where_memory_is_short_the_weights_stay_and_the_start_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with serving(folder) as server:
        needed = server.app.runtime.card.weights_bytes
    budget = 100_000_000
    monkeypatch.setattr("start_llm.models.float32._SHARE", (needed + 1) / budget)
    with serving(folder, memory=budget) as server:
        assert CONVERTED in server.printed()
    with serving(folder, memory=budget - 100_000) as server:
        assert f"{KEPT}, with which a CPU" in server.printed()
        assert "in float32 they would take" in server.printed()
        assert server.app.runtime.card.weights_bytes < needed / 4


@pytest.mark.long
def test_what_other_models_take_decides_nothing(folder: Path, tiny_model: TinyModel, tmp_path: Path):
    """Or else a model would not find its pages again when it comes back."""
    for name in ("a", "b", "c"):
        shutil.copytree(folder, tmp_path / name)
    with serving(Path("a"), model_dir=str(tmp_path), max_kv_size=1000) as server:
        for name in ("b", "c"):
            asked(server, model=name)
        host: Any = server.app._hosting.result()
        weights = [model.card.weights_bytes for model in host.listed() if model.card]
        assert len(weights) == 3 and len(set(weights)) == 1
        assert server.printed().count(CONVERTED) == 3


@pytest.mark.long
def test_a_model_is_estimated_as_it_will_be_loaded(folder: Path):
    for how in ("auto", "off"):
        chosen = settings_of(max_kv_size=1000, cpu_dequantize=how)
        with serving(folder, max_kv_size=1000, cpu_dequantize=how) as server:
            needs, estimated = server.app.runtime.needs, estimated_needs("qwen3", folder, chosen)
        assert (needs.kept_bytes, needs.window_bytes) == (estimated.kept_bytes, estimated.window_bytes)
    assert float32_bytes(settings_of(cpu_dequantize="off")) == 0


@pytest.mark.long
def test_pages_on_the_disk_are_found_by_the_same_weights_alone(folder: Path, tmp_path: Path):
    cached = list[int]()
    for how in ("auto", "off", "auto", "off"):
        state = {"ssd_folder": str(tmp_path / "ssd"), "state_root": str(tmp_path / "state"), "drain_s": 10}
        with serving(folder, cpu_dequantize=how, **state) as server:
            cached.append(asked(server)[1])
            assert server.get("/stats")["ssd"]["rejected_files"] == {}
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 200
    digests = json.loads((tmp_path / "state" / "weights.json").read_text())["models"]
    assert len({entry["digest"] for entry in digests.values()}) == 2


def test_a_converted_model_that_sees_looks_at_images(tmp_path: Path):
    quantised = tiny_vision_models.quantise(folder_of("qwen3_vl"), tmp_path / "q")
    with serving(quantised) as server:
        assert CONVERTED in server.printed()
        assert "images    up to" in server.printed()
        answer = server.post(CHAT, body_of(CHAT, CAT) | {"max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4
        assert server.get("/stats")["images"]["tower_runs"] == 1


def test_a_converted_embedding_model_makes_the_vectors_of_its_weights(tiny_model: TinyModel, tmp_path: Path):
    halved = halve(tiny_model("qwen3", hidden=128, layers=2), tmp_path / "h")
    with_pooling(halved, LAST, MODULES)
    vectors = []
    for how in ("auto", "off"):
        with serving(halved, cpu_dequantize=how) as server:
            answer = server.post("/v1/embeddings", {"input": "Wie geht's?"})
            vectors.append(answer["data"][0]["embedding"])
    assert vectors[0] != vectors[1]
    assert sum(value * other for value, other in zip(*vectors, strict=True)) > 0.999
