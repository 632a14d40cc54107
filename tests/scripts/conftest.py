"""Scripts are started as a user starts them, from another folder, with the standard library alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ChainModel
from tests.serving import Server, serving

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LENGTH = ("--context-chars", "3000")
"""Some 1,300 tokens with all that stands around them, which a tiny model reads at once."""

_REASONING = [
    "<think>",
    "\nI have to look",
    *(f" w{number}" for number in range(6)),
    ".\n",
    "</think>",
    "\n\n",
]
# As no JSON library would write it, and of a tool that pi and OpenClaw both have.
_CALL = [
    "<tool_call>",
    '\n{"name": "read", "arguments": ',
    '{"path":  "caf\\u00e9 \\/notes" }',
    "}\n",
    "</tool_call>",
]
_TEXT = ["I", " did what", " you asked", " for."]

Script = Callable[..., subprocess.CompletedProcess[str]]
Serve = Callable[..., Server]


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """`script("pi_like_probe", "--turns", "3")` runs it to its end."""
    folder = tmp_path_factory.mktemp("elsewhere")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", str(SCRIPTS / f"{name}.py"), *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.fixture(scope="session")
def serve(chain_model: ChainModel) -> Iterator[Serve]:
    """`serve("qwen3", "calls")` thinks and calls a tool, `"says"` thinks and answers; settings may follow."""
    with ExitStack() as servers:

        @cache
        def started(family: str, does: str, **settings: bool) -> Server:
            tokens = [*_REASONING, *(_CALL if does == "calls" else _TEXT)]
            folder = chain_model({"\n": tokens}, family=family, hidden=64, layers=2)
            return servers.enter_context(serving(folder, **settings))

        yield started
