"""The real model: as files, behind a server, and as `mlx_lm.server` answers with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.real.replies import (
    STREAMS,
    Reference,
    asked_at_once,
    post_scored,
    replies_of_mlx_lm,
    streamed,
)
from tests.serving import Server, serving

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "real_model.py"


@pytest.fixture(scope="session")
def folder() -> Path:
    """The real model in float32, the kind that a CPU computes fast. It is built if it is not there; what
    needs it is skipped where the packages for that cannot be had."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "float32"], capture_output=True, text=True, check=False
    )
    if done.returncode == os.EX_UNAVAILABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def theirs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return replies_of_mlx_lm(folder, tmp_path_factory.mktemp("mlx_lm") / "server.log")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, batch=STREAMS) as running:
        yield running


@pytest.fixture(scope="session")
def whole(server: Server, theirs: dict[str, Reference]) -> dict[str, Any]:
    """The bodies of this server's replies, with log-probabilities. By now the other server has ended."""
    return asked_at_once(partial(post_scored, server.port))


@pytest.fixture(scope="session")
def streams(server: Server) -> dict[str, str]:
    """The texts of this server's replies, streamed."""
    return asked_at_once(partial(streamed, server.port))
