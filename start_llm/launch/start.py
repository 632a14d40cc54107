"""Replace this process by the client's."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import NoReturn

from start_llm.core.errors import LaunchError
from start_llm.launch import files
from start_llm.launch.client import Client
from start_llm.launch.setup import Setup

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def program_of(client: Client, inherited: Mapping[str, str]) -> str:
    """Return the path of the client's program.

    Raises:
        LaunchError: the program is not on PATH.
    """
    program = shutil.which(client.command, path=inherited.get("PATH"))
    if program is None:
        raise LaunchError(f"{client.command} is not on PATH. It is installed with: {client.install}")
    return program


def become(program: str, setup: Setup, arguments: Sequence[str], inherited: Mapping[str, str]) -> NoReturn:
    """Write the client's files, then replace this process by the client through exec.

    So the client has the terminal and the signals, and its exit status is the caller's.

    Raises:
        LaunchError: the folder cannot be written, or the program cannot be executed.
    """
    files.write_all(setup.folder, setup.files)
    for number in _IGNORED_BY_PYTHON:
        # Ignored signals stay ignored across exec.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, [program, *arguments], setup.over(inherited))  # noqa: S606 - that is the point
    except OSError as error:
        raise LaunchError(f"{program} cannot be run: {error.strerror}.") from None
