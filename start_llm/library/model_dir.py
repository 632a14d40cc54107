"""Chooses the model to begin with from a folder of models."""

from __future__ import annotations

from pathlib import Path

from start_llm.core.errors import ModelError
from start_llm.library.folders import models_in


def chosen_model(folder: Path, name: str | None) -> str:
    """Return the path of the model called `name` in a folder; if there is no name, of the first model in it.

    A name that no model in the folder has is returned as it is: it may be a path, or a repository.

    Raises:
        ModelError: there is no name, and the folder holds no model.
    """
    found = models_in(folder)
    if name is not None:
        return str(found.get(name, name))
    if not found:
        raise ModelError(
            f"MODEL_DIR={str(folder)!r} holds no model: no folder NAME or OWNER/NAME in it has a config.json."
        )
    return str(found[min(found)])
