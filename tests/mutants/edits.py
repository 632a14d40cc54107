"""Mutants: edits of named functions, independent of lines and format, so that moves and rewrites spare them.

A mutant is a file of text:

    bug: what it plants
    test: tests/cache/test_x.py::test_y

    in: start_llm/cache/page_store.py::PageStore.discard
    old:
        self.forget(seq_cache)
    new:
        pass

`in` names a function, a method or a class, or nothing behind `::` for the whole module. `old` is an
expression, or statements that follow each other; it stands there exactly once, however it is laid out. `new`
takes its place. A mutant may have several edits.

    .venv/bin/python -m tests.mutants.edits       write the new places of symbols that have moved
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "start_llm"
_HEADER = re.compile(r"bug: (?P<bug>.+)\ntest: (?P<test>tests/\S+\.py::.+)\n\n(?=in: )")
_EDIT = re.compile(
    r"in: (?P<path>\S+?)::(?P<symbol>\S*)\nold:\n(?P<old>(?:    .*\n|\n)+?)new:\n(?P<new>(?:    .*\n|\n)+)"
)
_INDENT = "    "

type Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
type Place = Definition | ast.Module
type Fragment = ast.expr | list[ast.stmt]


class NotThere(LookupError):
    """An edit finds no place, or several."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the source.

    Attributes:
        path: of the file, below the root.
        symbol: qualified name in it; empty for the module.
        old, new: fragments of Python.
    """

    path: str
    symbol: str
    old: str
    new: str

    @property
    def place(self) -> str:
        return f"{self.path}::{self.symbol}"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug, and the test that finds it."""

    name: str
    bug: str
    test: str
    edits: tuple[Edit, ...]

    def text(self) -> str:
        """Return the content of its file."""
        edits = (
            f"in: {edit.place}\nold:\n{textwrap.indent(edit.old, _INDENT)}\n"
            f"new:\n{textwrap.indent(edit.new, _INDENT)}\n"
            for edit in self.edits
        )
        return f"bug: {self.bug}\ntest: {self.test}\n\n" + "\n".join(edits)


def read(path: Path) -> Mutant:
    """Read the file of a mutant.

    Raises:
        ValueError: it has another form.
    """
    text = path.read_text(encoding="utf-8")
    header = _HEADER.match(text)
    edits = tuple(
        Edit(raw["path"], raw["symbol"], *(textwrap.dedent(raw[part]).strip("\n") for part in ("old", "new")))
        for raw in _EDIT.finditer(text)
    )
    if header is None or not edits or text.count("\nin: ") != len(edits):
        raise ValueError(f"{path.name} is no mutant: see tests/mutants/edits.py")
    return Mutant(path.stem, header["bug"], header["test"], edits)


def edited(source: str, edit: Edit) -> str:
    """Return a module's source with an edit.

    Raises:
        NotThere: its symbol or its old fragment is not there, or more than once.
        SyntaxError: a fragment is no Python.
    """
    module = ast.parse(source)
    old, new = fragments(edit)
    place_of(module, edit, old).put(new)
    return ast.unparse(ast.fix_missing_locations(module))


def place_of(module: ast.Module, edit: Edit, old: Fragment) -> FragmentPlace:
    """Return where the old fragment of an edit stands.

    Raises:
        NotThere: nowhere, or more than once, or there is no such symbol.
    """
    definition = definition_of(module, edit.symbol)
    if definition is None:
        raise NotThere(f"there is no {edit.place}")
    places = _runs(definition, old) if isinstance(old, list) else _expressions(definition, old)
    if len(places) != 1:
        raise NotThere(f"{edit.place} has {len(places)} times: {edit.old}")
    return places[0]


def definition_of(module: ast.Module, symbol: str) -> Place | None:
    """Return what has this qualified name; None if nothing has."""
    place: Place = module
    for name in filter(None, symbol.split(".")):
        inside = (node for node in _body_of(place) if isinstance(node, _DEFINITIONS) and node.name == name)
        child = next(inside, None)
        if child is None:
            return None
        place = child
    return place


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _body_of(place: Place) -> Iterator[ast.stmt]:
    """Yield the statements of a body, those of its conditions and of `with` blocks too."""
    waiting: list[ast.stmt] = list(place.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, _DEFINITIONS):
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def fragments(edit: Edit) -> tuple[Fragment, Fragment]:
    """Return the old fragment and the new one. Both are statements if one is."""
    old, new = _fragment(edit.old), _fragment(edit.new)
    return [ast.Expr(old)] if isinstance(new, list) and not isinstance(old, list) else old, new


def _fragment(text: str) -> Fragment:
    """Return a fragment's expression, or its statements."""
    body = ast.parse(text).body
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else body


@dataclass(frozen=True, slots=True)
class FragmentPlace:
    """Where a fragment stands: a field of a node, or some of the nodes in a list."""

    parent: ast.AST
    field: str
    start: int | None = None
    length: int = 1

    def put(self, new: Fragment) -> None:
        if self.start is None:
            setattr(self.parent, self.field, new)
            return
        nodes = getattr(self.parent, self.field)
        is_body = isinstance(nodes[self.start], ast.stmt)
        fresh = [ast.Expr(new)] if is_body and isinstance(new, ast.expr) else new
        nodes[self.start : self.start + self.length] = fresh if isinstance(fresh, list) else [fresh]


def _expressions(place: Place, old: ast.expr) -> list[FragmentPlace]:
    wanted, places = shape(old), list[FragmentPlace]()
    for parent in ast.walk(place):
        for field, value in ast.iter_fields(parent):
            if type(value) is type(old) and shape(value) == wanted:
                places.append(FragmentPlace(parent, field))
            elif isinstance(value, list):
                places += [
                    FragmentPlace(parent, field, index)
                    for index, node in enumerate(value)
                    if type(node) is type(old) and shape(node) == wanted
                ]
    return places


def _runs(place: Place, old: Sequence[ast.stmt]) -> list[FragmentPlace]:
    wanted, places, kinds = [shape(node) for node in old], list[FragmentPlace](), set(map(type, old))
    for parent in ast.walk(place):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                shapes = [shape(node) if type(node) in kinds else "" for node in value]
                places += [
                    FragmentPlace(parent, field, start, len(wanted))
                    for start in range(len(shapes) - len(wanted) + 1)
                    if shapes[start : start + len(wanted)] == wanted
                ]
    return places


def shape(node: ast.AST) -> str:
    """Return what a fragment says, whether it is read or assigned to, and wherever it stands."""
    return re.sub(r", ctx=(Load|Store|Del)\(\)|ctx=(Load|Store|Del)\(\)", "", ast.dump(node))


# ------------------------------------------------------------------------------------------------------ moves


def moved(mutant: Mutant, paths: Iterable[Path]) -> Mutant:
    """Return a mutant with the present places of its symbols, where each is in one file alone.

    Args:
        paths: of all modules.
    """
    modules = {str(path.relative_to(ROOT)): path for path in paths}
    return replace(mutant, edits=tuple(_moved(edit, modules) for edit in mutant.edits))


def _moved(edit: Edit, modules: dict[str, Path]) -> Edit:
    if edit.path in modules and _fits(edit, modules[edit.path]):
        return edit
    fitting = [name for name, path in modules.items() if _fits(edit, path)]
    return replace(edit, path=fitting[0]) if len(fitting) == 1 else edit


def _fits(edit: Edit, path: Path) -> bool:
    try:
        place_of(ast.parse(path.read_text(encoding="utf-8")), edit, fragments(edit)[0])
    except NotThere:
        return False
    return True


def main() -> None:
    """Write the files of mutants anew whose symbols have moved."""
    modules = sorted((ROOT / PACKAGE).rglob("*.py"))
    for path in sorted(Path(__file__).parent.glob("*.mutant")):
        mutant = read(path)
        if (updated := moved(mutant, modules)) != mutant:
            path.write_text(updated.text(), encoding="utf-8")
            print(path.name)


if __name__ == "__main__":
    main()
