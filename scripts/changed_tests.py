"""The tests that a change may break: those that import what changed, and its mutants.

    python -m scripts.changed_tests [BASE]

prints what pytest has to run, one a line: test files, then mutants. What changed is what differs from BASE,
committed or not. Without BASE that is the commit that this branch and origin/main have in common, or the one
before the last where there is no origin/main.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from scripts.import_graph import COMPUTED, Sources, imports, module_name, read_sources, texts

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = "start_llm"
CODE = (PROGRAM, "tests", "scripts", "benchmarks", "install_and_run.py")
MUTANTS = "tests/mutants"
MUTANT_TEST = f"{MUTANTS}/test_mutants.py::test_a_mutant_turns_its_test_red"
LEFT_OUT = ("pytestmark = [pytest.mark.clients", "pytestmark = [pytest.mark.real")
"""How files begin whose tests need what most machines have not."""
EVERY_TEST = frozenset({"pyproject.toml"})
"""Files that change how every test runs."""

type Graph = Mapping[str, set[str]]
"""Module to the modules that it needs."""


class Repository(NamedTuple):
    """The sources, paths and mutants of the repository, so that nothing below reads a file.

    Attributes:
        sources: by dotted name.
        paths: of each of them, below the root.
        mutants: texts of their files, by name.
    """

    sources: Sources
    paths: Mapping[str, str]
    mutants: Mapping[str, str]


# ------------------------------------------------------------------------------------------------- selection


def selected(repository: Repository, changed: Iterable[str]) -> list[str]:
    """The arguments for pytest. `changed` are paths below the root; their files may be gone."""
    changed = set(changed)
    graph = needs(repository)
    modules = {module for path in changed for module in changed_modules(path, repository)}
    affected = dependents(graph, modules)
    tests = sorted(repository.paths[module] for module in affected if is_test(module, repository.sources))
    return tests + [f"{MUTANT_TEST}[{name}]" for name in mutants(repository.mutants, changed)]


def is_test(module: str, sources: Sources) -> bool:
    """A file of tests that a plain run collects."""
    name = module.rpartition(".")[2]
    return (
        module.startswith("tests.")
        and name.startswith("test_")
        and not any(mark in sources[module] for mark in LEFT_OUT)
    )


def dependents(graph: Graph, changed: set[str]) -> set[str]:
    """The changed modules and all that need one of them, however far away."""
    affected, before = set(changed), set[str]()
    while affected != before:
        before = set(affected)
        affected |= {module for module, needed in graph.items() if not needed.isdisjoint(before)}
    return affected


def changed_modules(path: str, repository: Repository) -> Iterator[str]:
    """A module, or those that read this file: the ones beside it and the ones that name it."""
    if path in EVERY_TEST:
        yield from repository.sources
    elif path.endswith(".py"):
        yield module_name(PurePath(path))
    elif not path.startswith(f"{MUTANTS}/"):
        yield from _beside(path, repository.paths)
        names = {PurePath(path).name, path, *_own_folder(path)}
        yield from (
            module
            for module, text in repository.sources.items()
            if not names.isdisjoint(_texts_of_test(module, text))
        )


def _own_folder(path: str) -> list[str]:
    """The name of the folder, for files that are found with others of their folder, as those of a model."""
    parts = PurePath(path).parts
    return [parts[-2]] if len(parts) > 2 else []


def _beside(path: str, paths: Mapping[str, str]) -> list[str]:
    """The modules of the nearest folder above that has some; scripts and tests themselves hold no data."""
    for folder in list(PurePath(path).parents)[:-2]:
        if neighbours := [module for module, other in paths.items() if PurePath(other).parent == folder]:
            return neighbours
    return []


def mutants(texts_of_mutants: Mapping[str, str], changed: set[str]) -> list[str]:
    """Those whose own file, edited file or test changed."""
    return [
        PurePath(name).stem
        for name, text in sorted(texts_of_mutants.items())
        if not changed.isdisjoint({f"{MUTANTS}/{name}", *_touched(text)})
    ]


def _touched(mutant: str) -> list[str]:
    return re.findall(r"^(?:test|in): ([^\s:]+)", mutant, re.MULTILINE)


# ----------------------------------------------------------------------------------------------------- graph


def needs(repository: Repository) -> Graph:
    """Map each module to what it imports, names as a program to start, or gets as fixtures."""
    sources = repository.sources
    programs = _programs(repository.paths)
    return {
        module: {
            *_imported(module, text, sources),
            *(other for name in _texts_of_test(module, text) for other in programs.get(name, ())),
            *_conftests(module, sources),
        }
        for module, text in sources.items()
    }


def _imported(module: str, text: str, sources: Sources) -> Iterator[str]:
    """With the packages of each module, which run first.

    A package that imports by a computed name imports its own modules. What a fixture in a conftest imports
    is left out: the tests that ask for it import it themselves, and all others do without.
    """
    seen = _without_functions(text) if module.endswith(".conftest") else text
    for name in imports(module, seen, sources):
        if name == COMPUTED:
            yield from (other for other in sources if other.startswith(f"{module}."))
        if (sibling := f"{module.rpartition('.')[0]}.{name}") in sources:
            yield sibling  # as a script imports what stands beside it
        parts = name.split(".")
        yield from (
            package for end in range(len(parts)) if (package := ".".join(parts[: end + 1])) in sources
        )


def _without_functions(text: str) -> str:
    body = [node for node in ast.parse(text).body if not isinstance(node, ast.FunctionDef)]
    return ast.unparse(ast.Module(body, type_ignores=[]))


def _texts_of_test(module: str, text: str) -> Iterable[str]:
    return texts(text) if module.startswith("tests.") else ()


def _programs(paths: Mapping[str, str]) -> Mapping[str, list[str]]:
    """Yield what a string may name: the whole program, a file of the root, a script with or without `.py`."""
    named: dict[str, list[str]] = {PROGRAM: [module for module in paths if _is_of(PROGRAM, module)]}
    for module, path in paths.items():
        parts = PurePath(path).parts
        if len(parts) == 1 or parts[0] in ("scripts", "benchmarks"):
            named.setdefault(parts[-1], []).append(module)
        if parts[0] == "scripts":
            named.setdefault(PurePath(path).stem, []).append(module)
    return named


def _is_of(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _conftests(module: str, sources: Sources) -> Iterator[str]:
    parts = module.split(".")[:-1]
    above = (".".join([*parts[: end + 1], "conftest"]) for end in range(len(parts)))
    return (conftest for conftest in above if conftest in sources and conftest != module)


# ------------------------------------------------------------------------------------------------ repository


def read_repository(root: Path) -> Repository:
    files = sorted(
        path
        for place in CODE
        for path in ((root / place).rglob("*.py") if (root / place).is_dir() else [root / place])
    )
    paths = {module_name(path.relative_to(root)): str(path.relative_to(root)) for path in files}
    mutant_texts = {path.name: path.read_text(encoding="utf-8") for path in (root / MUTANTS).glob("*.mutant")}
    return Repository(read_sources(root, files), paths, mutant_texts)


def changed_files(root: Path, base: str | None) -> list[str]:
    """Paths that differ from the base, and those that git does not know yet."""
    changed = _git(root, "diff", "--name-only", "--no-renames", base or _usual_base(root))
    return [*changed, *_git(root, "ls-files", "--others", "--exclude-standard")]


def _usual_base(root: Path) -> str:
    try:
        return _git(root, "merge-base", "HEAD", "origin/main")[0]
    except subprocess.CalledProcessError:
        return "HEAD~1"


def _git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)  # noqa: S607
    return done.stdout.splitlines()


def main(arguments: Sequence[str]) -> int:
    base = arguments[0] if arguments else None
    try:
        changed = changed_files(ROOT, base)
    except subprocess.CalledProcessError as error:
        print(error.stderr.strip(), file=sys.stderr)
        return 1
    print(*selected(read_repository(ROOT), changed), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
