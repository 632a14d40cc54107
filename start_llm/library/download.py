"""Resolves a model (a folder, one of MODEL_DIR, a Hugging Face repository) to a folder on disk."""

import sys
from pathlib import Path

from start_llm.core.errors import HubError, ModelError
from start_llm.core.named_paths import expanded
from start_llm.library.folders import models_in
from start_llm.library.hub import REPOSITORY, Hub
from start_llm.library.progress import Progress, ProgressLine
from start_llm.models.weight_files import missing_files


def resolve(name: str, hub: Hub | None = None) -> Path:
    """Return the model folder for `name`; download missing files and show the progress.

    Raises:
        ModelError: `name` is neither a folder nor a repository, or the download failed.
    """
    if (folder := folder_at(name)) is not None:
        return folder.resolve()
    if not REPOSITORY.fullmatch(name):
        raise ModelError(
            f"MODEL_PATH={name!r}: no such folder, and not the name of a repository (owner/name)."
        )
    hub = hub or Hub()
    try:
        return pull(name, hub, Progress())
    except ModelError as error:
        if (whole := on_disk(name, hub)) is not None:
            return whole
        if not isinstance(error, HubError):
            raise
        raise ModelError(
            f"The model {name!r} is not on this machine, and the network did not give it: {error} "
            "Start again to resume the download, or name a folder with --model."
        ) from error


def pull(repo_id: str, hub: Hub, progress: Progress) -> Path:
    """Download what is missing of a repository, show the progress, and return its folder.

    Raises:
        ModelError: see `Hub.describe` and `Hub.fetch`.
    """
    line = ProgressLine(progress, sys.stderr)
    progress.on_piece = line.update
    try:
        return hub.fetch(hub.describe(repo_id), progress)
    finally:
        if progress.received_bytes:
            line.end()


def on_disk(repo_id: str, hub: Hub) -> Path | None:
    """Return the snapshot of a repository; None if there is none, or files are missing."""
    folder = hub.snapshot(repo_id)
    if folder is None or not (folder / "config.json").is_file() or missing_files(folder):
        return None
    return folder


def folder_at(path: str) -> Path | None:
    """Return the folder that a path names; None if there is none.

    Raises:
        ModelError: the path is too long, or leads through a folder that this user may not read.
    """
    folder = expanded(path)
    try:
        return folder if folder.is_dir() else None
    except OSError as error:
        raise ModelError(f"The folder {path!r} cannot be used: {error.strerror}.") from error


def chosen_model(folder: Path, name: str | None) -> str:
    """Return the path of the model called `name` in a folder; if there is no name, of the first model in it.

    A name that no model in the folder has is returned as it is: it may be a path, or a repository.

    Raises:
        ModelError: there is no name, and the folder holds no model.
    """
    models = models_in(folder)
    if name is not None:
        return str(models.get(name, name))
    if not models:
        raise ModelError(
            f"MODEL_DIR={str(folder)!r} holds no model: no folder NAME or OWNER/NAME in it has a config.json."
        )
    return str(models[min(models)])
