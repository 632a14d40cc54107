"""MiniCPM: functions and parameters in tags with attributes, markup in CDATA."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["minicpm"].family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


A = Call("read", {"path": "a"}, '{"path": "a"}')
_BEGIN = '<function name="read"><param name="path">a'
_GOOD = f"{_BEGIN}</param></function>"

CASES = (
    _case("single quotes and spaces", _GOOD.replace('"', "'").replace("=", " = ").replace("><", ">\n<"), [A]),
    _case("no parameters", '<function name="list"></function>', [LIST]),
    _case(
        "markup without CDATA", _GOOD.replace(">a<", "><b>&lt;</b><"), [Call("read", {"path": "<b>&lt;</b>"})]
    ),
    _case("newlines belong to the value", _GOOD.replace(">a<", ">\na\n<"), [Call("read", {"path": "\na\n"})]),
    _case("an empty CDATA", _GOOD.replace(">a<", "><![CDATA[]]><"), [Call("read", {"path": ""})]),
    _case("half the start of CDATA", _GOOD.replace(">a<", "><![CD<"), [Call("read", {"path": "<![CD"})]),
    _case(
        "the end of a value inside CDATA",
        _GOOD.replace(">a<", "><![CDATA[a</param></function>]]><"),
        [Call("read", {"path": "a</param></function>"})],
    ),
    _case(
        "a number in CDATA",
        '<function name="read"><param name="limit"><![CDATA[2]]></param></function>',
        [Call("read", {"limit": 2})],
    ),
    _case("no last tag", f"{_BEGIN}</param>", [A]),
    _case("no last tag after CDATA", '<function name="read"><param name="path"><![CDATA[a]]></param>', [A]),
    _case("no last tag and no arguments", '<function name="list">', [LIST]),
    _case("a reply that ends in a value", _BEGIN, [A]),
    _plain("a reply that ends before a value", _BEGIN[:-1]),
    _plain("a reply that ends in the start of CDATA", f"{_BEGIN[:-1]}<![CD"),
    _case("a reply that ends in CDATA", f"{_BEGIN[:-1]}<![CDATA[a]]", [A]),
    _plain("a function of another language", "<function name() { return 1 }"),
    _plain("a function that is only named", 'Write `<function name="read">` first.'),
    _plain("a parameter without a name", '<function name="read"><param>a</param></function>'),
    _plain("no quotes", "<function name=read></function>"),
)
