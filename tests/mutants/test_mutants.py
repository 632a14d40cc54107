"""Every guard of the cache has a mutant: a patch that plants a bug, and a test that it turns red.

A patch begins with two lines, and a blank one:

    bug: what it plants
    test: tests/cache/test_x.py::test_y

It is a diff against the root of the repository. One that no longer applies is made again: change the code by
hand, `git diff -U2 > FILE`, put the two lines in front, and take the change back.

By default every patch is tried for whether it applies. `scripts/check --all` runs all mutants, and
`scripts/check --changed` those that a change concerns.

A named test runs without plugins and without `tests/conftest.py`, which take longer than the test itself. So
it may only use fixtures of its own file.
"""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import queue
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("start_llm", "tests", "scripts", "pyproject.toml")
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))
WORKER = Path(__file__).with_name("worker.py")
OPTIONS = (
    *("-m", ""),
    *"-x --noconftest --tb=short --assert=plain -o timeout=60 -p no:cacheprovider -p pytest_timeout".split(),
)
HEADER = re.compile(r"bug: (?P<bug>.+)\ntest: (?P<test>tests/\S+\.py::.+)\n\n--- a/start_llm/")
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
"""By the number that the names of their patches begin with. Higher numbers are further guards."""


type Benches = queue.SimpleQueue[Bench]


@dataclass(frozen=True)
class Mutant:
    """A patch, and the test that finds what it plants."""

    patch: Path
    test: str


def mutant(patch: Path) -> Mutant:
    header = HEADER.match(patch.read_text())
    assert header, f"{patch.name} does not begin with `bug: ...`, `test: ...`, a blank line and a diff"
    return Mutant(patch, header["test"])


def file_of(patch: Path) -> str:
    """Of the test that finds what `patch` plants."""
    return mutant(patch).test.partition("::")[0]


FILES = sorted({file_of(patch) for patch in PATCHES})


# --------------------------------------------------------------------------------------------------- planting


@dataclass(frozen=True)
class Outcome:
    """pytest's output, and its exit status."""

    status: int
    output: str


class Bench:
    """A copy of the sources, and a process that runs tests in it."""

    def __init__(self, folder: Path, *, compiled: bool) -> None:
        self.tree = folder / "tree"
        self._output = folder / "output"
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, self.tree / name)
        (self.tree / "models").symlink_to(ROOT / "models")
        if compiled:
            # By date and length, a patched source might be taken for the one before it.
            by_content = py_compile.PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(self.tree, quiet=1, invalidation_mode=by_content)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
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


@contextmanager
def planted(tree: Path, patch: Path) -> Generator[None]:
    apply(tree, patch)
    try:
        yield
    finally:
        apply(tree, patch, "--reverse")


def apply(tree: Path, patch: Path, *options: str) -> None:
    # As if there were no repository: inside of one, `git apply` passes over what lies elsewhere.
    settings = {"GIT_DIR": os.devnull, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "apply", *options, str(patch)],
        cwd=tree,
        env=environment | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{patch.name} does not fit the code any more; make it again:\n{done.stderr}"


def outcome_of(one: Mutant, benches: Benches) -> Outcome:
    with lent(benches) as bench, planted(bench.tree, one.patch):
        return bench.run(one.test)


def outcome_unpatched(file: str, benches: Benches) -> Outcome:
    with lent(benches) as bench:
        return bench.run(*sorted({mutant(patch).test for patch in PATCHES if file_of(patch) == file}))


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
    """By name of the patch or of the file of tests, for those that this run asks for.

    They start together, and few run at once.
    """
    benches: Benches = queue.SimpleQueue()
    names = [item.name for item in request.session.items]
    wanted = [patch for patch in PATCHES if any(f"[{patch.stem}]" in name for name in names)]
    are_few = len(wanted) <= FEW
    made = [
        Bench(tmp_path_factory.mktemp("mutants"), compiled=not are_few)
        for _ in range(1 if are_few else AT_ONCE)
    ]
    for bench in made:
        benches.put(bench)
    with ThreadPoolExecutor(len(made)) as pool:
        started: dict[str, Future[Outcome]] = {}
        for file in FILES:
            if any(f"[{file}]" in name for name in names):
                started[file] = pool.submit(outcome_unpatched, file, benches)
        for patch in wanted:
            started[patch.stem] = pool.submit(outcome_of, mutant(patch), benches)
        yield started
        pool.shutdown(wait=False, cancel_futures=True)
        for bench in made:
            bench.close()


# ------------------------------------------------------------------------------------------------------ tests


@pytest.mark.thorough
@pytest.mark.parametrize("file", FILES)
def test_the_tests_that_find_mutants_pass_without_them(outcomes, file):
    outcome = outcomes[file].result()
    assert outcome.status == 0, outcome.output


def hunks(patch: Path) -> Iterator[tuple[str, str]]:
    """The file that each hunk of a patch changes, and the lines that it expects there."""
    for name, changes in re.findall(
        r"^\+\+\+ b/(\S+)\n((?:[-+ @\\].*\n|\n)+?)(?=--- a/|\Z)", patch.read_text(), re.M
    ):
        for hunk in re.split(r"^@@ .*\n", changes, flags=re.M)[1:]:
            yield (
                name,
                "".join(line[1:] or "\n" for line in hunk.splitlines(keepends=True) if line[0] not in "+\\"),
            )


def test_every_patch_finds_its_lines():
    """The runs of all mutants apply them."""
    found = {patch: list(hunks(patch)) for patch in PATCHES}
    assert all(len(each) == patch.read_text().count("\n@@ ") for patch, each in found.items())
    sources = {name: (ROOT / name).read_text() for each in found.values() for name, _ in each}
    assert [
        patch.name for patch, each in found.items() if any(lines not in sources[name] for name, lines in each)
    ] == []


@pytest.mark.thorough
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_mutant_turns_its_test_red(outcomes, patch):
    outcome = outcomes[patch.stem].result()
    failed = f"FAILED {mutant(patch).test.partition('[')[0]}"
    assert outcome.status == 1 and failed in outcome.output, f"not found by its test:\n{outcome.output}"
    assert not re.search(r"^ERROR |^E +(\w+\.)*(SyntaxError|ImportError|NameError)", outcome.output, re.M), (
        f"the patch breaks more than it should:\n{outcome.output}"
    )


def test_every_bug_that_is_known_has_a_mutant():
    planted_bugs = {int(patch.name[:2]) for patch in PATCHES}
    assert {number: bug for number, bug in BUGS.items() if number not in planted_bugs} == {}
