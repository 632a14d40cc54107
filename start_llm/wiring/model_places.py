"""Finds the models that the settings name, and says which one is served."""

import platform
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from start_llm.config.paths import DEMO_MODEL, from_root
from start_llm.config.settings import Settings
from start_llm.core.errors import SettingsError
from start_llm.library.advice import advice, is_first_start
from start_llm.library.download import chosen_model, resolve
from start_llm.library.downloads import Downloads
from start_llm.library.folders import Library, Place, models_in, places
from start_llm.library.hub import Hub
from start_llm.library.shelf import Shelf
from start_llm.library.well_known import DEFAULT_APPLE_MODEL
from start_llm.models.model_names import name_of
from start_llm.wiring.memory_plan import own_machine


def model_places(settings: Settings, hub: Hub) -> tuple[Place, ...]:
    """Return the folders in which models are.

    Raises:
        SettingsError: MODEL_DIR is no folder.
    """
    return places(DEMO_MODEL.parent, _model_dir(settings), hub)


def _model_dir(settings: Settings) -> Path | None:
    return _folder("MODEL_DIR", settings.model.dir)


def adapter_dir(settings: Settings) -> Path | None:
    """Return the folder below which adapters are.

    Raises:
        SettingsError: ADAPTER_DIR is no folder.
    """
    return _folder("ADAPTER_DIR", settings.model.adapter_dir)


def _folder(variable: str, path: str | None) -> Path | None:
    folder = from_root(path) if path else None
    if folder and not folder.is_dir():
        raise SettingsError(f"{variable}={path!r}: no such folder.")
    return folder


def make_shelf(settings: Settings, loaded: Callable[[], Sequence[tuple[str, Path]]]) -> Shelf:
    """Return the library for the server's endpoints.

    Args:
        loaded: returns names and folders of the loaded models, first of the one that answers by default.
    """
    hub, machine = Hub(), own_machine(settings)
    library = Library(
        model_places(settings, hub), machine, serving=lambda: [folder for _, folder in loaded()]
    )
    return Shelf(library, machine, hub, Downloads(hub), loaded)


def model_name(settings: Settings) -> str:
    """Return the model to serve: the user's choice, else the default of this platform.

    Raises:
        ModelError: MODEL_DIR does not say which.
        SettingsError: MODEL_DIR is no folder.
    """
    if folder := _model_dir(settings):
        return chosen_model(folder, settings.model.path)
    if settings.model.path:
        return settings.model.path
    return DEFAULT_APPLE_MODEL if is_apple_silicon() else str(DEMO_MODEL)


def model_folders(settings: Settings) -> dict[str, Path]:
    """Return the folders of the models that requests can name, by id: those of MODEL_DIR."""
    folder = _model_dir(settings)
    return models_in(folder) if folder else {}


def served_models(settings: Settings, first: Path) -> tuple[str, dict[str, Path]]:
    """Return the id of the model to load first, and the folders of all models by id: its own, those of
    MODEL_DIR and those of MORE_MODELS. What is missing is downloaded.

    Args:
        first: the folder of the model to load first.

    Raises:
        ModelError: one is neither a folder nor a repository, or its download failed.
        SettingsError: two models would have the same id.
    """
    folders = model_folders(settings)
    own = [model_id for model_id, folder in folders.items() if folder.resolve() == first.resolve()]
    name = name_of(first) if name_of(first) in own or not own else own[0]
    more = [("MORE_MODELS", name_of(folder), folder) for folder in map(resolve, settings.model.more)]
    for variable, model_id, folder in (("MODEL_PATH", name, first), *more):
        if folders.get(model_id, folder).resolve() != folder.resolve():
            raise SettingsError(
                f"{variable}: two models are called {model_id!r}, and requests could not tell which they "
                "name. Rename the folder of one."
            )
        folders[model_id] = folder
    return name, folders


def model_aliases(settings: Settings, known: Collection[str]) -> dict[str, str]:
    """Return other names of models, to their ids.

    Args:
        known: the ids of all models.

    Raises:
        SettingsError: the model of an alias is unknown, or a pinned one, or an alias is the id of a model.
    """
    aliases = {
        alias.strip(): name.strip() for alias, name in (pair.split("=") for pair in settings.model.aliases)
    }
    for variable, names in (("MODEL_PINS", settings.model.pinned), ("MODEL_ALIASES", aliases.values())):
        for name in names:
            if name not in known:
                raise SettingsError(f"{variable}: there is no model {name!r}; there is {', '.join(known)}.")
    for alias in aliases:
        if alias in known:
            raise SettingsError(f"MODEL_ALIASES: {alias!r} is a model itself.")
    return aliases


def first_start_advice(settings: Settings) -> Sequence[str]:
    """Before the default model of a Mac is downloaded: return lines on what it needs, and what else fits."""
    hub, chosen = Hub(), settings.model.path or settings.model.dir
    return advice(own_machine(settings), hub) if is_apple_silicon() and is_first_start(chosen, hub) else ()


def is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"
