"""Ports that other processes hold."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import PortError
from start_llm.proxy import ports
from start_llm.proxy.launcher import claim_port
from start_llm.proxy.ports import Process, ProcessRecord, is_free, owner
from start_llm.storage.private_files import Lock

LISTEN = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


@contextmanager
def listening_process() -> Generator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_port_of_a_server_that_runs_is_left_alone_with_its_proxy(tmp_path: Path):
    with listening_process() as (proxy, port):
        server = Lock(tmp_path / f"proxy-{port}.lock")
        assert server.take()
        process = Process.of(proxy.pid)
        assert process
        ProcessRecord(tmp_path / f"proxy-{port}.json").write(process)
        with pytest.raises(PortError, match=rf"a server that is running \(pid {os.getpid()}\)"):
            claim_port(port, tmp_path, print)
        assert process.is_running
        assert ProcessRecord(tmp_path / f"proxy-{port}.json").read() == process
        server.release()


def test_a_port_that_somebody_else_holds_is_not_kept(tmp_path: Path):
    with listening_process() as (_, port):
        for _ in range(2):
            with pytest.raises(PortError, match=f"PROXY_PORT={port} is taken"):
                claim_port(port, tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_for_its_owner_alone(tmp_path: Path):
    before = os.umask(0)
    try:
        record = ProcessRecord(tmp_path / "logs" / "proxy-1.json")
        record.write(Process(1, "now"))
    finally:
        os.umask(before)
    assert [
        path.stat().st_mode & 0o777 for path in (tmp_path / "logs", tmp_path / "logs" / "proxy-1.json")
    ] == [0o700, 0o600]
    assert record.read() == Process(1, "now")


def test_a_free_port_is_claimed_without_a_word(tmp_path: Path):
    notices: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    claim_port(port, tmp_path, notices.append)
    assert notices == []


def test_a_stranger_on_the_port_is_named_and_left_alone(tmp_path: Path):
    with listening_process() as (process, port):
        with pytest.raises(
            PortError, match=rf"PROXY_PORT={port} is taken by .*python.* \(pid {process.pid}\)"
        ):
            claim_port(port, tmp_path, print)
        assert process.poll() is None
        assert not is_free(port)


def test_a_later_process_with_the_number_of_ours_is_a_stranger(tmp_path: Path):
    with listening_process() as (process, port):
        ProcessRecord(tmp_path / f"proxy-{port}.json").write(Process(process.pid, "Thu Jan  1 00:00:00 1970"))
        with pytest.raises(PortError):
            claim_port(port, tmp_path, print)
        assert process.poll() is None


def test_a_proxy_that_we_left_behind_is_ended(tmp_path: Path):
    notices: list[str] = []
    with listening_process() as (process, port):
        ours = Process.of(process.pid)
        assert ours is not None
        ProcessRecord(tmp_path / f"proxy-{port}.json").write(ours)
        # A zombie would still count as running: somebody has to take its status.
        import threading

        threading.Thread(target=process.wait, daemon=True).start()
        claim_port(port, tmp_path, notices.append)
        assert process.wait(5) != 0
        assert is_free(port)
    assert f"pid {process.pid}" in notices[0]


def test_the_owner_of_a_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = owner(int(server.getsockname()[1]))
    assert process == Process.of(os.getpid())


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1}', '{"pid": "x", "started": ""}', "[]"])
def test_a_broken_record_knows_nobody(tmp_path: Path, text: str):
    path = tmp_path / "record.json"
    path.write_text(text)
    assert ProcessRecord(path).read() is None
    assert ProcessRecord(tmp_path / "missing.json").read() is None


def test_a_folder_that_cannot_be_written_is_reported_and_stops_nobody(tmp_path: Path):
    lines: list[str] = []
    (tmp_path / "logs").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    claim_port(port, tmp_path / "logs", lines.append).release()
    assert lines == [f"{tmp_path}/logs cannot be written (Not a directory); the server goes on without it."]
    ProcessRecord(tmp_path / "logs" / "proxy-1.json").forget()


def test_a_system_tool_that_takes_too_long_says_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ports, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(subprocess, "run", partial(slow, subprocess.run))
    assert Process.of(os.getpid()) is None


def slow(run: Callable[..., Any], _: Sequence[str], **options: Any) -> Any:
    return run([sys.executable, "-c", "import time; time.sleep(30)"], **options)
