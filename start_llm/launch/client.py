"""What the launcher knows of a coding client, and the names that all clients share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from start_llm.core.chat import Json
from start_llm.launch.permissions import PermissionRule
from start_llm.launch.server_info import ServerInfo

PROVIDER = "start_llm"
KEY_VARIABLE = "START_LLM_API_KEY"
IDLE_S = 3600
IDLE_MS = IDLE_S * 1000

type Environment = Mapping[str, str]
type Files = Mapping[str, Mapping[str, Json] | str]
"""File name to content. `launch.files` writes it in the format of the name's suffix."""


class OwnPrompt(NamedTuple):
    """The characters of what a client sends before the first question: its instructions, and its tools."""

    system: int
    tools: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A coding client.

    Attributes:
        command: the name of its program.
        install: the command that installs it.
        environment: returns its variables, for a server and the client's private folder.
        files: returns its files, for a server and the client's private folder.
        permissions: returns what makes it ask before it acts, for the user's own settings and its folder.
        foreign: variables that would lead it to another server; they are removed.
        own_place: where the user's own configuration of this client is.
        programs: by which names the server knows it (`access.client_name`). Where it would send its SDK's
            User-Agent, its files have another one.
        prompt: the size of its own prompt, as the version in `scripts/install_clients.sh` sends it.
    """

    command: str
    install: str
    environment: Callable[[ServerInfo, Path], Environment]
    files: Callable[[ServerInfo, Path], Files]
    permissions: PermissionRule
    foreign: tuple[str, ...]
    own_place: str
    programs: tuple[str, ...]
    prompt: OwnPrompt
