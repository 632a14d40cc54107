"""POST /v1/embeddings: vectors as the network gives them, through both SDK forms, and clear refusals."""

from __future__ import annotations

import base64
import json
import math
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from openai import OpenAI

from start_llm.core.errors import ModelError
from start_llm.engine.embedding import LONGEST_TEXT, Embedder
from start_llm.models.loader import load
from start_llm.models.pooling import Pooling, pooling_in
from tests import tiny_adapters
from tests.conftest import TinyModel
from tests.server.client import CHAT, ask
from tests.serving import Server, serving

pytestmark = pytest.mark.thorough

PATH = "/v1/embeddings"
TEXTS = ["The keeper counts the boats.", "Wie geht\u2019s? \U0001f41f", "word " * 700]
LAST = {"word_embedding_dimension": 128, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
MODULES = ["Transformer", "Pooling", "Normalize"]
CAUSAL: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def with_pooling(folder: Path, pooling: dict[str, Any] | None, modules: list[str]) -> Path:
    types = [{"type": f"sentence_transformers.models.{module}"} for module in modules]
    (folder / "modules.json").write_text(json.dumps(types))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def models(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two embedding models, and one that is none."""
    root = tmp_path_factory.mktemp("models")
    for name in ("last", "mean", "talker"):
        shutil.copytree(tiny_model("qwen3", hidden=128, layers=2), root / name)
    with_pooling(root / "last", LAST, MODULES)
    with_pooling(root / "mean", MEAN, MODULES[:2])
    return root


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    with serving(models / "talker", model_dir=str(models), max_kv_size=8192) as running:
        yield running


def vectors(server: Server, model: str, texts: Any, **more: Any) -> list[list[float]]:
    reply = server.post(PATH, {"model": model, "input": texts, **more})
    assert reply["model"] == model
    assert [entry["index"] for entry in reply["data"]] == list(range(len(reply["data"])))
    return [entry["embedding"] for entry in reply["data"]]


def expected(folder: Path, text: str, mode: str) -> list[float]:
    """The whole text at once, by the network alone."""
    model = load(folder)
    states: Any = model.network.model(mx.array([model.tokenizer.encode(text, as_document=True)]))[0]
    vector = states[-1] / mx.linalg.norm(states[-1]) if mode == "last" else states.mean(axis=0)
    return vector.tolist()


def test_a_text_that_is_surely_too_long_is_not_encoded(server: Server):
    began = time.perf_counter()
    refused = ask(server.port, "POST", PATH, {"model": "last", "input": ["Fish?", "fish and sea " * 500_000]})
    assert (refused.status, refused.error["param"]) == (400, "input[1]")
    assert "has at least" in refused.error["message"]
    assert "may have at most" in refused.error["message"]
    assert time.perf_counter() - began < 3, "6.5 MB take twice as long to encode"


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["last", "mean"])
def test_vectors_are_those_of_the_network(server: Server, models: Path, mode: str):
    for text, vector in zip(TEXTS, vectors(server, mode, TEXTS), strict=True):
        assert vector == pytest.approx(expected(models / mode, text, mode), abs=1e-4)
        assert mode == "mean" or math.hypot(*vector) == pytest.approx(1, abs=1e-5)


def test_a_text_has_the_same_vector_alone_and_among_others(server: Server):
    together = vectors(server, "last", TEXTS)
    assert [vectors(server, "last", text)[0] for text in TEXTS] == together


def test_token_ids_are_taken_as_they_are(server: Server, models: Path):
    ids = load(models / "last").tokenizer.encode(TEXTS[0], as_document=True)
    assert vectors(server, "last", ids) == vectors(server, "last", [ids]) == vectors(server, "last", TEXTS[0])
    reply = server.post(PATH, {"model": "last", "input": [ids, ids]})
    assert reply["usage"] == {"prompt_tokens": 2 * len(ids), "total_tokens": 2 * len(ids)}


def test_the_official_sdk_gets_them(server: Server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="local")
    packed = client.embeddings.create(model="last", input=TEXTS[:2])
    plain = client.embeddings.create(model="last", input=TEXTS[:2], encoding_format="float")
    for entry, other in zip(packed.data, plain.data, strict=True):
        assert entry.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert len(other.embedding) == 128


def test_base64_holds_float32_numbers(server: Server):
    (encoded,) = vectors(server, "last", TEXTS[0], encoding_format="base64")
    numbers = struct.unpack("<128f", base64.b64decode(str(encoded)))
    assert list(numbers) == pytest.approx(vectors(server, "last", TEXTS[0])[0], abs=1e-7)


def test_fewer_dimensions_keep_the_direction_and_the_length(server: Server):
    (whole,), (part,) = vectors(server, "last", "a"), vectors(server, "last", "a", dimensions=16)
    length = math.hypot(*whole[:16])
    assert part == pytest.approx([number / length for number in whole[:16]], abs=1e-6)
    assert vectors(server, "last", "a", dimensions=128) == [whole]


@pytest.mark.thorough
def test_replies_go_on_and_are_the_same_beside_embeddings(server: Server):
    body = {"model": "last", "prompt": "Once", "max_tokens": 40, "temperature": 0}
    alone = server.post("/v1/completions", body)["choices"][0]["text"]
    beside: list[str] = []
    writing = threading.Thread(
        target=lambda: beside.append(server.post("/v1/completions", body)["choices"][0]["text"])
    )
    writing.start()
    before = vectors(server, "last", TEXTS)
    writing.join()
    assert beside == [alone]
    assert vectors(server, "last", TEXTS) == before


def test_vectors_are_the_base_models_whatever_replies_were_under(models: Path, tmp_path: Path):
    tiny_adapters.build(models / "last", tmp_path / "a", seed=1)
    with serving(models / "last", adapter_dir=str(tmp_path), max_kv_size=4096) as server:
        before = vectors(server, "last", TEXTS[:2])
        server.post("/v1/adapters", {"id": "a"})
        body = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "adapter": "a"}
        reply = server.post("/v1/completions", body)["choices"][0]["text"]
        assert vectors(server, "last", TEXTS[:2]) == before
        assert server.post("/v1/completions", body)["choices"][0]["text"] == reply
        refused = ask(server.port, "POST", PATH, {"input": "a", "adapter": "a"})
        assert (refused.status, refused.error["param"]) == (400, "adapter")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": "a", "model": "talker"}, "model"),
    ({"input": "a", "model": "nobody"}, "model"),
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": [["a"]]}, "input[0][0]"),
    ({"input": [1, -1]}, "input[1]"),
    ({"input": {"a": 1}}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": ["a", "word " * 9000]}, "input[1]"),
    ({"input": "a", "adapter": 7}, "adapter"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "dimensions": 129}, "dimensions"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:30])
def test_what_is_wrong_is_named(server: Server, body: dict[str, Any], param: str):
    server.post("/v1/completions", {"model": "talker", "prompt": "a", "max_tokens": 1})
    reply = ask(server.port, "POST", PATH, {"model": "last", **body})
    assert (reply.status, reply.error["param"]) == (400, param)


def test_an_embedding_model_still_talks(server: Server):
    turns = [{"role": "user", "content": "Hello"}]
    assert ask(server.port, "POST", CHAT, {"model": "last", "max_tokens": 2, "messages": turns}).status == 200


def test_a_text_of_the_longest_length_has_room_beside_everything_else(models: Path):
    with serving(models / "last") as own_server:
        ready = own_server.app.runtime.startup
        kv_bytes_of_a_token = ready.needs.window_bytes // ready.card.context_window
        assert ready.needs.computing_bytes >= LONGEST_TEXT * kv_bytes_of_a_token
        assert ready.embedder is not None


@pytest.mark.parametrize("hidden", [None, lambda ids, cache: mx.zeros((4,)), lambda ids: ids])
def test_a_network_without_hidden_states_is_refused(models: Path, hidden: Any):
    network = load(models / "last").network
    stub: Any = SimpleNamespace(layers=network.layers, model=hidden)
    with pytest.raises(ModelError, match="does not give the hidden states"):
        Embedder(stub, Pooling("lasttoken", normalizes=True), lambda _: None)


# ------------------------------------------------------------------------------------------- what folders say


@pytest.mark.parametrize(
    ("name", "pooling", "modules", "expected"),
    [
        ("last", LAST, MODULES, Pooling("lasttoken", normalizes=True)),
        ("mean", MEAN, MODULES[:2], Pooling("mean", normalizes=False)),
        ("Qwen3-Embedding-0.6B-4bit", None, [], Pooling("lasttoken", normalizes=True)),
        ("Qwen3-0.6B-4bit", None, [], None),
    ],
)
def test_a_folder_says_how_it_pools(tmp_path: Path, name: str, pooling: Any, modules: Any, expected: Any):
    (tmp_path / name).mkdir()
    assert pooling_in(with_pooling(tmp_path / name, pooling, modules), CAUSAL) == expected


@pytest.mark.parametrize(
    ("pooling", "modules", "problem"),
    [
        ({"pooling_mode_cls_token": True}, MODULES, "pooling_mode_cls_token"),
        (LAST | {"pooling_mode_mean_tokens": True}, MODULES, "pooling_mode_lasttoken, pooling_mode_mean"),
        ({}, MODULES, "asks for none"),
        (LAST, [*MODULES[:2], "Dense"], "a module Dense"),
        ([LAST], MODULES, "config.json has something else"),
    ],
)
def test_what_cannot_be_pooled_is_refused(tmp_path: Path, pooling: Any, modules: Any, problem: str):
    with pytest.raises(ModelError, match=problem):
        pooling_in(with_pooling(tmp_path, pooling, modules), CAUSAL)


GEMMA: dict[str, Any] = {"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"]}
BOTH_WAYS: list[dict[str, Any]] = [
    {"use_bidirectional_attention": True, **GEMMA},
    {"text_config": {"use_bidirectional_attention": True, **GEMMA}},
    {"is_causal": False, "architectures": ["Qwen2ForCausalLM"]},
]


@pytest.mark.parametrize("config", BOTH_WAYS)
@pytest.mark.parametrize(
    ("name", "pooling"), [("embeddinggemma-300m-4bit", None), ("other", None), ("other", MEAN)]
)
def test_tokens_that_see_later_ones_are_refused_whatever_the_folder_says(tmp_path, name, pooling, config):
    """EmbeddingGemma without its other files was taken for a causal model whose last token counts."""
    (tmp_path / name).mkdir()
    with pytest.raises(ModelError, match="attend to later ones"):
        pooling_in(with_pooling(tmp_path / name, pooling, []), config)


def test_embedding_gemma_is_known_by_its_architecture_where_a_conversion_lost_the_key(tmp_path):
    for name in ("embeddinggemma-300m-4bit", "gemma-3-270m"):
        (tmp_path / name).mkdir()
    with pytest.raises(ModelError, match=r"an embedding model of the architecture Gemma3TextModel"):
        pooling_in(tmp_path / "embeddinggemma-300m-4bit", GEMMA)
    causal: dict[str, Any] = {**GEMMA, "use_bidirectional_attention": False}
    assert pooling_in(tmp_path / "embeddinggemma-300m-4bit", causal) is not None
    assert pooling_in(tmp_path / "gemma-3-270m", GEMMA) is None


def test_images_that_are_read_both_ways_are_no_reason(tmp_path):
    (tmp_path / "gemma-4").mkdir()
    config: dict[str, Any] = {"text_config": {"use_bidirectional_attention": "vision"}}
    assert pooling_in(tmp_path / "gemma-4", config) is None


def test_a_model_that_cannot_give_its_vectors_is_refused_and_the_one_before_it_stays(
    models: Path, tiny_model: TinyModel, tmp_path: Path
):
    shutil.copytree(models / "talker", tmp_path / "talker")
    folder = tmp_path / "embeddinggemma-300m"
    shutil.copytree(tiny_model("gemma3_text"), folder)
    config = json.loads((folder / "config.json").read_text()) | {"use_bidirectional_attention": True}
    (folder / "config.json").write_text(json.dumps(config))
    with serving(tmp_path / "talker", model_dir=str(tmp_path), max_loaded=1) as server:
        runtime = server.app.runtime
        refused = ask(server.port, "POST", PATH, {"input": "a", "model": "embeddinggemma-300m"})
        assert refused.status >= 400
        assert "use_bidirectional_attention is True" in refused.error["message"]
        assert server.app.runtime is runtime
    with pytest.raises(ModelError, match="attend to later ones"), serving(folder):
        pass
