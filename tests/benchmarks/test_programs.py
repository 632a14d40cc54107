"""Each program is documented, and each documented command is one that a program takes."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
CHECKS = "START_LLM_CHECK_THREADS"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CLAUDE.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")),
    *(path for folder in ("docs", ".context") for path in (ROOT / folder).rglob("*.md")),
]
PROGRAMS = [name for name in harness.list_programs() if name != "chip_check"]
"""tests/benchmarks/test_chip_check.py has the one that reads its arguments itself."""


def commands() -> Iterator[tuple[str, str]]:
    """Document, and what stands behind `benchmarks` in each command."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"(?:python3? -m |`)benchmarks (?!\.\.\.)([^`\n#|…]+)", text):
            yield path.name, match[1].strip()


COMMANDS = sorted(set(commands()))


def program(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def test_the_table_has_each_program_with_its_parts_and_their_minutes():
    text = (ROOT / "docs" / "benchmarking.md").read_text(encoding="utf-8").partition("## A new chip")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", text, re.MULTILINE)
    table = {name: {*re.findall(r"`([\w-]+)`", minutes)} for name, minutes in rows if name in PROGRAMS}
    assert table == {name: {*program(name).PARTS} for name in PROGRAMS}


def test_enough_commands_are_found():
    assert len(COMMANDS) > 60
    assert {words.split()[0] for _, words in COMMANDS} > {*PROGRAMS}


@pytest.mark.parametrize(("document", "words"), COMMANDS)
@pytest.mark.sample(1)
def test_a_documented_command_names_parts_and_options_that_are_there(document: str, words: str):
    name, *arguments = shlex.split(words)
    if name == "chip_check":
        return
    assert name in PROGRAMS
    options = harness.parser_of(name, program(name))._option_string_actions
    assert {word for word in arguments if word.startswith("--")} <= options.keys()
    for option in {"--only", "--shapes", "--family", "--types"} & {*arguments}:
        behind = arguments[arguments.index(option) + 1 :]
        values = [*takewhile(lambda word: not word.startswith("--"), behind)]
        assert {*values} <= {*(options[option].choices or values), "NAME"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_its_parts_and_options_do(name: str):
    module = program(name)
    shown = harness.parser_of(name, module).format_help()
    assert all(f"\n{part}: " in shown for part in module.PARTS)
    assert all(part.__doc__ for part in module.PARTS.values())


@pytest.mark.long
def test_a_benchmark_does_not_measure_the_checks_of_the_tests():
    """Though it imports parts of the tests, which turn them on."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTEST_VERSION", CHECKS)}
    program = f"import benchmarks.engine, os; print(os.environ.get({CHECKS!r}))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=clean, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "None"


RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "section", RESULTS.split("\n## ")[1:], ids=lambda section: section.partition("\n")[0]
)
@pytest.mark.sample(1)
def test_a_table_of_the_results_stands_below_the_command_that_makes_it(section: str):
    above, *tables = re.split(r"^\|(?:\s*:?-+:?\s*\|)+$", section, flags=re.MULTILINE)
    assert not tables or re.search("^    .*python", above, re.MULTILINE)
    blocks = re.findall(r"(?:^    .*-m benchmarks .*\n)+", section, re.MULTILINE)
    assert all(len(block.splitlines()) == 1 for block in blocks), "a table is made by one command"


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_that_share_an_option_read_as_many_values_of_the_same_type(name: str):
    kinds: dict[str, Any] = {}
    for part in program(name).PARTS.values():
        for option, (kind, _) in harness._parameters(part).items():
            first, this = harness._parsing(kinds.setdefault(option, kind)), harness._parsing(kind)
            assert first | {"choices": None} == this | {"choices": None}, option


def test_benchmarks_stay_within_7500_lines():
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in BENCHMARKS.glob("*.py")) <= 7500
