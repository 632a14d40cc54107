"""Models are judged on disk and on the hub, of which config and index alone are read."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from start_llm.core.errors import BadGateway, InvalidRequest, NotFound
from start_llm.core.model_listing import Machine
from start_llm.library.download import pull
from start_llm.library.downloads import Downloads
from start_llm.library.folders import Library, Place, shape_in
from start_llm.library.hub import Hub
from start_llm.library.progress import Progress
from start_llm.library.shelf import Shelf
from start_llm.models.machines import GIB, MACHINES
from tests.models.fake_hub import WEIGHTS, FakeHub, hub_of
from tests.models.test_library import copied

MACHINE = Machine(
    *("Toy 16 GB", "Toy", 16 * GIB, 10 * GIB), bandwidth_gbs=100, tflops=10, fuses_attention=True
)
REPO = "lab/tiny"
INDEX = "model.safetensors.index.json"
MANY = 10**7


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("qwen3_moe")


@pytest.fixture
def server(model) -> Iterator[FakeHub]:
    with hub_of({path.name: path.read_bytes() for path in model.iterdir()}) as running:
        yield running


@pytest.fixture
def shelf(server, model, tmp_path) -> Shelf:
    copied(model, tmp_path / "models" / "other", max_position_embeddings=1000)
    hub = Hub(tmp_path / "hub", endpoint=server.url)
    library = Library([Place("models", tmp_path / "models"), Place("hub", hub.cache)], MACHINE)
    return Shelf(library, MACHINE, hub, Downloads(hub), lambda: [("loaded", model)])


def test_the_loaded_model_is_judged_unless_another_is_named(shelf, model):
    loaded = shelf.fit(None, None)
    assert loaded.model == "loaded"
    assert loaded == shelf.fit("loaded", None)
    assert loaded.report.weights_bytes == shape_in("x", model).weights.total
    other = shelf.fit("other", None)
    assert (other.model, other.report.context_tokens) == ("other", 1000)
    assert other.sku_context == 1000


def test_while_none_is_loaded_others_are_judged_and_the_loaded_one_is_not_there(shelf):
    idle = replace(shelf, loaded=list)
    assert idle.fit("other", None) == shelf.fit("other", None)
    with pytest.raises(NotFound, match="No model is loaded now") as refused:
        idle.fit(None, None)
    assert refused.value.param == "model"


def test_the_table_of_machines_has_every_machine(shelf):
    fit = shelf.fit(None, None)
    assert [machine.name for machine, _ in fit.skus] == [row.name for row in MACHINES]
    assert all(report.typical_context_tokens == 32_768 for _, report in fit.skus)
    assert fit.machine.name == "Toy 16 GB"


def test_a_model_on_the_hub_is_judged_by_config_and_index_alone(shelf, server, model):
    fit = shelf.fit_on_hub(REPO)
    here = shelf.fit(None, None)
    assert fit.model == REPO
    assert fit.report == here.report
    assert server.requests == ["GET config.json", f"GET {INDEX}"]
    assert not shelf.hub.cache.exists()


def test_a_repository_is_judged_by_its_files_here_without_the_hub(shelf, server):
    with pytest.raises(NotFound, match="POST /fit asks the hub") as refused:
        shelf.fit(None, REPO)
    assert refused.value.param == "repo"
    pull(REPO, shelf.hub, Progress())
    server.requests.clear()
    fit = shelf.fit(None, REPO)
    assert (fit.model, fit.report) == (REPO, shelf.fit(None, None).report)
    assert not server.requests


def test_without_an_index_the_sizes_of_the_files_count(shelf, server):
    del server.files[INDEX]
    server.files["sub/other.safetensors"] = b"x" * 10**6
    report = shelf.fit_on_hub(REPO).report
    assert report.weights_bytes == len(server.files[WEIGHTS])


@pytest.mark.parametrize(
    ("numbers", "metadata", "quantised", "half"),
    [
        ({"BF16": 100}, {}, False, True),
        ({"F32": 100}, {"total_size": 2 * MANY, "total_parameters": MANY}, False, False),
        ({}, {"total_size": 2 * MANY, "total_parameters": MANY}, False, True),
        ({}, {"total_size": 4 * MANY, "total_parameters": MANY}, False, False),
        ({}, {"total_size": MANY // 2, "total_parameters": MANY}, True, False),
        ({"U32": 100, "BF16": 10}, {"total_size": MANY // 2, "total_parameters": MANY}, True, True),
        ({}, {"total_size": 2 * MANY, "total_parameters": 0}, False, False),
        ({}, {"total_size": 2 * MANY, "total_parameters": "100"}, False, False),
    ],
)
@pytest.mark.sample(4)
def test_the_type_of_numbers_on_the_hub_is_what_it_counts_or_what_the_index_gives(
    shelf, server, numbers, metadata, quantised, half
):
    """The config says float32, which a converter may have left there; without a better source it counts."""
    single = shelf.fit(None, None).report.kv_bytes
    server.numbers = numbers
    server.files[INDEX] = json.dumps({"metadata": metadata}).encode()
    if quantised:
        config = json.loads(server.files["config.json"]) | {"quantization": {"bits": 4, "group_size": 64}}
        server.files["config.json"] = json.dumps(config).encode()
    assert shelf.fit_on_hub(REPO).report.kv_bytes == (single // 2 if half else single)


@pytest.mark.sample(2)
@pytest.mark.parametrize("index", [{}, {"metadata": None}, {"metadata": {"total_size": "5"}}])
def test_an_index_without_a_sum_is_passed_over(shelf, server, index):
    server.files[INDEX] = json.dumps(index).encode()
    assert shelf.fit_on_hub(REPO).report.weights_bytes == len(server.files[WEIGHTS])


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config.json": b"{"}, "config.json is not JSON"),
        ({"config.json": b"[]"}, "config.json is no JSON object"),
        ({"config.json": None}, "no config.json"),
        ({"config.json": b'{"model_type": "rwkv7"}'}, "rwkv7"),
        ({INDEX: None, WEIGHTS: None}, "no weights"),
    ],
)
def test_a_repository_that_cannot_be_judged_is_listed_with_the_reason(shelf, server, change, words):
    for name, data in change.items():
        server.files.pop(name)
        if data is not None:
            server.files[name] = data
    with pytest.raises(NotFound, match=words) as refused:
        shelf.fit_on_hub(REPO)
    assert refused.value.param == "repo"


def test_errors_name_the_field(shelf, server):
    for judge, named, kind, field in (
        (shelf.fit, ("other", REPO), InvalidRequest, "repo"),
        (shelf.fit, (None, "no name"), InvalidRequest, "repo"),
        (shelf.fit, ("nothing", None), NotFound, "model"),
        (shelf.fit_on_hub, ("no name",), InvalidRequest, "repo"),
        (shelf.fit_on_hub, ("lab/nothing",), NotFound, "repo"),
    ):
        with pytest.raises(kind) as refused:
            judge(*named)
        assert refused.value.param == field
    server.shutdown()
    server.server_close()
    with pytest.raises(BadGateway, match="The hub cannot be asked"):
        shelf.fit_on_hub(REPO)


def test_a_model_on_disk_that_is_not_whole_is_reported(shelf, tmp_path):
    (tmp_path / "models" / "other" / WEIGHTS).unlink()
    with pytest.raises(InvalidRequest, match=r"'other' cannot be judged.*lacks model\.safetensors"):
        shelf.fit("other", None)
