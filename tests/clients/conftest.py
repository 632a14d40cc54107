"""The installed clients, and one server for all of them: on its own port, and through the proxy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from start_llm.app import App
from start_llm.config.settings import Settings
from start_llm.telemetry.terminal import Terminal
from tests.clients.model import write_agents_model
from tests.clients.table import Agent
from tests.clients.talk import Trace
from tests.proxy.conftest import free_port
from tests.serving import Server, serving

_PROXY_S = 120


@dataclass(frozen=True, slots=True)
class Endpoints:
    """A running server.

    Attributes:
        ports: by the number that they have unless somebody chooses another.
    """

    server: Server
    trace: Trace
    ports: Mapping[int, int]


@pytest.fixture(scope="session")
def clients_home() -> Path:
    """Skips without it."""
    home = os.environ.get("CLIENTS_HOME")
    if not home:
        pytest.skip("CLIENTS_HOME is not set: scripts/install_clients.sh says how the clients are installed")
    return Path(home).resolve()


@pytest.fixture(scope="session")
def endpoints(clients_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Endpoints]:
    with open_endpoints(tmp_path_factory) as endpoints:
        yield endpoints


@contextmanager
def open_endpoints(
    tmp_path_factory: pytest.TempPathFactory,
    make: Callable[[Settings, Terminal], App] = App,
    /,
    *,
    folder: Path | None = None,
    **settings: Any,
) -> Generator[Endpoints]:
    """A server with a proxy.

    Args:
        folder: of the model; None: one that is scripted for agents.
        settings: those of `settings_of`.
    """
    folder = folder or write_agents_model(tmp_path_factory.mktemp("agents"))
    traces, port = tmp_path_factory.mktemp("traces"), free_port()
    settings |= {"traces": True, "traces_prompts": True, "log_root": str(traces)}
    with serving(folder, make, proxy_is_on=True, proxy_port=port, **settings) as server:
        proxy = server.proxy
        deadline = time.monotonic() + _PROXY_S
        while not (proxy and proxy.is_ready):
            assert time.monotonic() < deadline, server.printed()
            time.sleep(0.1)
        yield Endpoints(server, Trace(server, traces), {8080: server.port, 4000: port})


def installed(agent: Agent, clients_home: Path) -> Agent:
    """Skips without it."""
    if not agent.path(clients_home).exists():
        pytest.skip(f"{agent.folder} is not installed: scripts/install_clients.sh {agent.folder}")
    return agent
