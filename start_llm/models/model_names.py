"""Tells the name of a model from its folder."""

from pathlib import Path


def name_of(folder: Path) -> str:
    """Return the name of a model by its folder: of a snapshot in the hub's cache that of the repository."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return folder.name
