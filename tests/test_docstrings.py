"""Docstrings and the guide to the code name only what exists: arguments, attributes, functions, files."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "start_llm"
GUIDES = [ROOT / "docs" / "ARCHITECTURE.md", ROOT / "CLAUDE.md", *sorted((ROOT / ".claude/rules").iterdir())]
FOREIGN = {
    "NaN": "JSON's",
    "Infinity": "JSON's",
    "pyo3_runtime.PanicException": "what Rust's libraries raise",
    "free_memory": "of MLX' `device_info`",
    "bytes_to_unicode": "of transformers' GPT-2 tokenizer",
    "bash_20250124": "a type of Anthropic's tools",
    "_total": "the end of a counter's name in Prometheus' format",
}
"""Names in docstrings that are not of this project."""
_NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
_ENTRY = re.compile(r"^ {4}([A-Za-z_*][\w*, ]*?):(?:\s|$)", re.MULTILINE)

type Function = ast.FunctionDef | ast.AsyncFunctionDef
type Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Class:
    """What a class's docstring may name.

    Attributes:
        own: attributes, methods and fields, without those of its bases.
    """

    node: ast.ClassDef
    own: frozenset[str]

    @property
    def bases(self) -> list[str]:
        return [ast.unparse(base).partition("[")[0] for base in self.node.bases]

    @property
    def initializer(self) -> Function | None:
        functions = (part for part in self.node.body if isinstance(part, ast.FunctionDef))
        return next((part for part in functions if part.name == "__init__"), None)


@cache
def trees() -> dict[str, ast.Module]:
    """The modules of the package, by their path in it."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in files}


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """All nodes of each module, by its path; not those that tell loads from stores."""
    return {
        path: [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]
        for path, tree in trees().items()
    }


def documented(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, Documented, str]]:
    """Everything with a docstring: its name, itself, and the docstring."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield getattr(node, "name", "module"), node, text


def entries(text: str, section: str) -> list[str]:
    """The names that a section of a docstring explains."""
    match = re.search(rf"^{section}:\n((?: {{4}}.*\n|\n)+)", text + "\n", re.MULTILINE)
    names = [
        name.strip(" *") for entry in _ENTRY.findall(match[1] if match else "") for name in entry.split(",")
    ]
    return [name for name in names if name.isidentifier()]


def parameters(function: Function) -> set[str]:
    """The names of a function's parameters."""
    given = function.args
    starred = [argument for argument in (given.vararg, given.kwarg) if argument]
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, *starred)}


@cache
def classes() -> dict[str, Class]:
    """All classes of the package, by name."""
    every = [node for module in nodes().values() for node in module if isinstance(node, ast.ClassDef)]
    return {node.name: Class(node, frozenset(_attributes(node))) for node in every}


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        match part:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case _:
                pass


def attributes_of(name: str) -> set[str]:
    """The attributes of a class, with those of its bases in the package."""
    entry = classes().get(name)
    return {*entry.own, *(attr for base in entry.bases for attr in attributes_of(base))} if entry else set()


def parameters_of(name: str) -> set[str]:
    """What makes an instance: the parameters of `__init__`, or the fields."""
    entry = classes().get(name)
    if entry is None:
        return set()
    own = parameters(entry.initializer) if entry.initializer else set(entry.own)
    return own if entry.initializer else {*own, *(arg for base in entry.bases for arg in parameters_of(base))}


@cache
def known_names() -> frozenset[str]:
    """Every identifier, short string and file name of the package, and Python's own names."""
    return frozenset(dir(builtins)) | {name for path in trees() for name in _names_in(path)}


def _names_in(path: str) -> Iterator[str]:
    yield from re.findall(r"\w+", path)
    for node in nodes()[path]:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                yield name if name.isidentifier() else ""
            case ast.alias(name=name):
                yield from name.split(".")
            case ast.TypeAlias(name=ast.Name(id=name)) | ast.TypeVar(name=name):
                yield name
            case _:
                pass


def unknown_names(text: str) -> list[str]:
    """The names in back-ticks that nothing in the package has."""
    names = [name for name in _NAME.findall(text) if name not in FOREIGN and not (ROOT / name).exists()]
    return [name for name in names if not known_names().issuperset(name.split("."))]


def wrong_in(node: Documented, text: str) -> Iterator[str]:
    """What a docstring names that does not exist."""
    yield from (f"`{name}`" for name in unknown_names(text))
    if isinstance(node, ast.Module):
        return
    is_class = isinstance(node, ast.ClassDef)
    allowed = parameters_of(node.name) if is_class else parameters(node)
    yield from (f"argument {name}" for name in entries(text, "Args") if name not in allowed)
    if is_class:
        known = attributes_of(node.name)
        yield from (f"attribute {name}" for name in entries(text, "Attributes") if name not in known)


def test_docstrings_name_what_exists():
    docstrings = [(path, *item) for path, module in nodes().items() for item in documented(module)]
    assert len(docstrings) > 3000
    assert [
        f"{path}, {name}: {item}" for path, name, node, text in docstrings for item in wrong_in(node, text)
    ] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_a_guide_to_the_code_names_what_exists(guide: Path):
    """`tests/test_readme.py` looks up the paths of files."""
    assert unknown_names(guide.read_text(encoding="utf-8")) == []


def test_what_is_gone_is_found():
    assert unknown_names("Calls `begin` and `gone_long_ago`, see `Nothing.of_it`.") == [
        "gone_long_ago",
        "Nothing.of_it",
    ]
    text = "Sum.\n\nArgs:\n    first, *rest: numbers.\n    gone: not\n        there.\n\nRaises:\n    X"
    assert entries(text, "Args") == ["first", "rest", "gone"]
    assert entries(text, "Attributes") == []
    function = ast.parse("def f(first, /, second, *rest, third, **more): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert parameters(function) == {"first", "second", "rest", "third", "more"}


def test_no_foreign_name_is_kept_that_no_docstring_has():
    texts = [text for module in nodes().values() for _, _, text in documented(module)]
    names = {name for text in texts for name in _NAME.findall(text)}
    assert set(FOREIGN) <= names
