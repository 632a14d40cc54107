"""What keeps adapters apart, each part of it on its own: `tests/mutants` takes one away at a time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scripts import tiny_models
from start_llm.core.adapters import BASE_MODEL
from start_llm.core.errors import InvalidRequest
from start_llm.models.adapter_loader import Adapters
from start_llm.models.loader import load
from tests import tiny_adapters
from tests.server.client import ask, wait_until
from tests.serving import Server, serving

PROMPT = list(range(3, 400))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3", tmp_path_factory.mktemp("qwen3"), hidden=128, layers=2)


@pytest.fixture(scope="module")
def root(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters, `a` and `b`, and `broken`, which fails when it has half its layers."""
    place = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "broken")):
        tiny_adapters.build(model, place / name, seed)
    config = place / "broken" / "adapter_config.json"
    settings = json.loads(config.read_text())
    settings["lora_parameters"]["rank"] = 3
    config.write_text(json.dumps(settings))
    return place


def computed(network: Any) -> list[float]:
    return network(mx.array([PROMPT[:8]]))[0, -1].tolist()


def test_the_base_is_the_base_again_after_an_adapter_and_after_one_that_fails(model: Path, root: Path):
    network = load(model).network
    base, adapters = computed(network), Adapters(network)
    adapters.load("a", root / "a")
    assert computed(network) == base, "an adapter that is loaded is not mounted"
    adapters.mount(adapters.stack("a"))
    assert computed(network) != base
    with pytest.raises(InvalidRequest):
        adapters.load("broken", root / "broken")
    assert computed(network) == base
    adapters.mount(adapters.stack("a"))
    adapters.mount(BASE_MODEL)
    assert computed(network) == base


def test_the_same_is_computed_each_time(model: Path, root: Path):
    """The adapters were trained with dropout, which leaves out parts of a layer by chance."""
    network = load(model).network
    adapters = Adapters(network)
    adapters.load("a", root / "a")
    adapters.mount(adapters.stack("a"))
    assert computed(network) == computed(network)


def answer_under(server: Server, adapter: str, length: int = 40) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": length, "temperature": 0, "adapter": adapter}
    return server.post("/v1/completions", body | {"return_token_ids": True})


def ids(reply: dict[str, Any]) -> list[int]:
    return reply["choices"][0]["token_ids"]


@pytest.mark.thorough
def test_who_runs_beside_others_says_what_it_says_alone(model: Path, root: Path):
    names = ("none", "a", "b")
    with serving(model, adapter_dir=str(root), cache_is_on=False, batch=6) as server:
        for name in ("a", "b"):
            server.post("/v1/adapters", {"id": name})
        alone = {name: ids(answer_under(server, name)) for name in names}
        assert len({tuple(reply) for reply in alone.values()}) == 3
        with ThreadPoolExecutor(6) as clients:
            together = list(clients.map(lambda name: (name, ids(answer_under(server, name))), names * 2))
    assert [reply for _, reply in together] == [alone[name] for name, _ in together]


@pytest.mark.thorough
def test_what_was_computed_under_one_is_not_used_under_another(model: Path, root: Path):
    with serving(model, adapter_dir=str(root)) as server:
        for name in ("a", "b"):
            server.post("/v1/adapters", {"id": name})
        for name in ("none", "a", "b"):
            assert answer_under(server, name)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer_under(server, "a")["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1


@pytest.mark.thorough
def test_a_key_sees_its_own_requests_under_adapters(model: Path, root: Path):
    asked = {"prompt": PROMPT, "max_tokens": 1, "adapter": "a", "session_id": "of the sea"}
    mine, another = ({"Authorization": f"Bearer {key}"} for key in ("mine", "another"))
    with serving(model, adapter_dir=str(root)) as server:
        assert ask(server.port, "POST", "/v1/adapters", {"id": "a"}).status == 200
        assert ask(server.port, "POST", "/v1/completions", asked, mine).status == 200

        def recent(key: dict[str, str]) -> list[Any]:
            return ask(server.port, "GET", "/activity", headers=key).json["recent"]

        wait_until(lambda: bool(recent(mine)), within_s=5)  # it is noted once the reply is sent
        shown = [recent(key)[0] for key in (mine, another)]
    assert shown[0]["name"] == "of the sea" != shown[1]["name"]
