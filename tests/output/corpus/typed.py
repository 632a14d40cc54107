"""Values of every type in the formats that do not say types."""

from collections.abc import Iterator
from typing import Any

from start_llm.core.half_characters import without_halves
from tests.output.corpus.case import Call, Case
from tests.output.corpus.writers import WRITERS

VALUES: tuple[tuple[str, str, Any], ...] = (
    ("count", "5", 5),
    ("count", " 5 ", 5),
    ("count", "5.5", 5.5),
    ("count", "five", "five"),
    ("count", "", ""),
    ("count", "1" * 5000, "1" * 5000),
    ("ratio", "1e3", 1000.0),
    ("ratio", "NaN", "NaN"),
    ("ratio", "-Infinity", "-Infinity"),
    ("ratio", "1e999", "1e999"),
    ("flag", "true", True),
    ("flag", "True", True),
    ("flag", "yes", "yes"),
    ("flag", "None", "None"),
    ("nothing", "null", None),
    ("nothing", "None", None),
    ("tags", '["a", "b"]', ["a", "b"]),
    ("tags", '["a\nb"]', ["a\nb"]),
    ("tags", '["\\ud83d"]', ["\ud83d"]),
    ("tags", "a, b", "a, b"),
    ("tags", '["a",]', ["a"]),
    ("tags", "['a', \"it's\", '\\'b\\'\\n\\x41\\u65e5\\U0001f41f\\d']", ["a", "it's", "'b'\nA日🐟\\d"]),
    ("tags", "['a', None, True, -1.5, {'b': False}]", ["a", None, True, -1.5, {"b": False}]),
    ("tags", "['None, True]']", ["None, True]"]),
    ("tags", "['a'", "['a'"),
    ("tags", "['a", "['a"),
    ("tags", "['\\Uffffffff']", ["\\Uffffffff"]),
    ("tags", "('a', 'b')", "('a', 'b')"),
    ("tags", "{'a': 1}", "{'a': 1}"),
    ("tags", "[nan]", "[nan]"),
    ("tags", "[Nonesuch]", "[Nonesuch]"),
    ("tags", "[None] * 9", "[None] * 9"),
    ("tags", "['a'" + "[" * 70 + "]" * 71, "['a'" + "[" * 70 + "]" * 71),
    ("tags", "[" * 65 + "'a'" + "]" * 65, "[" * 65 + "'a'" + "]" * 65),
    ("options", '{"a": {"b": 1}}', {"a": {"b": 1}}),
    ("options", "{'a': 1}", {"a": 1}),
    ("options", "{'a': {'b': ['c', 1e999]}}", "{'a': {'b': ['c', 1e999]}}"),
    ("options", "{'a': 1, 'b': (2,)}", "{'a': 1, 'b': (2,)}"),
    ("options", "'a'", "'a'"),
    ("mixed", "5", 5),
    ("mixed", "5.5", "5.5"),
    ("mixed", '"5"', '"5"'),
    ("mixed", "true", "true"),
    ("optional", "null", None),
    ("optional", "None", None),
    ("optional", "5", "5"),
    ("optional", " a ", " a "),
    ("listed", "[1]", [1]),
    ("listed", "[1", "[1"),
    ("listed", "['a']", "['a']"),
    ("mode", "1", "1"),
    ("level", "2", 2),
    ("fixed", "7", "7"),
    ("place", "12", "12"),
    ("wrapped", "12", "12"),
    ("slashed", "12", "12"),
    ("lost", "12", 12),
    ("loop", "12", 12),
    ("half", "12", 12),
    ("free", "12", 12),
    ("free", "1.0", 1.0),
    ("free", "text", "text"),
    ("free", '"text"', "text"),
    ("free", "True", "True"),
    ("free", "[1, 2]", [1, 2]),
    ("free", "['a']", "['a']"),
    ("open", "12", 12),
    ("unheard", "12", 12),
)
"""Argument of the tool `typed`, text, and the value that it stands for."""


def _cases() -> Iterator[Case]:
    """All arguments of one tool in one call, as often as an argument has several values."""
    for writer in WRITERS.values():
        if writer.streams and not writer.states_types:
            for turn, values in enumerate(_turns()):
                text = writer.write([Call("typed", {key: raw for key, raw, _ in values})])
                expected = {key: without_halves(value) for key, _, value in values}
                yield Case(
                    name=f"{writer.name}, turn {turn}",
                    text=text,
                    calls=(Call("typed", expected),),
                    family=writer.family,
                )


def _turns() -> list[list[tuple[str, str, Any]]]:
    turns: list[list[tuple[str, str, Any]]] = []
    for row in VALUES:
        free = next((turn for turn in turns if row[0] not in {key for key, _, _ in turn}), None)
        if free is None:
            turns.append(free := [])
        free.append(row)
    return turns


CASES = tuple(_cases())
