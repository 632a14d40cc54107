"""Every guard of the cache has a mutant: an edit that plants a bug, and a test that it turns red.

`tests/mutants/edits.py` says what the file of a mutant looks like. By default it is tried whether each finds
its place in the sources. CI runs one of 24, `scripts/check --changed` those that a change concerns,
and `scripts/check --all` all, as does `install_and_run.py --test tests/mutants -m ""`.

A named test runs without plugins and without `tests/conftest.py`, which take longer than the test itself. So
it may only use fixtures of its own file.
"""

from __future__ import annotations

import ast
import compileall
import json
import os
import py_compile
import queue
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import edits
from tests.mutants.edits import Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("start_llm", "tests", "scripts", "pyproject.toml")
WORKER = Path(__file__).with_name("worker.py")
OPTIONS = (
    *("-m", ""),
    *"-x --noconftest --tb=short --assert=plain -o timeout=60 -p no:cacheprovider -p pytest_timeout".split(),
)
AT_ONCE = 2
FEW = 8
"""So many mutants run sooner in one copy that is not compiled beforehand."""
BUGS = {
    1: "stale KV after a weights swap",
    2: "aliased recurrent state",
    3: "state ahead of its tokens",
    4: "stop token in the state",
    5: "checkpoint never taken",
    6: "a 99 % match rejected",
    7: "tail dropped",
    8: "two rows mixed",
    9: "entry stolen by a side request",
    10: "reuse after cancel",
    11: "memory not returned",
    12: "lazy slice across threads",
    13: "wrapped window",
    14: "offset off by one",
    15: "array cap ignored",
}
"""By the number that the names of their mutants begin with. Higher numbers are further guards."""


type Benches = queue.SimpleQueue[Bench]


MUTANTS = {path.stem: edits.read(path) for path in sorted(Path(__file__).parent.glob("*.mutant"))}


def file_of(mutant: Mutant) -> str:
    """Of the test that finds what a mutant plants."""
    return mutant.test.partition("::")[0]


FILES = sorted({file_of(mutant) for mutant in MUTANTS.values()})


# --------------------------------------------------------------------------------------------------- planting


@dataclass(frozen=True)
class Outcome:
    """pytest's output, and its exit status."""

    status: int
    output: str


class Bench:
    """A copy of the sources, and a process that runs tests in it."""

    def __init__(self, folder: Path, tree: Path) -> None:
        """Copy `tree`: that of `copied_sources`."""
        self.tree = folder / "tree"
        self._output = folder / "output"
        shutil.copytree(tree, self.tree, symlinks=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        (folder / "left").mkdir()
        environment["TMPDIR"] = str(folder / "left")  # a fork ends without the clean-up of a process
        # In this folder there is no other `start_llm` or `tests` to import.
        self._worker = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *tests: str) -> Outcome:
        assert self._worker.stdin and self._worker.stdout
        command = [str(self.tree), str(self._output), *OPTIONS, *tests]
        self._worker.stdin.write(json.dumps(command) + "\n")
        self._worker.stdin.flush()
        return Outcome(int(self._worker.stdout.readline()), self._output.read_text())

    def close(self) -> None:
        self._worker.kill()
        self._worker.communicate()


def copied_sources(tree: Path, *, compiled: bool) -> Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    (tree / "models").symlink_to(ROOT / "models")
    if compiled:
        # By date and length, a patched source might be taken for the one before it.
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(tree, quiet=1, invalidation_mode=by_content)
    return tree


@contextmanager
def planted(tree: Path, mutant: Mutant) -> Generator[None]:
    before = {tree / edit.path: (tree / edit.path).read_text(encoding="utf-8") for edit in mutant.edits}
    try:
        for edit in mutant.edits:
            file = tree / edit.path
            file.write_text(edits.edited(file.read_text(encoding="utf-8"), edit), encoding="utf-8")
        yield
    finally:
        for file, source in before.items():
            file.write_text(source, encoding="utf-8")


def outcome_of(mutant: Mutant, benches: Benches) -> Outcome:
    with lent(benches) as bench, planted(bench.tree, mutant):
        return bench.run(mutant.test)


def outcome_unpatched(tests: Iterable[str], benches: Benches) -> Outcome:
    with lent(benches) as bench:
        return bench.run(*sorted({*tests}))


@contextmanager
def lent(benches: Benches) -> Generator[Bench]:
    """One that nobody else works at."""
    bench = benches.get()
    try:
        yield bench
    finally:
        benches.put(bench)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Outcome]]]:
    """By name of the mutant or of the file of tests, for those that this run asks for.

    They start together, and few run at once.
    """
    benches: Benches = queue.SimpleQueue()
    names = [item.name for item in request.session.items]
    wanted = [name for name in MUTANTS if any(f"[{name}]" in item for item in names)]
    are_few = len(wanted) <= FEW
    tree = copied_sources(tmp_path_factory.mktemp("sources") / "tree", compiled=not are_few)
    made = [Bench(tmp_path_factory.mktemp("mutants"), tree) for _ in range(1 if are_few else AT_ONCE)]
    for bench in made:
        benches.put(bench)
    with ThreadPoolExecutor(len(made)) as pool:
        started: dict[str, Future[Outcome]] = {}
        for file in FILES:
            if any(f"[{file}]" in name for name in names):
                by_name = {name: MUTANTS[name].test for name in MUTANTS if file_of(MUTANTS[name]) == file}
                tests = [by_name[name] for name in by_name if name in wanted] or [*by_name.values()]
                started[file] = pool.submit(outcome_unpatched, tests, benches)
        for name in wanted:
            started[name] = pool.submit(outcome_of, MUTANTS[name], benches)
        yield started
        pool.shutdown(wait=False, cancel_futures=True)
        for bench in made:
            bench.close()


# ------------------------------------------------------------------------------------------------------ tests


IN_CI = 24
LONG = {name for number, name in enumerate(MUTANTS) if number % IN_CI != len(MUTANTS) % IN_CI}
"""The mutants that CI leaves out: it runs one of 24, and others once there is a mutant more."""
FILES_IN_CI = {file_of(MUTANTS[name]) for name in MUTANTS.keys() - LONG}


def marked(name: str, *, is_long: bool) -> object:
    return pytest.param(name, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.thorough
@pytest.mark.checked(1)
@pytest.mark.parametrize("file", [marked(file, is_long=file not in FILES_IN_CI) for file in FILES])
def test_the_tests_that_find_mutants_pass_without_them(outcomes, file):
    """Those of the mutants that run beside them, or all."""
    outcome = outcomes[file].result()
    assert outcome.status == 0, outcome.output


def test_every_mutant_finds_its_place():
    """One that does not has to be made again: its symbol or its fragment is another now, or has moved
    (`python -m tests.mutants.edits`).
    """
    parse = cache(lambda path: ast.parse((ROOT / path).read_text(encoding="utf-8")))
    wrong: list[str] = []
    for mutant in MUTANTS.values():
        for edit in mutant.edits:
            try:
                edits.place_of(parse(edit.path), edit, edits.fragments(edit)[0])
            except (edits.NotThere, FileNotFoundError) as error:
                wrong.append(f"{mutant.name}: {error}")
    assert wrong == []


def test_the_test_of_each_mutant_is_there():
    missing: dict[str, str] = {}
    for mutant in MUTANTS.values():
        path, _, name = mutant.test.partition("::")
        if f"def {name.partition('[')[0]}(" not in (ROOT / path).read_text(encoding="utf-8"):
            missing[mutant.name] = mutant.test
    assert missing == {}


@pytest.mark.thorough
def test_ci_runs_the_test_of_each_mutant(request: pytest.FixtureRequest):
    """A whole run shows what CI selects: the tests that are left out by default are in it, like this one."""
    config = request.config
    if [Path(argument).resolve() for argument in config.args] != [ROOT / "tests"] or config.option.keyword:
        pytest.skip("only some of the tests were asked for")
    cases = {item.nodeid for item in request.session.items}
    selected = cases | {case.partition("[")[0] for case in cases}
    assert {name: mutant.test for name, mutant in MUTANTS.items() if mutant.test not in selected} == {}


@pytest.mark.thorough
@pytest.mark.checked(1)
@pytest.mark.parametrize("name", [marked(name, is_long=name in LONG) for name in MUTANTS])
def test_a_mutant_turns_its_test_red(outcomes, name):
    outcome = outcomes[name].result()
    failed = f"FAILED {MUTANTS[name].test.partition('[')[0]}"
    assert outcome.status == 1 and failed in outcome.output, f"not found by its test:\n{outcome.output}"
    assert not re.search(r"^ERROR |^E +(\w+\.)*(SyntaxError|ImportError|NameError)", outcome.output, re.M), (
        f"the edit breaks more than it should:\n{outcome.output}"
    )


def test_every_bug_that_is_known_has_a_mutant():
    planted_bugs = {int(name.partition("_")[0]) for name in MUTANTS}
    assert {number: bug for number, bug in BUGS.items() if number not in planted_bugs} == {}
