"""Every command in README and documents works as it is printed, whatever `python` there is.

A command is run in a folder that looks like the repository, with a `python` on PATH that always fails. What
is slow, needs the network or would change the machine is parsed instead; `PARSED` says why.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import install_and_run
from start_llm import cli
from start_llm.config.settings import all_rows

ROOT = Path(__file__).resolve().parent.parent
NAMED = ("README.md", "CONTRIBUTING.md", "CLAUDE.md")
DOCUMENTS = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").glob("*.md"))]
_PROGRAMS = (
    *(r"python[\d.]*", r"scripts/(?!\S+\.py$)\S+", "start_llm", r"\.venv/bin/\S+", r"/tmp/\S+"),
    *("pipx?", "uv", "npm", "apt-get", "ln", "curl", "tail"),
)
PROGRAM = re.compile(
    r"(?:(?:[A-Z_]+=\S+|eval \"\$\(|/path/to/repository/)\s*)*"
    rf"(?P<program>{'|'.join(_PROGRAMS)})(?= |$)"
)
NAME = re.compile(r"scripts/\w+\.py|start_llm|scripts/\w+")
"""Where these stand alone, they are names of files and of the program."""


class Documented(NamedTuple):
    """A command of a document."""

    document: str
    line: str


def lines_of(text: str) -> Iterator[str]:
    fenced = re.compile(r"^```(?:bash|sh)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for block in fenced.findall(text):
        yield from block.splitlines()
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"^    (\S.*)$", rest, re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest))


def commands() -> list[Documented]:
    entries = (
        Documented(path.name, re.sub(r"\s+# .*", "", line).strip())
        for path in DOCUMENTS
        for line in lines_of(path.read_text(encoding="utf-8"))
    )
    is_command = (entry for entry in entries if PROGRAM.match(entry.line) and not NAME.fullmatch(entry.line))
    return list({entry.line: entry for entry in is_command}.values())


COMMANDS = commands()

# ---------------------------------------------------------------------------------------- those run

RUN: Mapping[str, int] = {
    r"scripts/start_llm status": 3,
    r"scripts/start_llm stop": 3,
    r"scripts/start_llm cache status": 2,
    r"python3 install_and_run\.py --setup-only( --dev)?": 0,
    r"scripts/start_llm settings --format env > \.env\.example": 0,
    r"(scripts/)?start_llm settings --format \w+": 0,
    r"start_llm clients": 0,
    r"scripts/start_llm models": 0,
    r"start_llm fit --table": 0,
    r"start_llm serve --help": 0,
    r'eval "\$\(start_llm completion (bash)\)"': 0,
    r"start_llm completion fish > ~/\.config/fish/completions/start_llm\.fish": 0,
    r'ln -s "\$PWD/scripts/start_llm" ~/\.local/bin/': 0,
}
"""What is run, with its exit status where no server runs."""
ELSEWHERE: Mapping[str, str] = {
    r"curl .*": "test_readme.py runs those of README and api.md; others need a file, and jq",
    r"tail .*": "needs traces, and jq",
    r"(/path/to/repository/)?(scripts/)?start_llm (launch|config)( .*)?": "tests/launch, with clients",
    r"start_llm warm .*": "tests/http/test_warming.py, and as a process in tests/launch/test_launch.py",
}
"""What other tests run, or cannot."""
PARSED: Mapping[str, str] = {
    r"(?:[A-Z_]+=\S+ )*python3(\.12)? install_and_run\.py(?! --setup-only).*": "a server, or tests",
    r"(?:[A-Z_]+=\S+ )*(scripts/)?start_llm (serve|doctor|audit|fit|pull|search|rm).*": "a model, or minutes",
    r"(scripts/)?start_llm (service|upgrade|cache clear|completion).*": "would change the machine",
    r"\.venv/bin/python (-m scripts\.|scripts/).*": "minutes; tests/scripts",
    r"\.venv/bin/python -m benchmarks\b.*": "minutes; tests/benchmarks/test_programs.py",
    r"scripts/(check|chip_check|install_clients\.sh).*": "minutes, or the network",
    r"CLIENTS_HOME=\S+ scripts/install_clients\.sh.*": "the network",
    r"\.venv/bin/python start-llm\.py.*": "a server that stays; tests/seeds",
    r'eval "\$\(start_llm completion zsh\)"': "needs zsh; tests/commands/test_completion.py",
    r"(python3\.12 -m venv|\.venv/bin/pip install|uv tool install|pipx? install) .*": "the network",
    r"(npm install -g|apt-get install) .*": "the network, and the machine's own programs",
    r"(python3\.11 -m venv|/tmp/train/bin/python) .*": "hours of training",
}
"""What is parsed only, and why."""


def matching(table: Mapping[str, object], line: str) -> list[str]:
    return [pattern for pattern in table if re.fullmatch(pattern, line)]


def test_enough_commands_are_found() -> None:
    assert len(COMMANDS) > 60
    assert {command.document for command in COMMANDS} >= {
        "README.md",
        "CONTRIBUTING.md",
        "install.md",
        "clients.md",
    }


def test_each_command_is_run_or_said_why_not() -> None:
    tables = (RUN, ELSEWHERE, PARSED)
    assert [
        command for command in COMMANDS if not any(matching(table, command.line) for table in tables)
    ] == []


@pytest.mark.parametrize("table", [RUN, ELSEWHERE, PARSED])
def test_no_row_is_for_a_command_that_is_gone(table: Mapping[str, object]) -> None:
    assert [row for row in table if not any(re.fullmatch(row, command.line) for command in COMMANDS)] == []


def test_no_command_relies_on_what_python_is_there() -> None:
    programs = [match["program"] for command in COMMANDS if (match := PROGRAM.match(command.line))]
    assert "python" not in programs


# ---------------------------------------------------------------------------------------- running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like the repository; what is written into it changes nothing there."""
    copy, programs = tmp_path / "copy", tmp_path / "bin"
    for each in (copy, programs, tmp_path / "home/.local/bin", tmp_path / "home/.config/fish/completions"):
        each.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name not in (".git", ".env", ".env.example"):
            (copy / path.name).symlink_to(path)
    (programs / "python").write_text("#!/bin/sh\necho not this one >&2\nexit 99\n")
    (programs / "python").chmod(0o755)
    (programs / "start_llm").symlink_to(ROOT / "scripts" / "start_llm")
    return copy


def environment(folder: Path) -> dict[str, str]:
    ours = {row.name for row in all_rows()}
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    home = folder.parent / "home"
    return inherited | {
        "PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "STATE_ROOT": str(home / "state"),
        "MLX_PORT": "9",
        "PROXY": "false",
    }


def as_case(documented: Documented) -> Any:
    takes_seconds = documented.line in (
        "scripts/start_llm models",
        "start_llm fit --table",
    )  # they import mlx
    marks = [pytest.mark.thorough] if takes_seconds else []
    return pytest.param(documented, id=f"{documented.document}: {documented.line}", marks=marks)


@pytest.mark.checked(1)
@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "documented", [as_case(documented) for documented in COMMANDS if matching(RUN, documented.line)]
)
def test_a_command_works_as_it_is_printed(documented: Documented, folder: Path) -> None:
    (pattern,) = matching(RUN, documented.line)
    done = subprocess.run(
        ["bash", "-c", documented.line],
        check=False,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == RUN[pattern], done.stderr
    assert "Traceback" not in done.stderr
    assert "not this one" not in done.stderr


# ---------------------------------------------------------------------------------------- parsing


def words_behind(line: str) -> list[str]:
    """The words behind the variables of a command, without placeholders' brackets and redirections."""
    plain = re.sub(r"\[([^\]]*)\]", r"\1", line.partition(" > ")[0])
    words = shlex.split(plain)
    return [word for place, word in enumerate(words) if place or "=" not in word]


VALUES = {"SHELL": "bash", "<client>": "pi", "CLIENT": "pi"}
"""What stands for the placeholders of documents."""


def test_the_parser_takes_each_command_of_ours() -> None:
    ours = [
        command
        for command in COMMANDS
        if re.match(r"(/path/to/repository/)?(scripts/)?start_llm ", command.line)
    ]
    assert len(ours) > 20
    for command in ours:
        words = [VALUES.get(word, word) for word in words_behind(command.line)[1:]]
        if words == ["launch"]:
            words.append("--help")
        try:
            cli._parser().parse_args(words)
        except SystemExit as ended:
            assert ended.code == 0, command


def test_the_installer_takes_each_command_of_its_own() -> None:
    own_ones = [command for command in COMMANDS if "install_and_run.py" in command.line]
    assert len(own_ones) > 8
    for command in own_ones:
        words = words_behind(command.line)
        behind = words[words.index("install_and_run.py") + 1 :]
        own, tests = install_and_run.split_at_test(behind)
        _, of_the_server = install_and_run.option_parser().parse_known_args(own)
        install_and_run.refuse_unknown(of_the_server)
        cli._parser().parse_args(["serve", *of_the_server])
        paths = [word for word in tests or () if word.startswith("tests/") and "<" not in word]
        assert all((ROOT / path).exists() for path in paths), command


def test_each_script_is_there_and_has_the_options_that_are_named() -> None:
    for command in COMMANDS:
        if not re.match(r"\.venv/bin/python (-m )?(scripts|start-llm)", command.line):
            continue
        words = words_behind(command.line)[1:]
        name = f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]
        if not name.endswith("/..."):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert all(f'"{word}"' in text for word in words if re.match(r"--\w", word)), command


def test_programs_that_are_named_are_there() -> None:
    for command in COMMANDS:
        program = next(word for word in shlex.split(command.line) if "=" not in word)
        if program.startswith("scripts/"):
            assert shutil.which(ROOT / program), command
