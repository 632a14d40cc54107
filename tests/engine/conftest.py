"""One tiny model for the tests of the engine, loaded once."""

import pytest

from start_llm.engine.resources import EngineResources
from start_llm.models.loader import LoadedModel, load
from tests.conftest import TinyModel
from tests.engine.harness import uncached_resources


@pytest.fixture(scope="session")
def model(tiny_model: TinyModel) -> LoadedModel:
    return load(tiny_model("qwen3", hidden=128, layers=2))


@pytest.fixture(scope="session")
def resources(model: LoadedModel) -> EngineResources:
    """The resources of an engine loop: greedy text of this model never ends by itself."""
    return uncached_resources(
        network=model.network,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.tokenizer.eos_token_ids,
        max_sequences=4,
        batches=True,
        batches_prefill=True,
    )
