"""What all benchmarks share: programs with parts, their options, rounds that alternate, and tables.

A program is a module of this folder with `PARTS`, functions by name. Each gets an empty folder, and its
keyword-only parameters are its options: the annotation says what is parsed, the default is the part's own,
and the `Args` of its docstring are the help. A part returns a sentence for each thing that must not be; the
exit status is 1 if there are any. A program that reads its arguments itself has `main` instead of `PARTS`.
"""

import argparse
import ast
import importlib
import inspect
import os
import platform
import re
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAliasType, get_args, get_origin, get_type_hints
from unittest.mock import patch

type Part = Callable[..., Iterable[str] | None]

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent


def main(arguments: Sequence[str]) -> int:
    """Run a program, or list all of them. Returns the exit status."""
    programs = list_programs()
    if not arguments or arguments[0] not in programs:
        print("\n".join(f"{name:12} {shows}" for name, shows in programs.items()))
        return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
    name, *rest = arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a clean end: nothing is left running
    module = importlib.import_module(f"benchmarks.{name}")
    return module.main(rest) if hasattr(module, "main") else _run(name, module, rest)


def list_programs() -> dict[str, str]:
    """Each program with the first line of its docstring."""
    paths = [path for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__)]
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    return {
        name: (ast.get_docstring(tree) or "").split("\n")[0] for name, tree in trees.items() if _runs(tree)
    }


def _runs(tree: ast.Module) -> bool:
    """It has parts, or reads its arguments itself."""
    assigned = [ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)]
    return "PARTS" in assigned or any(
        isinstance(statement, ast.FunctionDef) and statement.name == "main" for statement in tree.body
    )


def _run(name: str, module: Any, arguments: Sequence[str]) -> int:
    options = vars(parser_of(name, module).parse_args(arguments))
    print(f"{machine(*getattr(module, 'PACKAGES', ('mlx', 'mlx-lm')))}\n", flush=True)
    print(f"    python -m benchmarks {shlex.join([name, *arguments])}", flush=True)
    return 1 if sum(_play(module.PARTS[part], options) for part in options["only"]) else 0


def _play(part: Part, options: Mapping[str, Any]) -> int:
    """Run a part with what was asked for, in a folder that holds its state and logs too.

    Returns:
        How many things were not as they have to be.
    """
    asked = {option: options[option] for option in _parameters(part) if options[option] is not None}
    wrong = 0
    with tempfile.TemporaryDirectory() as root, patch.dict(os.environ):
        os.environ |= {"STATE_ROOT": f"{root}/state", "LOG_ROOT": f"{root}/logs"}
        folder = Path(root) / "part"
        folder.mkdir()
        print()
        for problem in part(folder, **asked) or ():
            print(f"NOT AS IT HAS TO BE: {problem[:2000]}", flush=True)
            wrong += 1
    return wrong


def refuse(why: str) -> NoReturn:
    """End the program: its options do not go together."""
    print(why, file=sys.stderr)
    raise SystemExit(2)


def parser_of(program: str, module: Any) -> argparse.ArgumentParser:
    """What reads the arguments of a program: `--only`, and the options of all its parts."""
    parts: Mapping[str, Part] = module.PARTS
    shown = "\n\n".join(f"{name}: {inspect.getdoc(part)}" for name, part in parts.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {program}",
        description=f"{module.__doc__}\n{shown}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), metavar="PART")
    kinds: dict[str, Any] = {}
    helps: dict[str, list[str]] = {}
    for name, part in parts.items():
        for option, (kind, default) in _parameters(part).items():
            kinds[option] = kind
            helps.setdefault(option, []).append(f"{name}: {_help(part, option)}{_shown(default)}")
    for option, kind in kinds.items():
        parser.add_argument(f"--{option.replace('_', '-')}", help="; ".join(helps[option]), **_parsing(kind))
    return parser


def _parameters(part: Part) -> dict[str, tuple[Any, Any]]:
    """The options of a part, each with its annotation and default."""
    hints = get_type_hints(part, include_extras=True)
    parameters = inspect.signature(part).parameters.values()
    return {
        parameter.name: (hints[parameter.name], parameter.default)
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def _help(part: Part, option: str) -> str:
    line = re.search(rf"^ *{option}: (.*)$", inspect.getdoc(part) or "", re.MULTILINE)
    return line[1] if line else ""


def _shown(default: Any) -> str:
    if default in (None, (), False):
        return ""
    several = isinstance(default, Sequence) and not isinstance(default, str)
    return f" (default: {' '.join(map(str, default)) if several else default})".replace("%", "%%")


def _parsing(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of this type; `Annotated` adds the choices."""
    choices: Any = None
    kind = kind.__value__ if isinstance(kind, TypeAliasType) else kind
    if get_origin(kind) is Annotated:
        kind, choices = get_args(kind)
    if kind is bool:
        return {"action": "store_true", "default": None}
    given = [member for member in get_args(kind) if member is not type(None)]
    options = {"type": given[0] if given else kind, "choices": choices and list(choices), "metavar": None}
    return options | ({"nargs": "+"} if get_origin(kind) is Sequence else {})


# ----------------------------------------------------------------------------------------- figures and tables


def machine(*packages: str) -> str:
    """System, cores, versions of `packages` and BLAS, for the head of a table."""
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    blas = Path(os.environ["LD_PRELOAD"]).name if os.environ.get("LD_PRELOAD") else "bundled BLAS"
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return f"{system}, Python {platform.python_version()}, {versions}, {blas}"


def table(head: str) -> None:
    """Print the head of a table, whose headings have ` | ` between them."""
    row(head)
    print(f"|{'---|' * (1 + head.count(' | '))}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def alternate[Figure](
    rounds: int, *sides: Callable[[int], Figure], warm_up: int = 0
) -> list[tuple[Figure, ...]]:
    """Run the sides in turn, each with the number of its round; who begins changes.

    Args:
        warm_up: rounds before these, which are not returned.

    Returns:
        For each round what the sides returned, in the order of `sides`.
    """
    measured: list[tuple[Figure, ...]] = []
    for number in range(warm_up + rounds):
        places = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        results = {place: sides[place](number) for place in places}
        measured.append(tuple(results[place] for place in range(len(sides))))
    return measured[warm_up:]


def medians(rounds: Iterable[Sequence[float]]) -> list[float]:
    """The median of each side."""
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def ratio(rounds: Iterable[Sequence[float]]) -> float:
    """The median of the first side over the second one, round by round."""
    return statistics.median(first / second for first, second, *_ in rounds)
