"""Kimi K3: arguments that state their types, or one object."""

from collections.abc import Iterator
from typing import Any

from start_llm.formats.reading.schema import Tools
from tests.output.corpus.case import Call, Case, tool
from tests.output.corpus.common import LIST
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["kimi_k3"].family
_OPENER, _BLOCK_END, _END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "<|close|>call<|sep|>"
_VALUE_END, _SEPARATOR = "<|close|>argument<|sep|>", "<|sep|>"


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


def _block(inner: str) -> str:
    return f"{_OPENER}{inner}{_BLOCK_END}"


def _argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}{_VALUE_END}'


A = Call("read", {"path": "a"}, '{"path": "a"}')
_HEAD = '<|open|>call tool="read" index="1"<|sep|>'
_BEGIN = f"{_HEAD}{_argument('path', 'string', 'a')}".removesuffix(_VALUE_END)
_GOOD = f"{_BEGIN}{_VALUE_END}{_END}"
_JSON = f'{_HEAD}<|open|>json type="object"<|sep|>{{"path": "a"}}<|close|>json<|sep|>{_END}'
_BAD = _GOOD.replace("read", "remove!")
_BROKEN = f"{_HEAD}hello{_END}"
_TYPED: tuple[tuple[str, str, str, Any], ...] = (
    ("count", "number", "5", 5),
    ("count", "string", "5", 5),
    ("count", "string", "five", "five"),
    ("count", "number", "five", "five"),
    ("flag", "boolean", "true", True),
    ("flag", "boolean", "True", True),
    ("nothing", "null", "null", None),
    ("tags", "array", '["a"]', ["a"]),
    ("tags", "array", "['a']", ["a"]),
    ("options", "object", '{"a": [1]}', {"a": [1]}),
    ("place", "number", "12", 12),
    ("place", "string", "12", "12"),
    ("mixed", "number", "5", 5),
    ("free", "string", "12", "12"),
    ("free", "array", "[1]", [1]),
    ("free", "array", "[1", "[1"),
    ("unheard", "string", "null", "null"),
)
"""Argument of the tool `typed`, type that it states, text, and the value that it stands for."""


def _typed() -> Iterator[Case]:
    for number, (key, kind, raw, value) in enumerate(_TYPED):
        text = _block(f'<|open|>call tool="typed" index="1"<|sep|>{_argument(key, kind, raw)}{_END}')
        yield _case(f"type {number}", text, [Call("typed", {key: value})])


CASES = (
    *_typed(),
    _case("white space everywhere", _block(_GOOD).replace("<|open|>", "\n <|open|>").strip(), [A]),
    _case("no index", _block(_GOOD.replace(' index="1"', "")), [A]),
    _case("no type", _block(_GOOD.replace(' type="string"', "")), [A]),
    _case("no arguments in a block", _block(f'<|open|>call tool="list" index="1"<|sep|>{_END}'), [LIST]),
    _case(
        "marks of attributes in a parameter's name",
        _block(_HEAD.replace("read", "note") + _argument("a&quot;b&amp;quot;", "string", "&amp;") + _END),
        [Call("note", {'a"b&quot;': "&amp;"})],
    ),
    _case(
        "marks of attributes in a tool's name",
        _block(_GOOD.replace("read", "r&amp;d")),
        [Call("r&d", {"path": "a"})],
        tools=Tools([tool("r&d", {"path": {"type": "string"}})]),
    ),
    _case(
        "a parameter twice",
        _block(_GOOD.replace(_END, _argument("path", "string", "b") + _END)),
        [A],
    ),
    _case("an object for all arguments", _block(_JSON), [A]),
    _case("two objects", _block(_JSON + _JSON), [A, A]),
    _case("an object that nothing closes", _block(_JSON.replace("<|close|>json<|sep|>", "")), [A]),
    _case("an object after arguments", _block(_GOOD + _JSON), [A, A]),
    _case("arguments before two objects", _block(_GOOD + _JSON + _JSON), [A, A, A]),
    _case("no block around a call", f"I look.\n{_GOOD}", [A], "I look."),
    _case("no end of the block", f"{_OPENER}{_GOOD}", [A]),
    _case("half the end of the block", f"{_OPENER}{_GOOD}<|close|>to", [A]),
    _case("no end of the call", _block(_GOOD.removesuffix(_END)), [A]),
    _case("no ends at all", f"{_OPENER}{_GOOD.removesuffix(_END)}", [A]),
    _case("two blocks", _block(_GOOD) + _block(_GOOD), [A, A]),
    _case("a reply that ends in a value", f"{_OPENER}{_BEGIN}", [A]),
    _case("half the end of a value", f"{_OPENER}{_BEGIN}<|close|>arg", [A]),
    _case(
        "a cut after a parameter",
        f"{_OPENER}{_BEGIN}{_VALUE_END}",
        open_call=("read", '{"path": "a'),
        complete=False,
    ),
    _case(
        "all marks in a value",
        _block(_GOOD.replace("a<", f"a{_VALUE_END} and {_BLOCK_END}{_OPENER}{_HEAD}{_VALUE_END}<")),
        [Call("read", {"path": f"a{_VALUE_END} and {_BLOCK_END}{_OPENER}{_HEAD}{_VALUE_END}"})],
    ),
    _case("a tool that was not offered first", _block(_BAD + _GOOD), [A], f"{_OPENER}{_BAD}"),
    _case("a tool that was not offered in the middle", _block(_GOOD + _BAD + _GOOD), [A, A], _BAD),
    _case("a tool that was not offered last", _block(_GOOD + _BAD), [A], _BAD + _BLOCK_END),
    _case("a good call after a malformed one", _block(_BROKEN + _GOOD), [A], f"{_OPENER}{_BROKEN}"),
    _case("markup that prose quotes", f"`{_OPENER}` so: {_block(_GOOD)}", [A], f"`{_OPENER}` so:"),
    _plain("an empty block", _block("")),
    _plain("text for parameters", _block(_BROKEN)),
    _plain("no name", _block(_GOOD.replace("read", ""))),
    _plain("a line break in a name", _block(_GOOD.replace("read", "re\nad"))),
    _plain("a parameter without a name", _block(_GOOD.replace('"path"', '""'))),
    _plain("an object that is none", _block(_JSON.replace('"a"', ""))),
    _plain("an object that was not offered", _block(_JSON.replace("read", "remove!"))),
    _plain("nothing but the opener", _OPENER),
    _plain("a cut head", f"{_OPENER}{_HEAD[:22]}"),
)
