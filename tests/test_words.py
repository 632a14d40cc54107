"""Names are nouns of the field, not words that could mean anything; prose uses the field's words too."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "start_llm"
BANNED = frozenset("bell found hurt looked said seat told twin".split())
"""Also `one` as a whole name, which says nothing of what is gone through."""
BANNED_IN_TESTS = frozenset("bell hurt seat told twin".split())
"""In names of tests, which are sentences: reported, noted, refused or damaged say what is meant."""
BANNED_IN_PROSE = frozenset("bell bells hurt seat seats told twin twins".split())
"""In documents, docstrings and comments: reported, written, notified, recognized or damaged say which."""
_BANNED_IN_PROSE = re.compile(rf"\b(?:{'|'.join(sorted(BANNED_IN_PROSE))})\b", re.IGNORECASE)
_CODE = re.compile(r"```.*?```|`[^`\n]+`|^\|[^\n]*", re.DOTALL | re.MULTILINE)
"""Code, and rows of tables, in a document: what is written there may be the name of a field."""
DOCUMENTS = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "CLAUDE.md",
            "benchmarks/RESULTS.md",
            ".context/LESSONS.md",
        )
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = ("benchmarks", "scripts")
_STATUS_NAMES = re.compile("NotFound|NOT_FOUND")
"""HTTP's own name of status 404."""
_WORDS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
FOLDERS = [*sorted(path.name for path in PACKAGE.iterdir() if [*path.rglob("*.py")]), "."]


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each name that a module gives to something, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case (
                ast.arg(arg=str(name))
                | ast.alias(asname=str(name))
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
                | ast.TypeVar(name=str(name))
                | ast.ParamSpec(name=str(name))
            ):
                yield node.lineno, name
            case _:
                pass


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring and comment of a module, with its line."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                yield node.lineno, docstring
            case _:
                pass
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def modules(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each module of a folder of the package, `.` for its own."""
    paths = PACKAGE.glob("*.py") if folder == "." else (PACKAGE / folder).rglob("*.py")
    for path in sorted(paths):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def texts_of(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the path below the root and the text of each module of a folder beside the package."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def is_banned(name: str, words: frozenset[str] = BANNED) -> bool:
    parts = {word.lower() for word in _WORDS.findall(_STATUS_NAMES.sub("", name))}
    return name == "one" or not words.isdisjoint(parts)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.sample(1)
def test_no_name_has_a_word_that_could_mean_anything(folder: str):
    banned = [
        f"{path}:{line} {name}"
        for path, text in modules(folder)
        for line, name in bound_names(ast.parse(text))
        if is_banned(name)
    ]
    assert banned == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_name_of_a_program_has_such_a_word_either(program: str):
    banned = [
        f"{path}:{line} {name}"
        for path, text in texts_of(program)
        for line, name in bound_names(ast.parse(text))
        if is_banned(name)
    ]
    assert banned == []


@pytest.mark.thorough
def test_no_name_in_tests_has_such_a_word_but_for_the_sentences():
    banned = [
        f"{path}:{line} {name}"
        for path, text in texts_of("tests")
        for line, name in bound_names(ast.parse(text))
        if is_banned(name, BANNED_IN_TESTS if name.startswith("test_") else BANNED)
    ]
    assert banned == []


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.sample(1)
def test_prose_has_no_word_with_a_meaning_of_our_own(folder: str):
    assert [*banned_in_prose(modules(folder))] == []


@pytest.mark.parametrize("folder", [*PROGRAMS, "tests"])
def test_prose_beside_the_package_has_no_such_word_either(folder: str):
    assert [*banned_in_prose(texts_of(folder))] == []


def test_documents_have_no_such_word():
    banned = {
        path.relative_to(ROOT).as_posix(): words
        for path in DOCUMENTS
        if (words := _BANNED_IN_PROSE.findall(_CODE.sub("", path.read_text(encoding="utf-8"))))
    }
    assert banned == {}


def banned_in_prose(texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    for path, text in texts:
        if _BANNED_IN_PROSE.search(text):  # most have none, and need not be taken apart
            for line, sentence in prose(text):
                yield from (f"{path}:{line} {word}" for word in _BANNED_IN_PROSE.findall(sentence))


def test_words_are_seen_in_every_kind_of_name():
    tree = ast.parse(
        "import a as told_a\n"
        "_MOST_SAID = NOT_FOUND = 1\n"
        "def one_more[TwinT](told, *, isSaid):\n"
        "    self.found_at = NotFound = looked = seatbelt = [0 for one in told]\n"
        "try: pass\n"
        "except E as hurt_e: pass\n"
        "match a:\n"
        "    case [bell, *seat_b]: pass\n"
        "    case {**said}: pass\n"
    )
    names = [name for _, name in bound_names(tree) if is_banned(name)]
    assert sorted(names) == sorted(
        "told_a _MOST_SAID TwinT told isSaid found_at looked one hurt_e bell seat_b said".split()
    )


def test_words_are_seen_in_docstrings_and_comments():
    text = '"""A twin."""\nx = "told"  # a bell\ndef f():\n    """Hurt."""\n'
    assert [sentence for _, sentence in prose(text)] == ["A twin.", "Hurt.", "# a bell"]
