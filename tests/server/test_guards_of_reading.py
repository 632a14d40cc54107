"""Reading takes no lease and asks no hub: `tests/mutants` makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import NotFound
from start_llm.library.folders import Library
from start_llm.library.shelf import Shelf
from start_llm.models.machines import MACHINES
from start_llm.protocols.fields import Fields
from start_llm.server.adapter_pages import AdapterPages
from start_llm.server.page_request import PageRequest
from tests.server.breakable import OneModel

NOTHING: Any = None


class NotLoaded(OneModel):
    """A model that a lease would load."""

    def lease(self, name: object, patience_s: float = 0) -> Any:
        raise AssertionError(f"{name!r} would be loaded")

    def peek(self, name: object) -> Any:
        return None


def test_adapters_of_a_model_that_is_not_loaded_are_none():
    asked = PageRequest(fields=Fields({"model": "other"}))
    assert AdapterPages(NotLoaded(NOTHING)).listed(asked) == (200, {"adapters": []})


def test_a_repository_that_is_not_here_is_not_asked_for(tmp_path: Path):
    """There is no hub that could be asked."""
    library = Library([], MACHINES[0])
    shelf = Shelf(library, MACHINES[0], NOTHING, NOTHING, lambda: [("loaded", tmp_path)])
    with pytest.raises(NotFound, match="POST /fit"):
        shelf.fit(None, "lab/x")
