"""Which model answers, by the name in a request."""

from typing import Any

import pytest

from start_llm.protocols.base import ModelFacts
from start_llm.server.served_models import ServedModel, ServedModels

NO_SERVICE: Any = None


def model(name: str) -> ServedModel:
    return ServedModel(NO_SERVICE, ModelFacts(name, 10, lambda _: b""))


SMALL, LARGE = model("small"), model("large")


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("large", LARGE), ("small", SMALL), ("claude-haiku", SMALL), (None, SMALL), (5, SMALL), ([], SMALL)],
)
def test_an_exact_id_chooses_a_model_and_any_other_name_the_default(name: Any, chosen: ServedModel):
    assert ServedModels(SMALL, {"small": SMALL, "large": LARGE}).named(name) is chosen
