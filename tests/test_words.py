"""Names are nouns of the field, not words that could mean anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "start_llm"
BANNED = frozenset("bell found hurt looked said seat told twin".split())
"""Also `one` as a whole name, which says nothing of what is gone through."""
READ = tuple(
    """
    access audit cache commands config core doctor formats hosting images output prompt proxy server storage
    telemetry transcripts wiring
    """.split()
)
"""The folders whose names have been read with this in mind; the others follow."""
LATER = frozenset({"cache/checkpoints.py", "core/battery.py"})
"""Files of these folders that follow, too."""
_STATUS_NAME = "NotFound"
"""HTTP's own name of status 404."""
_WORDS = re.compile(r"[A-Z]?[a-z]+")


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each name that a module gives to something, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case _:
                pass


@pytest.mark.parametrize("folder", READ)
def test_no_name_has_a_word_that_could_mean_anything(folder: str):
    banned = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in LATER
        for line, name in bound_names(ast.parse(path.read_text(encoding="utf-8")))
        if is_banned(name)
    ]
    assert banned == []


def is_banned(name: str) -> bool:
    words = {word.lower() for word in _WORDS.findall(name.replace(_STATUS_NAME, ""))}
    return name == "one" or not BANNED.isdisjoint(words)


def test_words_are_seen_in_every_kind_of_name():
    tree = ast.parse(
        "def one_more(told, *, isSaid): self.found_at = NotFound = looked = seatbelt = [one for one in told]"
    )
    names = [name for _, name in bound_names(tree) if is_banned(name)]
    assert sorted(names) == ["found_at", "isSaid", "looked", "one", "told"]
