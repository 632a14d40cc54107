"""A load that does not come back: /health tells it, and where a service manager waits the process ends."""

from __future__ import annotations

import os
import plistlib
import re
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks import servers
from start_llm.commands.login_service import ServiceCommand, launchd_plist, systemd_unit
from tests.conftest import TinyModel

pytestmark = pytest.mark.thorough

PATIENCE_S = "2"


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """Two models. Whoever reads the second one's defaults of sampling waits for ever."""
    for family in ("qwen3", "llama"):
        shutil.copytree(tiny_model(family), tmp_path / "models" / family)
    defaults = tmp_path / "models" / "llama" / "generation_config.json"
    defaults.unlink()
    os.mkfifo(defaults)
    return tmp_path / "models"


@contextmanager
def started(
    folder: Path, first: str, monkeypatch: pytest.MonkeyPatch, **variables: str
) -> Generator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, from its beginning on, and its port."""
    port = servers.free_port()
    for name, value in {
        "PROXY": "false",
        "STATE_ROOT": str(folder.parent / "state"),
        "MODEL_LOAD_STALL_SECONDS": PATIENCE_S,
        **variables,
    }.items():
        monkeypatch.setenv(name, value)
    command = servers.start_llm("--model-dir", str(folder), "--model", first, "--mlx-port", str(port))
    process = subprocess.Popen(
        command, cwd=servers.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process, port
    finally:
        process.kill()
        process.communicate()


def health(port: int) -> str:
    try:
        return servers.ask(port, "/health")["status"]
    except OSError:
        return "nobody"


def wait_for(port: int, status: str) -> None:
    deadline = time.monotonic() + 120
    while health(port) != status:
        assert time.monotonic() < deadline, (health(port), status)
        time.sleep(0.1)


@contextmanager
def request_of(port: int, model: str) -> Generator[None]:
    """A request that waits for its reply. For a client that has left nothing would be loaded."""
    body = f'{{"model": "{model}", "prompt": "Fish?", "max_tokens": 1}}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with servers.socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield


def test_a_load_that_hangs_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with started(folder, "qwen3", monkeypatch) as (process, port):
        wait_for(port, "ok")
        with request_of(port, "llama"):
            wait_for(port, "loading")
            wait_for(port, "stuck")
        assert process.poll() is None, "nobody would start it again"


def variables_of_the_service() -> list[dict[str, str]]:
    """What systemd and launchd put into the environment of the server."""
    command = ServiceCommand(words=["x"], folder=Path("/"), log=Path("/log"), stop_s=1)
    unit = dict(re.findall(r"^Environment=(\w+)=(.*)$", systemd_unit(command), re.MULTILINE))
    return [unit, plistlib.loads(launchd_plist(command))["EnvironmentVariables"]]


@pytest.mark.long
@pytest.mark.parametrize("first", ["qwen3", "llama"])
def test_under_a_service_manager_a_stuck_server_ends_to_be_started_again(
    first: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    ours, launchds = variables_of_the_service()
    assert ours == launchds
    with started(folder, first, monkeypatch, **ours) as (process, port), ExitStack() as clients:
        if first == "qwen3":
            wait_for(port, "ok")
            clients.enter_context(request_of(port, "llama"))
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 70, (
            "neither 0, 2, 130 nor 143, after which it would not be started again"
        )
        assert re.search(r"The server is stuck: llama has been loading for \d+ s\. It ends", printed)
    (folder / "llama" / "generation_config.json").unlink()
    with started(folder, first, monkeypatch, **ours) as (_, port):
        wait_for(port, "ok")
