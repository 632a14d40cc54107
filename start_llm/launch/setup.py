"""All that a client needs to work with a server: one answer for starting it and for printing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from start_llm.core.chat import Json
from start_llm.launch.clients import Client
from start_llm.launch.files import text_of
from start_llm.launch.served import LOOPBACK, Served

_END = "END_OF_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is set, what is taken away, and what stands in the private folder."""

    client: Client
    served: Served
    folder: Path
    environment: Mapping[str, str]
    files: Mapping[Path, Mapping[str, Json]]

    def over(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The variables of the client's process."""
        foreign = self.client.foreign
        return {
            **{name: value for name, value in inherited.items() if name not in foreign},
            **self.environment,
        }


def make_setup(client: Client, served: Served, folder: Path, inherited: Mapping[str, str]) -> Setup:
    """Args:
    folder: the client's private folder, as an absolute path.
    inherited: the variables of the user, none of which is changed but those that the setup is about.
    """
    return Setup(
        client=client,
        served=served,
        folder=folder,
        environment={**client.environment(served, folder), **_past_proxies(served, inherited)},
        files={folder / name: content for name, content in client.files(served, folder).items()},
    )


def _past_proxies(served: Served, inherited: Mapping[str, str]) -> Mapping[str, str]:
    """A proxy of the environment would be asked for 127.0.0.1 too."""
    if not served.is_local:
        return {}
    theirs = inherited.get("no_proxy") or inherited.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, (host.strip() for host in theirs.split(","))), *LOOPBACK])
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))


def as_script(name: str, setup: Setup) -> str:
    """Lines for a shell that do what `launch` does."""
    return "\n".join(_lines(name, setup)) + "\n"


def _lines(name: str, setup: Setup) -> Iterator[str]:
    client, served = setup.client, setup.served
    sizes = f"{served.window:,} tokens, replies up to {served.reply:,}"
    yield f"# {name} with {served.model} at {served.url}: {sizes}."
    yield f"# `python -m start_llm launch {name}` does the same. To keep your own configuration, put"
    yield f"# what the files say into {client.own_place} and leave out the variables that name the folder."
    if client.foreign:
        yield f"unset {' '.join(client.foreign)}"
    for variable, value in setup.environment.items():
        yield f"export {variable}={shlex.quote(value)}"
    yield f"mkdir -p -m 700 {shlex.quote(str(setup.folder))}"
    for path, content in setup.files.items():
        yield f"cat > {shlex.quote(str(path))} <<'{_END}'\n{text_of(path, content)}{_END}"
    yield client.command
