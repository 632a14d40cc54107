"""Compute a client's setup (variables and files), print it as a script, or become the client with it."""

import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from start_llm.core.errors import LaunchError
from start_llm.launch import files
from start_llm.launch.client import Client
from start_llm.launch.files import Content, deep_merge, text_of
from start_llm.launch.http_requests import LOOPBACK
from start_llm.launch.own_settings import OwnSettings
from start_llm.launch.server_info import ServerInfo

_END = "END_OF_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A client's complete setup for one server: its private folder, its variables and its files.

    Attributes:
        notes: sentences for the user, about own settings that do not hold for this client.
    """

    client: Client
    served: ServerInfo
    folder: Path
    environment: Mapping[str, str]
    files: Mapping[Path, Content]
    notes: Sequence[str] = ()

    def over(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of the client's process: `inherited` without the foreign ones, then ours."""
        foreign = self.client.foreign
        return {
            **{name: value for name, value in inherited.items() if name not in foreign},
            **self.environment,
        }


def make_setup(client: Client, served: ServerInfo, folder: Path, own: OwnSettings) -> Setup:
    """Compute a client's setup for a server.

    Args:
        folder: the client's private folder, as an absolute path.
        own: the user's settings; the setup is at least as strict, and extends `NO_PROXY` of their variables
            for a local server.

    Raises:
        LaunchError: settings of the user cannot be read.
    """
    permissions = client.permissions(own, folder)
    environment = {**client.environment(served, folder), **_past_proxies(served, own.variables)}
    for name, content in permissions.inline.items():
        environment[name] = json.dumps(deep_merge(json.loads(environment[name]), content), ensure_ascii=False)
    contents = deep_merge(client.files(served, folder), permissions.files)
    return Setup(
        client=client,
        served=served,
        folder=folder,
        environment=environment,
        files={folder / name: content for name, content in contents.items()},
        notes=permissions.notes,
    )


def _past_proxies(served: ServerInfo, inherited: Mapping[str, str]) -> Mapping[str, str]:
    """Exclude loopback from the environment's proxy, which would be asked for 127.0.0.1 otherwise."""
    if not served.is_local:
        return {}
    theirs = inherited.get("no_proxy") or inherited.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, (host.strip() for host in theirs.split(","))), *LOOPBACK])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))


def as_script(name: str, setup: Setup) -> str:
    """Return shell commands that do what `launch` does."""
    return "\n".join(_lines(name, setup)) + "\n"


def _lines(name: str, setup: Setup) -> Iterator[str]:
    client, served = setup.client, setup.served
    sizes = f"{served.window:,} tokens, replies up to {served.reply:,}"
    yield f"# {name} with {served.model} at {served.url}: {sizes}."
    yield f"# `start_llm launch {name}` does the same. To keep your own configuration, put"
    yield f"# what the files say into {client.own_place} and leave out the variables that name the folder."
    yield from (f"# {note}" for note in setup.notes)
    if client.foreign:
        yield f"unset {' '.join(client.foreign)}"
    for variable, value in setup.environment.items():
        yield f"export {variable}={shlex.quote(value)}"
    for folder in dict.fromkeys([setup.folder, *(path.parent for path in setup.files)]):
        yield f"mkdir -p -m 700 {shlex.quote(str(folder))}"
    for path, content in setup.files.items():
        yield f"cat > {shlex.quote(str(path))} <<'{_END}'\n{text_of(path, content)}{_END}"
    yield client.command


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
