"""Say which coding clients there are, and how to get the ones that are not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping

from start_llm.launch.clients import CLIENTS


def is_installed(name: str, path: str | None) -> bool:
    """Return whether the client's program is found.

    Args:
        path: the folders with programs, as in PATH.
    """
    return shutil.which(CLIENTS[name].command, path=path) is not None


def menu(inherited: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each client, and what to do to start it."""
    path = inherited.get("PATH")
    for name, client in CLIENTS.items():
        is_there = is_installed(name, path)
        yield name, f"start_llm launch {name}" if is_there else f"not installed; {client.install}"


def suggested(inherited: Mapping[str, str]) -> list[str]:
    """Return the words of a command to try: start an installed client, or list all if none is installed."""
    path = inherited.get("PATH")
    found = next((name for name in CLIENTS if is_installed(name, path)), None)
    return ["launch", found] if found else ["clients"]
