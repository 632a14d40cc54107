"""The library as the server's endpoints use it: models on disk, and their fit."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from start_llm.core.errors import BadGateway, HubError, InvalidRequest, ModelError, NotFound
from start_llm.core.model_listing import Fit, LibraryEntry, Machine
from start_llm.library.downloads import Downloads
from start_llm.library.fit import ModelShape, fit, shape_of
from start_llm.library.folders import Library, shape_in
from start_llm.library.hub import REPOSITORY, Hub
from start_llm.library.hub_fetch import HubRepository
from start_llm.models.weight_files import is_quantised, number_bytes_of, weights_of_size

_INDEX = "model.safetensors.index.json"
_BETWEEN_HALF_AND_SINGLE = 3
"""Bytes of a weight."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """Implements `core.model_listing.ModelLibrary`, beside the queue of downloads.

    Attributes:
        loaded: returns names and folders of the loaded models, first of the one that answers by default.
    """

    library: Library
    machine: Machine
    hub: Hub
    queue: Downloads
    loaded: Callable[[], Sequence[tuple[str, Path]]]

    def entries(self) -> Sequence[LibraryEntry]:
        return self.library.entries()

    def fit(self, model: str | None, repo: str | None) -> Fit:
        """Judge a model by the files of this machine: the loaded one, or one that is named.

        Raises:
            InvalidRequest: both are named, or the model's arithmetic is not known.
            NotFound: there is no such model here, or none is named and none is loaded.
        """
        if model and repo:
            raise InvalidRequest("'model' and 'repo' exclude each other.", param="repo")
        return fit(self._shape_of_repository(repo) if repo else self._shape_on_disk(model), self.machine)

    def fit_on_hub(self, repo: str) -> Fit:
        """Judge a repository by its config and its index, which the hub is asked for.

        Raises:
            InvalidRequest: it is no name of a repository, or its arithmetic is not known.
            NotFound: there is no such repository, or no model in it.
            BadGateway: the hub cannot be reached.
        """
        return fit(self._shape_on_hub(repo), self.machine)

    def _shape_on_disk(self, model: str | None) -> ModelShape:
        loaded = dict(self.loaded())
        name = model or next(iter(loaded), None)
        if name is None:
            raise NotFound("No model is loaded now; name one of the library (GET /library).", param="model")
        folder = loaded.get(name) or self.library.folder(name)
        if folder is None:
            raise NotFound(f"There is no model {name!r} in the library (GET /library).", param="model")
        return _judged(name, folder, "model")

    def _shape_of_repository(self, repo_id: str) -> ModelShape:
        _demand_repository(repo_id)
        folder = self.library.folder(repo_id)
        if folder is None:
            raise NotFound(
                f"{repo_id!r} is not on this machine. POST /fit asks the hub about it.", param="repo"
            )
        return _judged(repo_id, folder, "repo")

    def _shape_on_hub(self, repo_id: str) -> ModelShape:
        _demand_repository(repo_id)
        try:
            return shape_on_hub(repo_id, self.hub)
        except HubError as error:
            raise BadGateway(f"The hub cannot be asked about {repo_id!r}: {error}", param="repo") from error
        except ModelError as error:
            raise NotFound(f"{repo_id!r} cannot be judged. {error}", param="repo") from error


def _demand_repository(repo_id: str) -> None:
    if not REPOSITORY.fullmatch(repo_id):
        raise InvalidRequest("'repo' must be the name of a repository (owner/name).", param="repo")


def _judged(name: str, folder: Path, param: str) -> ModelShape:
    try:
        return shape_in(name, folder)
    except ModelError as error:
        raise InvalidRequest(f"{name!r} cannot be judged. {error}", param=param) from error


def shape_on_hub(repo_id: str, hub: Hub) -> ModelShape:
    """Return the figures of a model on the hub, from its config and its index.

    Raises:
        HubError: the hub cannot be reached.
        ModelError: there is no such repository, or no model in it that can be judged.
    """
    repository = hub.describe(repo_id)
    config = _json(hub, repository, "config.json")
    if config is None:
        raise ModelError("It has no config.json.")
    metadata = _index_metadata(hub, repository)
    total = _weight_bytes(repository, metadata)
    return shape_of(
        repo_id, config, weights_of_size(total, config, _number_bytes(repository, config, metadata))
    )


def _index_metadata(hub: Hub, repository: HubRepository) -> dict[str, Any]:
    metadata = (_json(hub, repository, _INDEX) or {}).get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _number_bytes(
    repository: HubRepository, config: Mapping[str, Any], metadata: Mapping[str, Any]
) -> int | None:
    """Return the bytes of a number by what the hub counts, else by size and number of weights in the index.

    The index of a quantised model does not tell: its bits of a weight depend on which layers are quantised.
    """
    size, count = metadata.get("total_size"), metadata.get("total_parameters")
    if counted := number_bytes_of(repository.numbers):
        return counted
    if is_quantised(config) or not (isinstance(size, int) and isinstance(count, int) and count > 0):
        return None
    return 4 if size / count > _BETWEEN_HALF_AND_SINGLE else 2


def _weight_bytes(repository: HubRepository, metadata: Mapping[str, Any]) -> int:
    """Return the sum that the index gives, else the sizes of the weight files."""
    total = metadata.get("total_size")
    if isinstance(total, int) and total > 0:
        return total
    sizes = [
        file.size for file in repository.files if file.path.endswith(".safetensors") and "/" not in file.path
    ]
    if not sizes:
        raise ModelError("It has no weights as safetensors.")
    return sum(sizes)


def _json(hub: Hub, repository: HubRepository, path: str) -> dict[str, Any] | None:
    raw = hub.read(repository, path)
    if raw is None:
        return None
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"Its {path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"Its {path} is no JSON object.")
    return content
