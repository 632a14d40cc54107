"""Reading takes no lease and asks no hub: `tests/mutants` makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import InvalidRequest, NotFound
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


@pytest.mark.parametrize(
    ("name", "problem"), [(None, "No model is loaded now"), ("other", "no model 'other'")]
)
def test_while_no_model_is_loaded_the_library_is_asked_all_the_same(name: str | None, problem: str):
    shelf = Shelf(Library([], MACHINES[0]), MACHINES[0], NOTHING, NOTHING, list)
    with pytest.raises(NotFound, match=problem) as refused:
        shelf.fit(name, None)
    assert refused.value.param == "model"


@pytest.mark.parametrize("path", ["a" * 300, "circle", "a\0"])
def test_a_path_that_the_system_refuses_is_no_folder_below_the_one_of_adapters(tmp_path: Path, path: str):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    asked = PageRequest(fields=Fields({"id": "x", "path": path}))
    with pytest.raises(InvalidRequest, match="is no folder below ADAPTER_DIR") as refused:
        AdapterPages(OneModel(NOTHING), tmp_path).mount(asked)
    assert refused.value.param == "path"


def test_an_adapter_whose_file_is_gone_from_the_cache_is_refused(tmp_path: Path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "adapters.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(InvalidRequest, match="The adapter cannot be read: No such file") as refused:
        AdapterPages(OneModel(NOTHING), tmp_path).mount(PageRequest(fields=Fields({"id": "x"})))
    assert refused.value.param == "path"


def test_a_repository_that_is_not_here_is_not_asked_for(tmp_path: Path):
    """There is no hub that could be asked."""
    library = Library([], MACHINES[0])
    shelf = Shelf(library, MACHINES[0], NOTHING, NOTHING, lambda: [("loaded", tmp_path)])
    with pytest.raises(NotFound, match="POST /fit"):
        shelf.fit(None, "lab/x")
