"""Mutants are edits of symbols: they find their place by what it says, and fail by name where it is gone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import edits
from tests.mutants.edits import Edit, Mutant, NotThere, edited, read

SOURCE = '''
LIMIT = 3

class Store:
    size = 1

    def take(self, number: int, *, most: int = LIMIT) -> int:
        """Take some."""
        if (
            number  # a comment
            < most and self.size
        ):
            self.forget(number)
            self.keep(number)
            return number
        return 0

    def keep(self, number):
        self.forget(number)

def take(number):
    return number
'''


def planted(symbol: str, old: str, new: str, source: str = SOURCE) -> ast.Module:
    return ast.parse(edited(source, Edit("a.py", symbol, old, new)))


def same(tree: ast.Module, *changes: tuple[str, str]) -> bool:
    expected = SOURCE
    for old, new in changes:
        assert expected.count(old) == 1
        expected = expected.replace(old, new)
    return ast.dump(tree) == ast.dump(ast.parse(expected))


def test_an_expression_is_found_however_it_is_laid_out():
    tree = planted("Store.take", "number < most and self.size", "number <= most")
    assert same(tree, ("number  # a comment\n            < most and self.size", "number <= most"))


def test_only_the_named_symbol_is_searched():
    assert same(
        planted("take", "number", "number + 1"),
        ("def take(number):\n    return number", "def take(number):\n    return number + 1"),
    )
    keep = "def keep(self, number):\n        self.forget(number)"
    assert same(
        planted("Store.keep", "self.forget(number)", "pass"),
        (keep, keep.replace("self.forget(number)", "pass")),
    )


def test_statements_that_follow_each_other_are_replaced_together():
    tree = planted(
        "Store.take", "self.forget(number)\nself.keep(number)", "self.keep(number)\nself.forget(number)"
    )
    lines = "self.forget(number)\n            self.keep(number)"
    assert same(tree, (lines, "self.keep(number)\n            self.forget(number)"))


def test_a_default_and_a_statement_of_a_class_or_a_module_are_found():
    assert same(planted("Store.take", "LIMIT", "4"), ("most: int = LIMIT", "most: int = 4"))
    assert same(planted("Store", "size = 1", "size = 2"), ("size = 1", "size = 2"))
    assert same(planted("", "LIMIT = 3", "LIMIT = 4"), ("LIMIT = 3", "LIMIT = 4"))


@pytest.mark.parametrize(
    ("symbol", "old", "words"),
    [
        ("Store.gone", "number", "there is no a.py::Store.gone"),
        ("Store.take", "number + 1", "has 0 times: number \\+ 1"),
        ("Store", "self.forget(number)", "has 2 times"),
        ("Store.take", "self.keep(number)\nself.forget(number)", "has 0 times"),
    ],
)
def test_what_is_not_there_once_is_refused_by_name(symbol: str, old: str, words: str):
    with pytest.raises(NotThere, match=words):
        planted(symbol, old, "pass")


def test_a_file_is_read_as_it_is_written(tmp_path: Path):
    mutant = Mutant(
        "01_a",
        "Something is lost.",
        "tests/test_a.py::test_x[1, 2]",
        (
            Edit("start_llm/a.py", "A.f", "if x:\n    f(x)\n\n    g(x)", "pass"),
            Edit("start_llm/b.py", "", "A = 1", "A = 2"),
        ),
    )
    file = tmp_path / "01_a.mutant"
    file.write_text(mutant.text(), encoding="utf-8")
    assert read(file) == mutant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bug: a\ntest: tests/a.py::b\n",
        "bug: a\ntest: tests/a.py::b\n\nin: a.py::f\nold:\n    x\n",
        "in: a.py::f\n",
    ],
)
def test_a_file_of_another_form_is_refused_by_its_name(tmp_path: Path, text: str):
    file = tmp_path / "02_other.mutant"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"02_other\.mutant is no mutant"):
        read(file)


def test_a_symbol_that_moved_is_found_if_it_is_in_one_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(edits, "ROOT", tmp_path)
    for name, source in {"new.py": SOURCE, "other.py": "def take(number): return number"}.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    method, function = (
        Edit("old.py", "Store.keep", "self.forget(number)", "pass"),
        Edit("old.py", "take", "number", "0"),
    )
    mutant = edits.moved(Mutant("03", "b", "t", (method, function)), tmp_path.glob("*.py"))
    assert [edit.path for edit in mutant.edits] == ["new.py", "old.py"], "two files have the other one"
