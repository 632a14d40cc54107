"""The proxy's life: it starts, it comes back, and it never blocks on what it prints."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from start_llm.access.backend_secret import BackendSecret
from start_llm.core.errors import Overloaded
from start_llm.proxy.config import ProxyConfig, configuration, environment
from start_llm.proxy.launcher import Proxy, answers_end_to_end
from start_llm.proxy.ports import Process, ProcessRecord
from start_llm.proxy.proxy_log import ProcessOutput, ProxyLog
from start_llm.proxy.refusals import ProxyRefusal, refuse, tell_server
from tests.flat_settings import settings_of
from tests.proxy.conftest import Proxied, free_port, until

CHAT = "/v1/chat/completions"
CONFIG = ProxyConfig(
    settings=settings_of(proxy_port=4999, proxy_model_id="m"),
    backend="http://127.0.0.1:1",
    first_model="m",
    secret=BackendSecret("backend"),
)


def config_of(python: str | Path) -> ProxyConfig:
    """That of a proxy with another interpreter."""
    return replace(CONFIG, settings=settings_of(proxy_port=free_port(), proxy_python=str(python)))


@pytest.mark.thorough
def test_a_killed_proxy_comes_back_and_the_server_never_noticed(proxied: Proxied):
    first = proxied.proxy.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: proxied.proxy.pid != first, within_s=10)
    assert proxied.server.get("/health")["status"] == "ok"
    until(lambda: proxied.proxy.is_ready, within_s=60)
    assert any("Starting it again" in line for line in proxied.notices)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    assert proxied.ask("/v1/chat/completions", body).status == 200


@pytest.mark.thorough
def test_a_proxy_that_cannot_start_is_reported_and_tried_again(tmp_path: Path):
    lines: list[str] = []
    broken = config_of("/bin/false")
    proxy = Proxy(broken, say=lines.append, patience_s=1, logs=tmp_path)
    proxy.start()
    until(lambda: sum("Starting it again" in line for line in lines) >= 2, within_s=10)
    proxy.stop()
    assert proxy.pid is None
    assert not proxy.is_ready


def test_an_interpreter_that_does_not_exist_is_reported(tmp_path: Path):
    lines: list[str] = []
    missing = config_of("/no/such/python")
    proxy = Proxy(missing, say=lines.append, patience_s=1, logs=tmp_path)
    proxy.start()
    until(lambda: any("/no/such/python" in line for line in lines), within_s=10)
    proxy.stop()


def test_a_proxy_is_started_though_the_system_has_removed_its_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As systemd-tmpfiles and macOS do with folders that nobody has used for days."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reader, lines = tmp_path / "reader", list[str]()
    reader.write_text('#!/bin/sh\ncat "$3"\n')
    reader.chmod(0o700)
    proxy = Proxy(config_of(reader), say=lines.append, patience_s=1, logs=tmp_path / "logs")
    (folder,) = tmp_path.glob("start_llm-proxy-*")
    folder.rmdir()
    proxy.start()
    until(lambda: any("Starting it again" in line for line in lines), within_s=10)
    assert "model_list" in (tmp_path / "logs" / "proxy.log").read_text()
    proxy.stop()
    assert not [*tmp_path.glob("start_llm-proxy-*")], "nothing is left"


def test_a_proxy_that_cannot_be_written_down_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_room(record: ProcessRecord, process: Process) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ProcessRecord, "write", no_room)
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o700)
    lines: list[str] = []
    proxy = Proxy(config_of(sleeper), say=lines.append, patience_s=60, logs=tmp_path)
    proxy.start()
    until(lambda: any("written down" in log.read_text() for log in tmp_path.rglob("*.log")), within_s=10)
    child = proxy.pid
    time.sleep(0.5)
    assert proxy.pid == child
    assert not any("Starting it again" in line for line in lines)
    proxy.stop()
    assert proxy.pid is None


@contextmanager
def answering(status: int) -> Generator[int]:
    """The port of something that answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("status", "is_answer"),
    [(200, True), (400, True), (401, False), (404, False), (500, False), (503, False)],
)
@pytest.mark.sample(6)
def test_the_servers_refusal_of_a_chat_shows_that_requests_reach_it(status: int, is_answer: bool):
    """A model without a chat template refuses them all."""
    with answering(status) as port:
        assert answers_end_to_end(replace(CONFIG, settings=settings_of(proxy_port=port))) == is_answer


def test_nobody_is_no_answer():
    assert not answers_end_to_end(replace(CONFIG, settings=settings_of(proxy_port=free_port())))


@pytest.mark.long
def test_a_megabyte_of_output_blocks_nobody_and_rotates(tmp_path: Path):
    log = ProxyLog(tmp_path / "proxy.log", print)
    command = [sys.executable, "-c", "for i in range(60_000): print('x' * 100)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        drain = threading.Thread(target=ProcessOutput(log).drain, args=(process.stdout,))
        drain.start()
        assert process.wait(30) == 0
        drain.join(10)
    log.close()
    assert sum(1 for _ in tmp_path.glob("proxy.log*")) > 1
    assert all(path.stat().st_size <= 2 * 2**20 for path in tmp_path.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_a_log_that_cannot_be_written_is_reported_once_and_the_last_words_are_known(tmp_path: Path, capsys):
    notices: list[str] = []
    (tmp_path / "proxy.log").mkdir()
    log = ProxyLog(tmp_path / "proxy.log", notices.append)
    output = ProcessOutput(log)
    for line in ("starting", "no such module"):
        output.note(line)
    log.close()
    assert notices == [
        f"{tmp_path}/proxy.log cannot be written (Is a directory); what the proxy prints is not kept."
    ]
    assert output.last_words() == "no such module."
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_costs_lines_and_prints_no_traceback(capsys):
    log = ProxyLog(Path("/dev/full"), print)
    ProcessOutput(log).note("a line")
    log.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name", ["DATABASE_URL", "REDIS_HOST", "HTTPS_PROXY", "LITELLM_LOG_FILE", "LD_PRELOAD"]
)
def test_the_environment_of_the_user_does_not_change_the_proxy(name: str):
    assert name not in environment(CONFIG, {name: "x", "HOME": "/h"})
    assert environment(CONFIG, {"HOME": "/h"})["HOME"] == "/h"


def test_the_master_key_is_new_each_time_and_stands_in_no_file():
    first, second = (environment(CONFIG, {})["LITELLM_MASTER_KEY"] for _ in range(2))
    assert first != second
    assert first not in configuration(CONFIG)


def test_every_name_leads_to_the_server():
    models = json.loads(configuration(CONFIG))["model_list"]
    assert [entry["model_name"] for entry in models] == ["m", "*"]
    assert {entry["litellm_params"]["api_base"] for entry in models} == {"http://127.0.0.1:1/v1"}


def test_a_request_that_the_proxy_refuses_is_reported_to_the_server_and_logged(tmp_path: Path, capsys):
    refusals: list[ProxyRefusal] = []
    refusal = ProxyRefusal(method="GET", path="/x", status=403, reason="a name with ü")
    log = ProxyLog(tmp_path / "proxy.log", print, refusals.append)
    tell_server(refusal)
    ProcessOutput(log).drain(io.BytesIO(f"LiteLLM: hello\n{capsys.readouterr().out}".encode()))
    log.close()
    assert refusals == [refusal]
    assert "403" in (tmp_path / "proxy.log").read_text()


class BrokenPipe(io.StringIO):
    """Output that nobody reads any more."""

    def flush(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_request_is_refused_in_its_protocol_though_the_server_has_ended(monkeypatch: pytest.MonkeyPatch):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    monkeypatch.setattr("sys.stdout", BrokenPipe())
    request = {"method": "POST", "path": "/v1/chat/completions"}
    asyncio.run(refuse(request, send, Overloaded("It ends.")))
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["message"] == "It ends."


HANGING = """
import http.server, os, pathlib, sys, threading

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if pathlib.Path(sys.argv[0]).with_name("hang").exists():
            print("I say no more.", flush=True)
            os.kill(os.getpid(), {signal})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_request(self, *_):
        pass

print("I am number", os.getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


@contextmanager
def standing_in(folder: Path, signal: int) -> Generator[tuple[Proxy, list[str]]]:
    """A proxy without LiteLLM, which sends itself a signal once there is a file named `hang`."""
    lines: list[str] = []
    program = folder / "proxy"
    program.write_text(f"#!{sys.executable}\n{HANGING.replace('{signal}', str(signal))}")
    program.chmod(0o700)
    config = config_of(program)
    proxy = Proxy(config, say=lines.append, patience_s=60, logs=folder / "logs", check_every_s=0.5)
    proxy.start()
    proxy.expect_answers()
    try:
        until(lambda: proxy.is_ready, within_s=30)
        yield proxy, lines
    finally:
        proxy.stop()


@pytest.mark.thorough
def test_a_proxy_that_hangs_is_noticed_reported_and_started_again(tmp_path: Path):
    with standing_in(tmp_path, signal.SIGSTOP) as (proxy, lines):
        first = proxy.pid
        time.sleep(1.5)
        assert (proxy.pid, proxy.is_ready) == (first, True), "one that answers is left alone"
        (tmp_path / "hang").touch()
        until(lambda: any("does not answer any more" in line for line in lines), within_s=20)
        (tmp_path / "hang").unlink()
        until(lambda: proxy.is_ready and proxy.pid != first, within_s=30)
        assert any("ended by signal 9" in line and "Starting it again" in line for line in lines)


@pytest.mark.long
def test_the_last_words_are_those_of_the_process_that_ended(tmp_path: Path):
    with standing_in(tmp_path, signal.SIGKILL) as (proxy, lines):
        for _ in range(2):
            before = proxy.pid
            assert before
            os.kill(before, signal.SIGKILL)
            until(lambda: any(f"number {before}" in line for line in lines), within_s=20)  # noqa: B023
            until(lambda: proxy.is_ready and proxy.pid != before, within_s=30)  # noqa: B023
        restarts = [line for line in lines if "Starting it again" in line]
        assert all(
            re.match(r"The proxy was ended by signal 9 \(Killed\): I am number \d+ \(see", line)
            for line in restarts
        )


def test_a_process_that_printed_nothing_has_no_words_of_an_earlier_one(tmp_path: Path):
    log = ProxyLog(tmp_path / "proxy.log", print)
    ProcessOutput(log).note("an old line")
    assert ProcessOutput(log).last_words() == f"it printed nothing (see {log.path})."
    log.close()


def test_a_link_in_place_of_the_log_is_refused_and_reported(tmp_path: Path):
    other, lines = tmp_path / "other", list[str]()
    other.write_text("mine")
    (tmp_path / "proxy.log").symlink_to(other)
    log = ProxyLog(tmp_path / "proxy.log", lines.append)
    ProcessOutput(log).note("a line")
    log.close()
    assert other.read_text() == "mine"
    (line,) = lines
    assert "proxy.log cannot be written (it is a link, which is not followed)" in line


def test_a_notice_of_the_proxy_is_reported_and_is_no_last_word(tmp_path: Path, capsys):
    notices: list[str] = []
    tell_server("a field \x1b[2J is left out")
    printed = capsys.readouterr().out
    log = ProxyLog(tmp_path / "proxy.log", notices.append)
    output = ProcessOutput(log)
    output.drain(io.BytesIO(f"hello\n{printed}start_llm tells {{\nstart_llm tells 1\n".encode()))
    log.close()
    assert notices == ["a field [2J is left out"]
    assert output.last_words().startswith("start_llm tells 1")
