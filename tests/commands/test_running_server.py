"""`status` and `stop`, and how commands find a server on any port."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.commands.stop import stop
from start_llm.core.errors import CommandError, LaunchError
from start_llm.launch.server_info import addresses, servers_of
from start_llm.storage.running_servers import RunningServer, ServerFile, running_servers
from tests.commands.conftest import ROOT, Shell
from tests.flat_settings import settings_of
from tests.serving import serving

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@contextmanager
def served(shell: Shell, *model: str, until: str = "Ctrl-C ends", **environment: str) -> Generator[Any]:
    """A server in a process of its own, of the demo model if no other is named."""
    command = [sys.executable, "-m", "start_llm", "serve", *(model or ("--demo",)), "--mlx-port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, env=shell.environment | environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert any(until in line for line in process.stdout)
            yield process
        finally:
            process.kill()


def is_gone(process: subprocess.Popen[str]) -> bool:
    try:
        return process.wait(10) == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Generator[tuple[Shell, Any]]:
    shell = Shell(tmp_path_factory.mktemp("demo"))
    with served(shell) as process:
        yield shell, process


def url_of(shell: Shell) -> str:
    (server,) = running_servers(shell.state / "servers")
    return server.url


# ------------------------------------------------------------------------------------------------- the file


@pytest.mark.thorough
def test_the_file_of_a_server_is_its_owners_alone(demo):
    shell, process = demo
    (path,) = (shell.state / "servers").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    record = json.loads(path.read_text())
    assert record["pid"] == process.pid
    assert path.name == f"{process.pid}-{record['url'].rpartition(':')[2]}.json"


def a_server(port: int = 8080, started_at: float = 1.0) -> RunningServer:
    url = f"http://127.0.0.1:{port}"
    return RunningServer(pid=os.getpid(), url=url, proxy_url=None, version="1", started_at=started_at)


def test_a_server_is_loading_until_it_tells_that_it_is_ready(tmp_path):
    file = ServerFile(tmp_path)
    file.write(a_server())
    assert [server.is_loading for server in running_servers(tmp_path)] == [True]
    file.tell_ready()
    assert [server.is_loading for server in running_servers(tmp_path)] == [False]
    file.remove()
    assert list(tmp_path.iterdir()) == []
    file.remove()


def test_the_newest_server_is_the_first(tmp_path):
    files = [ServerFile(tmp_path) for _ in range(2)]
    for file, port, began in zip(files, (1, 2), (5.0, 7.0), strict=True):
        file.write(a_server(port, began))
    assert [server.port for server in running_servers(tmp_path)] == [2, 1]
    for file in files:
        file.remove()


def test_files_that_a_killed_server_left_behind_count_for_nothing_and_go(tmp_path):
    (tmp_path / "17-8080.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:8080"}))
    assert running_servers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_server_that_is_killed_is_no_longer_running(shell):
    folder = shell.state / "servers"
    code = f"""
import time
from pathlib import Path
from tests.commands.test_running_server import ServerFile, a_server
file = ServerFile(Path({str(folder)!r}))
file.write(a_server(9))
print("written", flush=True)
time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(running_servers(folder)) == 1
        process.kill()
    assert list(folder.iterdir())
    done = shell.run("status")
    assert (done.returncode, done.stdout) == (
        3,
        "No server is running, and none answers at http://127.0.0.1:9.\n",
    )
    assert list(folder.iterdir()) == []


def test_a_file_of_another_version_is_left_alone(tmp_path):
    file = ServerFile(tmp_path)
    file.write(a_server())
    (path,) = tmp_path.iterdir()
    path.write_text('{"address": "of a later version"}')
    assert running_servers(tmp_path) == []
    assert path.exists()
    file.remove()


@pytest.mark.long
def test_a_state_folder_that_cannot_be_written_stops_nobody(shell, tmp_path):
    (tmp_path / "file").touch()
    with served(shell, until="commands do not find", STATE_ROOT=str(tmp_path / "file")):
        pass


# ---------------------------------------------------------------------------------------------------- status


@pytest.mark.thorough
def test_status_tells_what_the_server_does(demo):
    shell, process = demo
    before = json.loads(shell.run("status", "--json").stdout)["servers"][0]
    body = json.dumps(CHAT)
    command = ["curl", "-s", f"{url_of(shell)}/v1/chat/completions", "-H", "Content-Type: application/json"]
    for _ in range(2):
        subprocess.run([*command, "-d", body], check=True, capture_output=True, timeout=60)
    done = shell.run("status", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    status = json.loads(done.stdout)
    assert status["running"] is True
    (server,) = status["servers"]
    assert (server["pid"], server["url"], server["proxy_url"]) == (process.pid, url_of(shell), None)
    assert (server["state"], server["model"], server["other_models"]) == ("ok", "demo", [])
    assert server["requests"]["answered"] - before["requests"]["answered"] == 2
    assert server["requests"]["running"] == server["requests"]["waiting"] == 0
    tokens = server["tokens"]
    assert tokens["generated"] - before["tokens"]["generated"] == 8
    assert 0 < tokens["not_read_twice"] < tokens["prompt"]
    assert 0 < server["memory"]["weights_bytes"] < server["memory"]["budget_bytes"]
    plain = shell.run("status").stdout
    assert f"  server    {url_of(shell)}, ok (process {process.pid}, version " in plain
    assert f"  tokens    {tokens['not_read_twice']} of {tokens['prompt']} prompt tokens" in plain
    assert [line.split()[0] for line in plain.splitlines()] == [
        "server",
        "model",
        "memory",
        "requests",
        "tokens",
        "page",
    ]


@pytest.mark.thorough
def test_without_a_server_the_status_is_3(shell):
    done = shell.run("status", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (3, {"running": False, "servers": []})
    assert not shell.state.exists(), "asking writes nothing"


@pytest.mark.thorough
def test_a_server_with_another_state_folder_is_found_at_the_port_of_the_settings(demo, shell):
    port = url_of(demo[0]).rpartition(":")[2]
    done = shell.run("status", environment={"MLX_PORT": port})
    assert done.returncode == 0
    assert done.stdout.startswith(f"  server    http://127.0.0.1:{port}, ok\n")


@contextmanager
def other_server(folder: Path) -> Generator[int]:
    """The port of a server that is none of ours, in a process of its own."""
    command = [sys.executable, "-um", "http.server", "--bind", "127.0.0.1", "0", "--directory", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as other:
        assert other.stdout is not None
        (port,) = re.findall(r"port (\d+)", other.stdout.readline())
        try:
            yield int(port)
        finally:
            other.kill()


@pytest.mark.thorough
def test_another_program_at_that_port_is_no_server_of_ours(shell):
    with other_server(shell.home) as port:
        assert shell.run("status", environment={"MLX_PORT": str(port)}).returncode == 3


@pytest.mark.long
def test_a_server_that_asks_for_a_key_is_asked_with_it(shell, tiny_model):
    with serving(tiny_model("qwen3"), access_keys=("sk-own",), state_root=str(shell.state)) as server:
        assert f"{server.url}, asks for a key: set MLX_API_KEY to one" in shell.run("status").stdout
        wrong = shell.run("status", environment={"MLX_API_KEY": "sk-other"})
        assert f"{server.url}, does not take the key of MLX_API_KEY" in wrong.stdout
        assert f"{server.url}, ok" in shell.run("status", environment={"MLX_API_KEY": "sk-own"}).stdout
    assert not any("sk-own" in path.read_text() for path in (shell.state / "servers").iterdir())


@pytest.mark.thorough
def test_a_server_that_still_loads_is_reported(shell):
    file = ServerFile(shell.state / "servers")
    file.write(a_server(9))
    done = shell.run("status")
    assert done.returncode == 0
    assert "http://127.0.0.1:9, loading" in done.stdout
    launched = shell.run("config", "pi")
    assert launched.returncode == 2
    assert "The server at http://127.0.0.1:9 still loads its model." in launched.stderr
    file.remove()


@pytest.mark.long
def test_a_server_is_found_and_stopped_while_it_loads(shell, tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("qwen3"), tmp_path / "slow")
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")  # whoever reads it waits for ever
    with served(shell, "--model", str(folder), until="loading slow") as process:
        assert ", loading (process " in shell.run("status").stdout
        assert shell.run("stop").returncode == 0
        assert process.wait(10) == 128 + signal.SIGTERM
    assert shell.run("status").returncode == 3


# ------------------------------------------------------------------------------------------------------ stop


@pytest.mark.thorough
def test_without_a_server_there_is_nothing_to_stop(shell):
    done = shell.run("stop")
    assert (done.returncode, done.stdout) == (3, "No server of yours is running.\n")


@pytest.mark.long
def test_stop_waits_for_running_requests_and_now_does_not(shell):
    sent: list[str] = []
    with served(shell, DRAIN_SECONDS="30") as process, talking(url_of(shell)):
        folder = shell.state / "servers"
        assert stop(lambda: running_servers(folder), None, 9, sent.append, patience_s=0.5, at_once=False) == 1
        assert sent[-1] == "It has not ended within 0.5 s. `start_llm stop --now` ends it at once."
        assert process.poll() is None
        assert shell.run("stop", "--now").returncode == 0
        assert process.wait(5) == 130


@contextmanager
def talking(url: str) -> Generator[None]:
    """A client that has asked for an endless reply."""
    body = json.dumps({"prompt": "a", "max_tokens": 100_000, "stream": True, "ignore_eos": True})
    command = ["curl", "-sN", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        client.stdout.readline()
        try:
            yield
        finally:
            client.kill()


@contextmanager
def sleeper(port: int) -> Generator[tuple[subprocess.Popen[bytes], RunningServer]]:
    """A process that plays a server."""
    with subprocess.Popen(["sleep", "60"]) as process:
        url = f"http://127.0.0.1:{port}"
        yield (
            process,
            RunningServer(pid=process.pid, url=url, proxy_url=None, version="1", started_at=1.0),
        )
        process.kill()


def test_of_several_servers_one_is_named():
    with sleeper(81) as (first_process, first), sleeper(82) as (other, second):

        def running() -> list[RunningServer]:
            known = {first_process: first, other: second}
            return [server for process, server in known.items() if process.poll() is None]

        with pytest.raises(CommandError, match="2 servers run, on the ports 81, 82"):
            stop(running, None, 9, print, patience_s=5, at_once=False)
        assert stop(running, 82, 9, print, patience_s=5, at_once=False) == 0
        assert (first_process.poll(), other.poll()) == (None, -signal.SIGTERM)
        assert stop(running, 82, 9, print, patience_s=5, at_once=False) == 3
        assert stop(running, None, 9, print, patience_s=5, at_once=False) == 0


@pytest.mark.thorough
def test_what_listens_there_in_place_of_a_server_is_named_and_left_alone(shell):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        done = shell.run("stop", "--port", port)
    assert done.returncode == 3
    assert f"On port {port} listens process {os.getpid()} of " in done.stdout


@contextmanager
def as_nobody() -> Generator[None]:
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@needs_root
def test_a_server_of_another_user_is_refused():
    with sleeper(9) as (theirs, server):
        refusal = pytest.raises(CommandError, match=rf"\(process {theirs.pid}\) belongs to root, who alone")
        with as_nobody(), refusal:
            stop(lambda: [server], None, 9, print, patience_s=1, at_once=False)
        assert theirs.poll() is None


@needs_root
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="lsof may show more than /proc does")
def test_a_process_of_another_user_on_the_port_is_reported(shell):
    lines: list[str] = []
    with other_server(shell.home) as port, as_nobody():
        assert stop(list, None, port, lines.append, patience_s=1, at_once=False) == 3
    assert lines == [f"No server of yours is running. A process of another user listens on port {port}."]


@needs_root
def test_a_state_folder_of_another_user_is_reported(shell):
    (shell.state / "servers").mkdir(parents=True, mode=0o700)
    with as_nobody(), pytest.raises(LaunchError, match="cannot be read: Permission denied"):
        servers_of(settings_of(state_root=str(shell.state)))


# ---------------------------------------------------------------------------------------------------- launch


@pytest.mark.thorough
def test_launch_finds_a_server_on_any_port(demo):
    shell, _ = demo
    shell.add_program("claude", 'echo "$ANTHROPIC_BASE_URL $*"')
    done = shell.run("launch", "claude", "-p", "hello")
    assert done.stdout == f"{url_of(shell)} -p hello\n"
    assert done.stderr == (
        "claude does not suit demo: the model's template cuts the client's own prompt off.\n"
        "These suit it: pi, opencode, cline, continue. start_llm clients says how to get them.\n"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("form", [["--base-url", "URL"], ["--base-url=URL"]])
def test_an_address_behind_the_clients_name_is_ours(form, shell, demo):
    url = url_of(demo[0])
    shell.add_program("claude", 'echo "$ANTHROPIC_BASE_URL $*"')
    words = [word.replace("URL", url) for word in form]
    assert shell.run("launch", "claude", *words, "-p", "x").stdout == f"{url} -p x\n"
    assert shell.run("launch", "claude", *words, *words).stdout == f"{url} {' '.join(words)}\n"
    assert shell.run("config", "claude", *words).returncode == 0


def test_of_several_servers_the_one_of_the_settings_is_the_first():
    newest, oldest = a_server(82, 5.0), a_server(81, 1.0)
    urls = [item.url for item in addresses(settings_of(proxy_is_on=False, server_port=81), [newest, oldest])]
    assert urls == [oldest.url, newest.url]
    urls = [item.url for item in addresses(settings_of(proxy_is_on=False, server_port=80), [newest, oldest])]
    assert urls == [newest.url, oldest.url, "http://127.0.0.1:80"]


def test_the_proxy_of_a_running_server_comes_before_the_server():
    server = replace(a_server(82), proxy_url="http://127.0.0.1:4082")
    candidates = addresses(settings_of(access_keys=("own",), proxy_keys=("theirs",)), [server])
    assert candidates[:2] == [("http://127.0.0.1:4082", "theirs"), ("http://127.0.0.1:82", "own")]


@pytest.mark.thorough
def test_stop_ends_the_server_and_waits_for_it(demo):
    """The last test with this server."""
    shell, process = demo
    url = url_of(shell)
    done = shell.run("stop")
    assert is_gone(process)
    assert (done.returncode, done.stderr) == (0, "")
    first, last = done.stdout.splitlines()
    assert first == f"Stopping the server at {url} (process {process.pid}) ..."
    assert re.fullmatch(r"Stopped after \d+\.\d s\.", last)
    assert list((shell.state / "servers").iterdir()) == []
