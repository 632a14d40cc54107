"""Completion in real shells, and its promise to offer what the parser takes."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from start_llm import cli
from start_llm.commands.completion import SHELLS, completion_script, short
from start_llm.config.flags import FLAGS, SWITCHES
from start_llm.launch.clients import CLIENTS
from tests.commands.parsers import commands_of

COMMANDS = sorted(commands_of(cli._parser()))
SERVE = sorted(
    {name for flag in FLAGS for name in flag.names}
    | {"--help", "--hosts", "--backend", "--restart", *SWITCHES}
)

CASES = {
    "": COMMANDS,
    "ser": ["serve", "service"],
    "service ": ["install", "status", "uninstall"],
    "serve --": SERVE,
    "serve --no-": ["--no-cache", "--no-proxy"],
    "serve --batch 2 --hlg-w": ["--hlg-width"],
    "service install --pri": ["--print"],
    "settings --format ": ["env", "markdown", "table"],
    "cache ": ["clear", "status", "verify"],
    "launch ": sorted(CLIENTS),
    "launch --base-url http://x c": sorted(name for name in CLIENTS if name.startswith("c")),
    "launch claude fi": ["file"],
    "serve --model fo": ["folder"],
    "serve --model-dir f": ["folder"],
    "completion ": ["bash", "fish", "zsh"],
    "status --js": ["--json"],
    "nothing": [],
}
"""What is on the line, and what is offered."""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    return tmp_path


def script(shell: str, folder: Path) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    path = folder / f".completion.{shell}"
    path.write_text(completion_script(cli._parser(), shell))
    return path


def offered_by_bash(line: str, folder: Path) -> list[str]:
    *words, current = ["start_llm", *line.split(" ")]
    quoted = " ".join(f"'{word}'" for word in [*words, current])
    code = f"""source {script("bash", folder)}
        COMP_WORDS=({quoted}) COMP_CWORD={len(words)}
        [[ "$(complete -p start_llm)" =~ -F\\ ([^ ]+) ]]
        "${{BASH_REMATCH[1]}}" start_llm '{current}' '{words[-1]}'; printf '%s\\n' "${{COMPREPLY[@]}}\""""
    done = subprocess.run(
        ["bash", "--norc", "-c", code], check=False, cwd=folder, capture_output=True, text=True, timeout=20
    )
    assert done.stderr == ""
    return done.stdout.split()


def offered_by_fish(line: str, folder: Path) -> list[str]:
    code = f"source {script('fish', folder)}; complete --do-complete 'start_llm {line}'"
    environment = os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder / ".config")}
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        check=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.stderr == ""
    return [entry.partition("\t")[0].rstrip("/") for entry in done.stdout.splitlines()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("line", CASES)
@pytest.mark.parametrize("offered", [offered_by_bash, offered_by_fish])
def test_a_line_is_offered_what_goes_on_from_it(
    offered: Callable[[str, Path], list[str]], line: str, folder: Path
):
    assert sorted(offered(line, folder)) == sorted(CASES[line])


class Zsh:
    """An interactive zsh, as a user types into it."""

    def __init__(self, folder: Path) -> None:
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.environ.update(HOME=str(folder), TERM="dumb", PS1="", COLUMNS="200")
            os.execlp("zsh", "zsh", "-f", "-i")

    def say(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def until(self, pattern: str, seconds: float = 15) -> str:
        heard, deadline = "", time.monotonic() + seconds
        while not re.search(pattern, heard):
            ready, _, _ = select.select([self._terminal], [], [], max(deadline - time.monotonic(), 0))
            assert ready, heard
            heard += os.read(self._terminal, 65536).decode(errors="replace")
        return heard

    def end(self) -> None:
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)


@pytest.fixture
def typed(folder) -> Generator[Zsh]:
    path = script("zsh", folder)
    zsh = Zsh(folder)
    zsh.say(f'autoload -Uz compinit; compinit -u -d {folder}/.dump; eval "$(< {path})"; unsetopt list_beep\n')
    zsh.say("start_llm() { print -rl -- 'heard:' \"$@\" :end }; print all-is-ready-$((1+1))\n")
    zsh.until("all-is-ready-2")
    yield zsh
    zsh.end()


@pytest.mark.thorough
def test_zsh_completes_what_is_typed(typed):
    lines = {
        "stat\t": ["status"],
        "service inst\t --pri\t": ["service", "install", "--print"],
        "serve --batch 2 --hlg-w\t 3": ["serve", "--batch", "2", "--hlg-width", "3"],
        "serve --mlx-p\t 80": ["serve", "--mlx-port", "80"],
        "launch cla\t fil\t": ["launch", "claude", "file"],
        "settings --format mar\t": ["settings", "--format", "markdown"],
        "serve --model-dir fo\t": ["serve", "--model-dir", "folder"],
        "completion fi\t": ["completion", "fish"],
    }
    for line, words in lines.items():
        typed.say(f"start_llm {line}\n")
        heard = typed.until(r"heard:\r\n(.*\r\n)*:end")
        assert re.findall(r"heard:\r\n((?:.*\r\n)*?):end", heard)[-1].split() == words, line


def test_the_command_prints_the_script_for_each_shell(capsys):
    for shell in SHELLS:
        assert cli.main(["completion", shell]) == 0
        assert capsys.readouterr().out == completion_script(cli._parser(), shell)


def test_what_is_added_to_the_parser_is_offered(folder):
    for shell in SHELLS:
        parser = argparse.ArgumentParser(prog="start_llm")
        new = parser.add_subparsers().add_parser("new", help="it's 100%% new: [a]. More.")
        new.add_argument("--colour", choices={"red": 1, "blue": 2}, help="a colour")
        text = completion_script(parser, shell)
        assert all(word in text for word in ("new", "colour", "red", "blue"))
        assert "More" not in text
        path = folder / "script"
        path.write_text(text)
        if shutil.which(shell):
            subprocess.run([shell, "-n", str(path)], check=True, timeout=20)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Port to listen on; 0 takes a free one. [MLX_PORT=8080]", "Port to listen on"),
        ("off, 4 or 8. Bits per element", "off, 4 or 8"),
        ("Keep it. [A=1]", "Keep it"),
        ("list the models", "list the models"),
        (None, ""),
    ],
)
def test_a_completion_shows_the_first_sentence(text, first):
    assert short(text) == first
