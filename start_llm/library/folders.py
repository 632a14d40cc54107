"""Finds the models on disk: configs, sizes and headers are read, and no weights.

Places: the folder of this repository, MODEL_DIR, the hub's cache (HF_HUB_CACHE, HF_HOME), and LM Studio's
folders. A folder with a config.json is a model; GGUF files have none.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from start_llm.core.errors import ModelError
from start_llm.core.model_listing import LibraryEntry, Machine
from start_llm.library.fit import ModelShape, report, shape_of
from start_llm.library.hub import Hub, newest_commit
from start_llm.models.architecture import is_supported
from start_llm.models.pooling import pooling_in
from start_llm.models.trial import check_counts
from start_llm.models.vision_families import VISION_FAMILIES
from start_llm.models.weight_files import check_whole, missing_files, quantization, weight_files, weights_in

_KEPT_S = 30.0
_LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in which models are.

    Attributes:
        name: `models`, `model-dir`, `hub` or `lm-studio`.
        is_ours: models in it may be removed; those of the repository are part of it.
    """

    name: str
    folder: Path
    is_ours: bool = True

    @property
    def is_hub(self) -> bool:
        return self.name == "hub"


def places(own: Path, model_dir: Path | None, hub: Hub) -> tuple[Place, ...]:
    """Return the places of this user, whether they are there or not.

    Args:
        own: the folder of the repository's models.
        model_dir: MODEL_DIR.
    """
    chosen = (Place("model-dir", model_dir),) if model_dir else ()
    studio = (Place("lm-studio", Path(path).expanduser()) for path in _LM_STUDIO)
    return (Place("models", own, is_ours=False), *chosen, Place("hub", hub.cache), *studio)


@dataclass(frozen=True, slots=True)
class _LocalModel:
    """A model in a place. `folder` is what a removal would remove."""

    repo_id: str
    place: Place
    path: Path
    folder: Path


class Library:
    """The models on disk. Thread-safe; the list is at most 30 seconds old.

    Args:
        machine: for the reports.
        serving: returns the folders of the loaded models.
    """

    def __init__(
        self,
        where: Sequence[Place],
        machine: Machine,
        serving: Callable[[], Collection[Path]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = where
        self._machine = machine
        self._serving = serving
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = -_KEPT_S
        self._entries: list[LibraryEntry] = []

    def entries(self) -> Sequence[LibraryEntry]:
        """Return every model, place by place."""
        with self._lock:
            if self._clock() - self._read_at >= _KEPT_S:
                loaded = {path.resolve() for path in self._serving()}
                self._entries = [self._entry(model, loaded) for model in self._models()]
                self._read_at = self._clock()
            return self._entries

    def folder(self, name: str) -> Path | None:
        """Return the folder of a model by its name, or by the end of it; None if there is no such model."""
        models = [
            model for model in self._models() if name in (model.repo_id, model.repo_id.rpartition("/")[2])
        ]
        return models[0].path if models else None

    def check_removable(self, repo_id: str) -> None:
        """Raise what `remove` would raise of a name.

        Raises:
            ModelError: there is no such model, or none that is the user's.
        """
        self._removable(repo_id)

    def remove(self, repo_id: str) -> list[Path]:
        """Remove a model from every place that is the user's, and return what was removed.

        Only folders inside of the places are removed. Of a link the link goes, and not what it leads to.

        Raises:
            ModelError: see `check_removable`; or it cannot be removed.
        """
        models = self._removable(repo_id)
        for model in models:
            _remove(model)
        self._read_at = -_KEPT_S
        return [model.folder for model in models]

    def _removable(self, repo_id: str) -> Sequence[_LocalModel]:
        models = [model for model in self._models() if model.repo_id == repo_id]
        if not models:
            raise ModelError(f"There is no model {repo_id!r} on this machine. start_llm models lists them.")
        ours = [model for model in models if model.place.is_ours]
        if not ours:
            raise ModelError(f"{repo_id!r} is part of this repository ({models[0].path}), and stays.")
        return ours

    def _models(self) -> Iterator[_LocalModel]:
        for place in self._places:
            yield from _in_hub(place) if place.is_hub else _in_folder(place)

    def _entry(self, model: _LocalModel, loaded: Collection[Path]) -> LibraryEntry:
        config = read_config(model.path)
        shape = _shape(model.repo_id, model.path, config)
        kind = config.get("model_type")
        return LibraryEntry(
            repo_id=model.repo_id,
            place=model.place.name,
            path=str(model.path),
            model_type=kind if isinstance(kind, str) else None,
            size_bytes=_size(model.path),
            quant_bits=_quant_bits(config),
            vision=bool(config.get("vision_config")),
            supported=is_supported(config),
            complete=bool(config) and not missing_files(model.path),
            serving=model.path.resolve() in loaded,
            report=report(shape, self._machine) if shape else None,
        )


def models_in(folder: Path) -> dict[str, Path]:
    """Return the models in a folder by name: NAME or OWNER/NAME."""
    return {model.repo_id: model.path for model in _in_folder(Place("model-dir", folder))}


def shape_in(name: str, folder: Path) -> ModelShape:
    """Return the figures of a model on disk.

    Raises:
        ModelError: files are missing or cannot be read, or its arithmetic is not known.
    """
    config = read_config(folder)
    if not config:
        raise ModelError(f"{folder / 'config.json'} is missing, or is no JSON object.")
    return shape_of(name, config, weights_in(folder, config))


def check_loadable(folder: Path) -> None:
    """Look for what is wrong with a model before it is loaded, and others unloaded for it. Reads no weights.

    Raises:
        ModelError: it cannot be loaded. What this does not find, loading finds.
    """
    config = read_config(folder)
    if not config:
        raise ModelError(f"{folder / 'config.json'} is missing, or is no JSON object.")
    if not is_supported(config):
        kind = f"{folder}, of model_type {config.get('model_type')!r}"
        raise ModelError(f"mlx_lm alone cannot run {kind}.{_vision_advice(config)}")
    if missing := missing_files(folder):
        raise ModelError(f"{folder} is not complete: it lacks {', '.join(missing[:3])}.")
    for path in weight_files(folder):
        check_whole(path)
    check_counts(folder, config)
    pooling_in(folder, config)


def _vision_advice(config: Mapping[str, Any]) -> str:
    """Return what to know about a vision model for which mlx_lm has no network."""
    if not config.get("vision_config"):
        return ""
    served = ", ".join(sorted(VISION_FAMILIES))
    return f" It is a vision model, and mlx_lm has no network for its text. Images are served for {served}."


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json; {} if it cannot be read."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _shape(name: str, folder: Path, config: Mapping[str, Any]) -> ModelShape | None:
    try:
        return shape_of(name, config, weights_in(folder, config)) if config else None
    except ModelError:
        # The entry then has no report; `fit` tells why.
        return None


def _quant_bits(config: Mapping[str, Any]) -> int | None:
    bits = quantization(config).get("bits")
    return bits if isinstance(bits, int) else None


def _in_folder(place: Place) -> Iterator[_LocalModel]:
    """Yield models in `name` and `owner/name`."""
    for path in _folders(place.folder):
        if (path / "config.json").is_file():
            yield _LocalModel(path.name, place, path, path)
            continue
        for inner in _folders(path):
            if (inner / "config.json").is_file():
                yield _LocalModel(f"{path.name}/{inner.name}", place, inner, inner)


def _in_hub(place: Place) -> Iterator[_LocalModel]:
    """Yield the newest snapshot of each repository in the hub's cache that is a model of this kind."""
    for folder in _folders(place.folder):
        if not folder.name.startswith(_PREFIX):
            continue
        repo_id = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
        path = _snapshot(folder)
        if (path / "config.json").exists() or any((folder / "blobs").glob("*.incomplete")):
            yield _LocalModel(repo_id, place, path, folder)


def _snapshot(folder: Path) -> Path:
    """Return the snapshot that refs/main names, else the newest; the folder itself if there is none."""
    named = folder / "snapshots" / (newest_commit(folder) or "none")
    if named.is_dir():
        return named
    return max(_folders(folder / "snapshots"), key=lambda path: path.stat().st_mtime, default=folder)


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder by name, without hidden ones; none if it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _size(folder: Path) -> int:
    """Return the bytes of a model's files; those of a partial download count with it."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(at) / name).stat().st_size
            except OSError:
                # A link to a file that is gone.
                continue
    return total


def _remove(model: _LocalModel) -> None:
    """Remove a model's folder, which has to lie inside of its place.

    Raises:
        ModelError: it does not, or the system refuses.
    """
    place, folder = model.place.folder.resolve(), model.folder
    if not folder.parent.resolve().is_relative_to(place):
        raise ModelError(f"{folder} leads out of {place}, and stays. Remove it by hand if you mean to.")
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be removed: {error.strerror}.") from error
