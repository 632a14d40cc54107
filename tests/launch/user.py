"""A user with settings of their own, for whom clients are set up. Shared by tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from start_llm.launch.clients import CLIENTS
from start_llm.launch.own_settings import OwnSettings
from start_llm.launch.server_info import ServerInfo
from start_llm.launch.setup import Setup, make_setup

SERVED = ServerInfo(url="http://127.0.0.1:4000", key="k", model="m", window=131_072, reply=32_000)
FOLDER = Path("/private/folder")


class User:
    """A user with a home, and a project with a folder below it."""

    def __init__(self, root: Path) -> None:
        self.home, self.work = root / "home", root / "project" / "inner"
        self.work.mkdir(parents=True)
        (root / "project" / ".git").mkdir()

    def has(self, name: str, text: str) -> None:
        """Write a file of the user, by its name below the home."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def setup(self, client: str, **variables: str) -> Setup:
        return self.setup_in(FOLDER, client, **variables)

    def setup_in(self, folder: Path, client: str, **variables: str) -> Setup:
        own = OwnSettings(variables={"HOME": str(self.home), **variables}, work=self.work)
        return make_setup(CLIENTS[client], SERVED, folder, own)

    def file(self, client: str, name: str, **variables: str) -> Any:
        return self.setup(client, **variables).files[FOLDER / name]
