"""Attacks on every notation that writes its calls as Python does."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.output.corpus.case import Call, Case
from tests.output.corpus.lists import ListForm

GOOD = "read(path='a')"
BAD = "remove(path='/')"


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


LITERALS: Mapping[str, tuple[str, Any]] = {
    "a text in double quotes": ('"a \'b\' c"', "a 'b' c"),
    "a text in three quotes": ('"""a "b" \'c\'\n"""', "a \"b\" 'c'\n"),
    "a text in three single quotes": ("'''a 'b' ''c'''", "a 'b' ''c"),
    "an empty text": ("''", ""),
    "an empty text in three quotes": ('""""""', ""),
    "line breaks in a text": ("'a\nb\r\n'", "a\nb\r\n"),
    "a line that goes on": ("'a\\\nb'", "ab"),
    "escapes": (r"'\n\t\\\'\"\r\a\b\f\v\0\101\x41\u00e9\U0001F41F'", "\n\t\\'\"\r\a\b\f\v\0AAé🐟"),
    "escapes that are none": (r"'\d \w \/ \N \xz \U00200000'", r"\d \w \/ \N \xz \U00200000"),
    "halves of a character": (r"'\ud83d\udc1f'", "🐟"),
    "half a character": (r"'\ud83d'", "\ufffd"),
    "what ends a call in a text": ("\")]<|tool_call_end|></function_calls>, list()\"",
                                   ")]<|tool_call_end|></function_calls>, list()"),
    "Python's constants": ("[True, False, None]", [True, False, None]),
    "JSON's constants": ('{"a": [true, false, null]}', {"a": [True, False, None]}),
    "numbers": ("[0, -2, 2.5, 1e3, -0.0]", [0, -2, 2.5, 1000.0, -0.0]),
    "nested values": ("{'a': [{'b': []}, {}], \"c\": 'd'}", {"a": [{"b": []}, {}], "c": "d"}),
    "commas too many": ("[1, {'a': 2,},]", [1, {"a": 2}]),
    "white space in a value": ("[ 1 ,\n {'a' : 2 } ]", [1, {"a": 2}]),
    "a key twice in a value": ("{'a': 1, 'a': 2}", {"a": 2}),
    "zeros before a number": ("[07, -05, 0, 00, 007.5]", [7, -5, 0, 0, 7.5]),
    "values as deep as may be": ("[" * 64 + "]" * 64, _nested(64)),
}  # fmt: skip
"""Python's text of a value, and the value."""
QUOTED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "a number": ("count='-3'", {"count": -3}),
    "an object": ("""options="{'a': [1, None, {'b': True}]}\"""", {"options": {"a": [1, None, {"b": True}]}}),
    "a list": ("""tags="['one', 2]\"""", {"tags": ["one", 2]}),
    "a text of digits": ("free='3'", {"free": "3"}),
    "no number": ("count='many'", {"count": "many"}),
}
"""Arguments that a template puts between quotes, and what they are by the tool's schema."""
NO_LITERALS: Mapping[str, str] = {
    "a name": "x",
    "a name of a module": "os.sep",
    "a call": "list()",
    "a call in a list": "[list()]",
    "a formatted text": "f'a'",
    "bytes": "b'a'",
    "a raw text": "r'a'",
    "two texts side by side": "'a' 'b'",
    "a sum": "1 + 1",
    "a tuple": "(1, 2)",
    "a set": "{1, 2}",
    "a key that is no text": "{1: 2}",
    "a condition": "1 if True else 2",
    "a slice": "'a'[0]",
    "no number": "NaN",
    "a number that is too large": "1e999",
    "a number of thousands of digits": "1" * 5000,
    "no value": "",
    "two commas": "[1,,2]",
    "a bracket for another": "[1}",
    "values too deep": "[" * 65 + "]" * 65,
    "values much too deep": "[" * 3000 + "]" * 3000,
    "a comment": "1 # one",
    "an assignment": "(x := 1)",
    "a text that does not end": "'a",
}
"""Texts of values that make it no call."""


def python_cases(form: ListForm) -> Iterator[Case]:
    """Values, and what Python allows in a call that is none here."""
    for name, (text, value) in LITERALS.items():
        yield form.case(f"literal: {name}", form.of(f"typed(free={text})"), Call("typed", {"free": value}))
    for name, (text, values) in QUOTED.items():
        yield form.case(f"between quotes: {name}", form.of(f"typed({text})"), Call("typed", values))
    for name, text in NO_LITERALS.items():
        yield form.plain(f"no literal: {name}", form.of(f"typed(free={text})"))
    yield from _calls(form)


def _calls(form: ListForm) -> Iterator[Case]:
    yield form.case("white space in a call", form.of("read( path = 'a' , )"), Call("read", {"path": "a"}))
    yield form.case("white space without arguments", form.of("list( \n )"), Call("list"))
    yield form.case("an argument twice", form.of("typed(count=1, count=2)"), Call("typed", {"count": 2}))
    yield form.case(
        "names of any letters", form.of("note(b-c='1', é='2')"), Call("note", {"b-c": "1", "é": "2"})
    )
    yield form.case(
        "arguments by their position", form.of("read('a', 5)"), Call("read", {"path": "a", "limit": 5})
    )
    yield form.case(
        "a name after a position", form.of("read('a', limit=5)"), Call("read", {"path": "a", "limit": 5})
    )
    yield form.plain("more positions than arguments", form.of("read('a', 5, 6)"))
    yield form.plain("a position for a tool without arguments", form.of("list('a')"))
    yield form.plain("a position after a name", form.of("read(path='a', 5)"))
    yield form.plain("arguments in a mapping", form.of("read(**{'path': 'a'})"))
    yield form.plain("arguments in a list", form.of("read(*['a'])"))
    yield form.plain("a comparison", form.of("read(path=='a')"))
    yield form.plain("no comma", form.of("read(path='a' limit=1)"))
    yield form.plain("a name alone", form.of("read"))
    yield form.plain("nothing after the bracket", f"{form.opening}read(")
