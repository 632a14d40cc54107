"""MiniMax-M3: elements that hold elements."""

from collections.abc import Iterator
from typing import Any

from start_llm.formats.reading.schema import Tools
from tests.output.corpus.case import Call, Case, tool
from tests.output.corpus.common import LIST
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["minimax_m3"].family
_MARK = "]<]minimax[>["
_PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "depth": {"type": "number"}},
}
_TOOLS = Tools(
    [
        tool("read", {"path": {"type": "string"}, "limit": {"type": "integer"}}),
        tool(
            "go",
            {
                "to": {"$ref": "#/$defs/Place"},
                "by": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
                "names": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                "grid": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                "more": {"type": "object", "additionalProperties": {"type": "string"}},
                "either": {"type": ["string", "array"]},
                "count": {"type": "integer"},
                "free": {},
            },
            **{"$defs": {"Place": _PLACE}},
        ),
    ]
)


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


def _marked(text: str) -> str:
    """With the mark before every tag."""
    return text.replace("<", f"{_MARK}<")


def _block(inner: str) -> str:
    return f"{_marked('<tool_call>')}\n{inner}{_marked('</tool_call>')}"


A = Call("read", {"path": "a"}, '{"path": "a"}')
_END = _marked("</invoke>\n")
_BEGIN = _marked('<invoke name="read"><path>a')
_GOOD = _BEGIN + _marked("</path>") + _END
_BAD = _GOOD.replace("read", "remove!")
_BROKEN = _marked('<invoke name="read">hello</invoke>\n')
_OPENER = _marked("<tool_call>")
_VALUES: tuple[tuple[str, str, Any], ...] = (
    ("to", "<name>5</name><depth>5</depth>", {"name": "5", "depth": 5}),
    ("to", "\n<name> a </name>\n<depth>1.5</depth>\n", {"name": " a ", "depth": 1.5}),
    ("to", '{"name": "5"}', {"name": "5"}),
    ("to", "", {}),
    ("to", "a <name>b</name>", "a <name>b</name>"),
    ("to", "<name>b</depth>", "<name>b</depth>"),
    ("by", "<item><name>a</name></item><item></item>", [{"name": "a"}, {}]),
    ("by", "<item><by>1</by><name>2</name></item>", [{"by": 1, "name": "2"}]),
    ("by", "<to>1</to>", "<to>1</to>"),
    ("names", "<item>1</item><item>a\n</item><item></item>", ["1", "a\n", ""]),
    ("names", "<item><b>1</b></item>", ["<b>1</b>"]),
    ("names", '["1"]', ["1"]),
    ("names", "null", None),
    ("names", "", []),
    ("grid", "<item><item>1</item></item><item></item>", [[1], []]),
    ("more", "<item>1</item>", {"item": "1"}),
    ("more", "<a>1</a><more>2</more><b></b>", {"a": "1", "more": "2", "b": ""}),
    ("either", "<item>1</item>", [1]),
    ("either", "", ""),
    ("count", "5", 5),
    ("count", "<a>5</a>", "<a>5</a>"),
    ("free", "<item>1</item><item>a</item>", [1, "a"]),
    ("free", "<a>1</a><b><item>true</item></b>", {"a": 1, "b": [True]}),
    ("free", "12", 12),
    ("free", "", ""),
    ("free", "<a>" * 3000 + "</a>" * 3000, "<a>" * 3000 + "</a>" * 3000),
)
"""Argument of the tool `go`, its value without marks, and what that stands for."""


def _typed() -> Iterator[Case]:
    for number, (key, raw, value) in enumerate(_VALUES):
        marked = _marked(value) if isinstance(value, str) else value
        marked = [_marked(item) for item in value] if key == "names" and isinstance(value, list) else marked
        text = _block(_marked(f'<invoke name="go"><{key}>{raw}</{key}><count>1</count></invoke>\n'))
        expected = {key: marked, "count": 1}
        yield _case(f"value {number}", text, [Call("go", expected)], tools=_TOOLS)


CASES = (
    *_typed(),
    _case("line breaks between tags", _block(_GOOD).replace(f">{_MARK}", f">\n\n{_MARK}"), [A]),
    _case("no arguments in one line", _block(_marked('<invoke name="list"></invoke>')), [LIST]),
    _case("no end of the block", f"{_OPENER}\n{_GOOD}", [A]),
    _case("half the end of the block", f"{_OPENER}\n{_GOOD}{_MARK}</tool", [A]),
    _case("no end of the call", _block(_GOOD.replace(_END, "\n")), [A]),
    _case("half the mark of the end", f"{_OPENER}\n{_GOOD.replace(_END, _MARK[:5])}", [A]),
    _case("two blocks", _block(_GOOD) + _block(_GOOD), [A, A]),
    _case("a reply that ends in a value", f"{_OPENER}\n{_BEGIN}", [A]),
    _case("half the end of a value", f"{_OPENER}\n{_BEGIN}{_MARK}</pa", [A]),
    _case(
        "a reply that ends in an array",
        f"{_OPENER}{_marked('<invoke name="go"><names><item>a</item>')}",
        [Call("go", {"names": ["a"]})],
        tools=_TOOLS,
    ),
    _case(
        "tags in a text",
        _block(_GOOD.replace(">a", f">a{_marked('<path>b</path> ends <item>')}")),
        [Call("read", {"path": f"a{_marked('<path>b</path> ends <item>')}"})],
    ),
    _case("a tool that was not offered in the middle", _block(_GOOD + _BAD + _GOOD), [A, A], _BAD.rstrip()),
    _case("a tool that was not offered last", _block(_GOOD + _BAD), [A], _BAD + _marked("</tool_call>")),
    _case("a good call before a malformed one", _block(_GOOD + _BROKEN), [A],
          _BROKEN + _marked("</tool_call>")),
    _plain("no marks", _block(_GOOD).replace(_MARK, "")),
    _plain("text for arguments", _block(_BROKEN)),
    _plain("no name", _block(_GOOD.replace("read", ""))),
    _plain("a line break in a name", _block(_GOOD.replace("read", "re\nad"))),
    _plain("an empty block", _block("")),
    _plain("nothing but the opener", _OPENER),
)  # fmt: skip
