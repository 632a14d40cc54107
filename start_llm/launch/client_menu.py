"""Say which coding clients there are, which of them suit the model, and how to get the others."""

from __future__ import annotations

import shutil
from collections.abc import Container, Iterator, Mapping

from start_llm.launch.clients import CLIENTS


def is_installed(name: str, path: str | None) -> bool:
    """Return whether the client's program is found.

    Args:
        path: the folders with programs, as in PATH.
    """
    return shutil.which(CLIENTS[name].command, path=path) is not None


def menu(inherited: Mapping[str, str], unsuited: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each client with what to do to start it, and below it why it does not suit the model.

    Args:
        unsuited: the clients that do not suit the model, and why.
    """
    path = inherited.get("PATH")
    for name, client in CLIENTS.items():
        is_there = is_installed(name, path)
        yield name, f"start_llm launch {name}" if is_there else f"not installed; {client.install}"
        if name in unsuited:
            yield "", f"does not suit the model: {unsuited[name]}"


def suggested(inherited: Mapping[str, str], unsuited: Container[str]) -> list[str]:
    """Return the words of a command to try: start an installed client that suits, else list all clients.

    Args:
        unsuited: the clients that do not suit the model.
    """
    path = inherited.get("PATH")
    found = (name for name in CLIENTS if name not in unsuited and is_installed(name, path))
    name = next(found, None)
    return ["launch", name] if name else ["clients"]
