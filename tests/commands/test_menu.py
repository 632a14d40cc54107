"""`start_llm` alone: the menu of a terminal, and the lines for a pipe."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from start_llm import cli
from start_llm.commands import background
from start_llm.commands import main_menu as menu
from start_llm.commands.main_menu import ListedOnDisk, Menu, MenuWorld
from start_llm.config.settings import Settings
from start_llm.core.errors import CommandError
from start_llm.launch.http_requests import HttpAnswer
from start_llm.launch.server_info import ServerInfo
from start_llm.storage.running_servers import RunningServer
from tests.commands.conftest import ROOT, Shell
from tests.conftest import TinyModel
from tests.flat_settings import settings_of
from tests.serving import Server, serving

ON_DISK = [ListedOnDisk(("demo", "models"), "/models/demo"), ListedOnDisk(("lab/tiny", "hub"), "lab/tiny")]


class User:
    """A user with a script: what is answered, what was run, what was printed."""

    def __init__(self, state: Path, *answers: str) -> None:
        self.answers = iter(answers)
        self.ran: list[Sequence[str]] = []
        self.lines: list[str] = []
        settings = settings_of(
            state_root=str(state), log_root=str(state / "logs"), proxy_is_on=False, server_port=9
        )
        self.world = MenuWorld(
            settings=settings,
            run=self.run,
            compute=self.run,
            models=lambda: (("model", "place"), ON_DISK),
            read=self.read,
            say=self.lines.append,
        )

    def run(self, words: Sequence[str]) -> int:
        self.ran.append(list(words))
        return 0

    def read(self, question: str) -> str:
        self.lines.append(question)
        try:
            return next(self.answers)
        except StopIteration:
            raise EOFError from None

    @property
    def printed(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The flags of servers that a menu has started in the background."""
    flags: list[Sequence[str]] = []
    monkeypatch.setattr(menu, "start_in_background", lambda _, given, __: flags.append(given))
    return flags


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    for family in ("qwen3", "llama"):
        shutil.copytree(tiny_model(family), folder / family)
    state = str(tmp_path_factory.mktemp("state"))
    with serving(Path("qwen3"), model_dir=str(folder), max_kv_size=5000, state_root=state) as server:
        yield server


def state_of(server: Server) -> Path:
    return Path(server.app._settings.server.state_root)


# ------------------------------------------------------------------------------------------ without a server


def test_without_a_server_the_menu_starts_one(tmp_path: Path, started: list[Sequence[str]]) -> None:
    user = User(tmp_path, "1", "q")
    assert Menu(user.world).open() == 0
    assert started == [()]
    assert "No server is running" in user.printed
    assert "  1  start the server" in user.lines


@pytest.mark.parametrize(
    ("answer", "flags"),
    [
        ("1", "/models/demo"),
        ("2", "lab/tiny"),
        ("own/model", "own/model"),
        ("/a/folder", "/a/folder"),
        ("/models/John's model", "/models/John's model"),
        (r"/models/John\'s\ model", "/models/John's model"),
        ("'/my models/demo'", "/my models/demo"),
        ("/my models/demo", "/my models/demo"),
    ],
)
@pytest.mark.sample(2)
def test_a_model_is_chosen_by_number_or_name(
    answer: str, flags: str, tmp_path: Path, started: list[Sequence[str]]
) -> None:
    user = User(tmp_path, "2", answer)
    Menu(user.world).open()
    assert started == [("--model", flags)]
    assert "  2  lab/tiny  hub" in user.lines


def test_models_are_searched_and_pulled_by_their_commands(
    tmp_path: Path, started: list[Sequence[str]]
) -> None:
    user = User(tmp_path, "2", "search qwen3 4bit", "pull lab/qwen3", "", "3", "4")
    Menu(user.world).open()
    assert user.ran == [["search", "qwen3", "4bit"], ["pull", "lab/qwen3"], ["doctor"], ["clients"]]
    assert started == []


@pytest.mark.parametrize("answers", [(), ("q",), ("",), ("9", "quit"), ("x", "0", "²", "exit")])
@pytest.mark.sample(2)
def test_the_menu_is_left(answers: Sequence[str], tmp_path: Path) -> None:
    user = User(tmp_path, *answers)
    assert Menu(user.world).open() == 0
    assert user.ran == []
    assert user.lines.count("There are the numbers 1 to 4.") == max(len(answers) - 1, 0)


def test_what_a_command_cannot_do_is_reported_and_the_menu_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> bool:
        raise CommandError("the log cannot be written.")

    monkeypatch.setattr(menu, "start_in_background", refuse)
    user = User(tmp_path, "1", "3", "q")
    assert Menu(user.world).open() == 0
    assert "the log cannot be written." in user.lines
    assert user.ran == [["doctor"]]


# ------------------------------------------------------------------------------------------- with a server


def test_with_a_server_the_menu_says_what_it_saved_and_stops_it(server: Server) -> None:
    user = User(state_of(server), "4", "q")
    Menu(user.world).open()
    assert "prompt tokens were not read twice" in user.printed
    assert f"  server    {server.url}, ok" in user.printed
    assert user.ran == [["stop"]]


def test_the_doctor_has_the_server_stopped_after_a_question(server: Server) -> None:
    user = User(state_of(server), "3", "n", "3", "y", "q")
    Menu(user.world).open()
    assert user.ran == [["stop"], ["doctor"]]


@pytest.mark.long
def test_a_model_that_the_server_has_is_loaded(server: Server, started: list[Sequence[str]]) -> None:
    server.post("/v1/models/llama/unload", {})
    user = User(state_of(server), "2", "llama", "q")
    Menu(user.world).open()
    assert "llama is loaded, and answers requests that name it." in user.lines
    assert {model["id"]: model["state"] for model in server.get("/v1/models")["data"]}["llama"] == "loaded"
    assert (started, user.ran) == ([], [])


@pytest.mark.parametrize("files", [(), ("http://127.0.0.1:7", "{url}")], ids=["none", "a newer server's"])
def test_the_server_that_was_asked_for_its_models_loads_one(
    files: Sequence[str], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has written no file for us, or another server runs that is newer."""
    running = [
        RunningServer(pid=1, url=url.format(url=server.url), proxy_url=None, version="1", started_at=1.0)
        for url in files
    ]
    monkeypatch.setattr(menu, "servers_of", lambda _: running)
    loads: list[str] = []
    monkeypatch.setattr(menu, "ask", lambda url, *_: loads.append(url) or HttpAnswer(200, b""))
    user = User(state_of(server))
    world = replace(user.world, settings=settings_of(proxy_is_on=False, server_port=server.port))
    served = ServerInfo(url=server.url, key="local", model="qwen3", window=5000, reply=1000)
    Menu(world)._load(served, "llama")
    assert loads == [f"{server.url}/v1/models/llama/load"]


@pytest.mark.thorough
def test_a_command_that_is_interrupted_may_put_away_what_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidies = f'sleep 0.2; kill -INT $PPID; sleep 0.5; echo "$*" > {tmp_path}/put-away; exit 130'
    (tmp_path / "command").write_text(f"#!/bin/sh\n{tidies}\n")
    (tmp_path / "command").chmod(0o755)
    monkeypatch.setattr(menu, "program", lambda: str(tmp_path / "command"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert menu.compute(["doctor"]) == 130
    except KeyboardInterrupt:
        pytest.fail("the interrupt ended the wait for it")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "put-away").read_text() == "doctor\n"


@pytest.mark.thorough
def test_for_another_model_the_server_is_stopped_after_a_question(
    server: Server, started: list[Sequence[str]]
) -> None:
    user = User(state_of(server), "2", "2", "n", "2", "2", "y", "q")
    Menu(user.world).open()
    assert user.ran == [["stop"]]
    assert started == [("--model", "lab/tiny")]


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    """The only programs on PATH."""
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_client_is_launched_and_ends_the_menu(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, pi="")
    user = User(state_of(server), "1", "3", "1")
    Menu(user.world).open()
    assert user.ran == [["launch", "pi"]]
    (line,) = (line for line in user.lines if line.startswith("  1  claude"))
    assert "not installed" in line
    assert "does not suit the model" in line


@pytest.mark.thorough
def test_a_client_that_is_not_there_is_installed_after_a_question(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = f'echo "$*" > {tmp_path}/asked; echo > {tmp_path}/pi; /bin/chmod +x {tmp_path}/pi'
    programs(tmp_path, monkeypatch, npm=npm)
    user = User(state_of(server), "1", "3", "n", "1", "3", "y")
    Menu(user.world).open()
    command = "npm install -g @earendil-works/pi-coding-agent"
    assert f"pi is not installed. This installs it: {command}" in user.lines
    assert (tmp_path / "asked").read_text() == command.removeprefix("npm ") + "\n"
    assert user.ran == [["launch", "pi"]], "only once it was installed"


@pytest.mark.thorough
def test_without_npm_nobody_is_asked(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch)
    user = User(state_of(server), "1", "3", "q")
    Menu(user.world).open()
    assert "npm is not on PATH. It comes with Node.js (https://nodejs.org)." in user.lines
    assert user.ran == []


# ------------------------------------------------------------------------------------- as a user calls it


@contextmanager
def in_terminal(shell: Shell, **more: str) -> Generator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "start_llm"],
        cwd=ROOT,
        env=shell.environment | more,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def read_until(terminal: int, text: str) -> str:
    printed = b""
    with suppress(OSError):  # of a terminal that nobody has open any more
        while text.encode() not in printed:
            printed += os.read(terminal, 4096)
    return printed.decode()


@pytest.mark.thorough
def test_in_a_terminal_it_asks_and_ctrl_c_leaves_it(shell: Shell) -> None:
    with in_terminal(shell) as (process, terminal):
        assert "1  start the server" in read_until(terminal, "q to leave: ")
        for _ in range(20):  # a signal between the prompt and the wait for a line waits for that line
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                break
            process.send_signal(signal.SIGINT)
        assert process.wait(1) == 130
        assert "Traceback" not in read_until(terminal, "Traceback")


@pytest.mark.thorough
def test_in_a_pipe_it_prints_what_runs_and_the_commands(shell: Shell) -> None:
    done = shell.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "No server is running" in done.stdout
    assert [line.split("start_llm ")[1] for line in done.stdout.splitlines()[4:]] == [
        "serve",
        "models",
        "doctor",
        "clients",
    ]


@pytest.mark.thorough
def test_settings_that_cannot_be_read_are_reported(shell: Shell) -> None:
    done = shell.run(environment={"MLX_PORT": "many"})
    assert done.returncode == 2
    assert done.stderr.startswith("start_llm cannot open its menu.\nMLX_PORT=")


def test_a_line_that_the_parser_refuses_does_not_end_the_menu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run_in_menu(["pull"]) == 2
    assert "required: REPO" in capsys.readouterr().err


def test_the_models_of_this_machine_are_listed_with_what_serves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("start_llm.library.hub.HF_HUB_CACHE", str(tmp_path / "hub"))
    head, rows = cli._models_in_menu()
    assert head[0] == "model"
    (demo,) = (row for row in rows if row.cells[0] == "demo")
    assert demo.word == str(ROOT / "models" / "demo")


# ---------------------------------------------------------------------------------------- in the background


def settings_in(folder: Path) -> Settings:
    return settings_of(state_root=str(folder / "state"), log_root=str(folder / "logs"))


def test_a_server_that_ends_at_once_is_reported_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, fails="echo one; printf 'a half\\rthe whole\\n'; echo \"$*\"; exit 3")
    monkeypatch.setattr(background, "program", lambda: str(tmp_path / "fails"))
    lines: list[str] = []
    assert not background.start_in_background(settings_in(tmp_path), ("--demo",), lines.append)
    assert lines[1:] == ["It has ended with status 3:", "  one", "  the whole", "  serve --demo"]
    assert (tmp_path / "logs" / "server.log").stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(CommandError, match=r"logs cannot be written: Not a directory\."):
        background.start_in_background(settings_in(tmp_path), (), print)


def test_who_interrupts_the_wait_learns_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, waits="exit 0")
    monkeypatch.setattr(background, "program", lambda: str(tmp_path / "waits"))

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(background, "_is_ready", interrupt)
    lines: list[str] = []
    assert not background.start_in_background(settings_in(tmp_path), (), lines.append)
    assert lines[1].startswith("It goes on loading.")


@pytest.mark.long
def test_a_server_is_started_from_the_menu_and_stopped_from_it(shell: Shell) -> None:
    environment = {"MODEL_PATH": str(ROOT / "models" / "demo"), "MLX_PORT": "0"}
    environment |= {"LOG_ROOT": str(shell.home / "logs")}
    with in_terminal(shell, **environment) as (process, terminal):
        read_until(terminal, "q to leave: ")
        os.write(terminal, b"1\n")
        assert "4  stop the server" in read_until(terminal, "q to leave: ")
        os.write(terminal, b"4\n")
        assert "Stopped after" in read_until(terminal, "Stopped after")
        assert "No server is running" in read_until(terminal, "q to leave: ")
        os.write(terminal, b"q\n")
        assert process.wait(20) == 0
