"""Paths as users write them."""

from pathlib import Path


def expanded(path: str) -> Path:
    """Return a path with a home folder in place of `~` or `~name`; as it is if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
