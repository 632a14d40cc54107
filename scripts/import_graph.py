"""Which module of this repository imports which, read from the sources without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePath

type Sources = Mapping[str, str]
"""Dotted module name to source text."""

COMPUTED = "?"
"""The name of a module that is computed when the program runs."""


def module_name(path: PurePath) -> str:
    """Of a file, by its path below the root of the repository."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_sources(root: Path, files: Iterable[Path]) -> dict[str, str]:
    """The sources of modules; `files` lie below `root`."""
    return {module_name(path.relative_to(root)): path.read_text(encoding="utf-8") for path in files}


def read_package(folder: Path) -> dict[str, str]:
    return read_sources(folder.parent, sorted(folder.rglob("*.py")))


def imports(module: str, text: str, sources: Sources) -> Iterator[str]:
    """Every module that `module` imports, wherever the import stands, and whatever form it has.

    `from start_llm import x` means the module x where there is one, else the package. Imports for types alone
    count too. A dynamic import counts by its argument, and is `COMPUTED` if that is not plain text.
    """
    for node in _nodes(text):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(names=names, level=level, module=base):
                origin = _absolute(module, level, base or "", sources)
                for alias in names:
                    inner = f"{origin}.{alias.name}"
                    yield inner if inner in sources or alias.name == "*" else origin
            case ast.Call(func=ast.Name(id="__import__" | "import_module"), args=[first, *_]):
                yield _text_of(first)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[first, *_]):
                yield _text_of(first)
            case _:
                pass


def texts(text: str) -> Iterator[str]:
    """Every string of a source, with the plain parts of f-strings."""
    return (
        node.value for node in _nodes(text) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@cache
def _nodes(text: str) -> tuple[ast.AST, ...]:
    """All that may be an import, and all strings."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return tuple(
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )


def _is_package(module: str, sources: Sources) -> bool:
    return any(other.startswith(f"{module}.") for other in sources)


def _absolute(module: str, level: int, base: str, sources: Sources) -> str:
    if not level:
        return base
    parts = module.split(".")
    kept = parts[: len(parts) - level + _is_package(module, sources)]
    return ".".join([*kept, *([base] if base else [])])


def _text_of(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else COMPUTED
