"""Commands as a user calls them: real processes, with a home, a state folder and programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from start_llm.config.settings import all_rows

ROOT = Path(__file__).resolve().parents[2]


class Shell:
    """A user's shell. Programs in `bin` come before the system's."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bin, self.state = folder / "home", folder / "bin", folder / "state"
        for each in (self.home, self.bin):
            each.mkdir()
        dropped = {row.name for row in all_rows()} | {"LD_PRELOAD", "XDG_CONFIG_HOME", "XDG_STATE_HOME"}
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        self.environment = inherited | {
            "HOME": str(self.home),
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "STATE_ROOT": str(self.state),
            "MLX_PORT": "9",  # nothing listens there
            "PROXY": "false",
        }

    def add_program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        environment = self.environment | options.pop("environment", {})
        command = [sys.executable, "-m", "start_llm", *words]
        options = {"cwd": ROOT, "timeout": 60} | options
        return subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, **options
        )


@pytest.fixture
def shell(tmp_path) -> Shell:
    return Shell(tmp_path)
