"""Seed-OSS: functions and parameters in tags of its own, values with newlines around them or without."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST, READ
from tests.output.corpus.writers import WRITERS

_WRITER = WRITERS["seed"]
_FAMILY = _WRITER.family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


def _typed(name, value, expected) -> Case:
    text = f"{_OPENER}\n<function=typed>\n<parameter={name}>{value}</parameter>\n</function>\n{_END}"
    return _case(f"{name} in the words of Python: {value}", text, [Call("typed", {name: expected})])


A = Call("read", {"path": "a"}, '{"path": "a"}')
_OPENER, _END = "<seed:tool_call>", "</seed:tool_call>"
_BEGIN = "<function=read>\n<parameter=path>a"
_GOOD = f"{_BEGIN}</parameter>\n</function>\n"
_BAD = _GOOD.replace("read", "remove!")
_BROKEN = "<function=read>hello</function>\n"


def _block(inner: str) -> str:
    return f"{_OPENER}\n{inner}{_END}"


def _valued(name: str, value: str, read: str) -> Case:
    return _case(name, _block(_GOOD.replace(">a<", f">{value}<")), [Call("read", {"path": read})])


CASES = (
    _case("a value right after its tag", _block(_GOOD), [A]),
    _valued("a value on a line of its own", "\na\n", "a"),
    _valued("a newline at the end of a text", "a\n", "a\n"),
    _valued("a newline at the end of a text on lines of its own", "\na\n\n", "a\n"),
    _valued("a newline before a value alone", "\na", "a"),
    _valued("a value on a line of Windows", "\r\na\r\n", "a"),
    _valued("line ends of Windows in a value on such lines", "\r\n\r\na\r\n\r\n", "\r\na\r\n"),
    _valued("a line end of Windows before a value alone", "\r\na", "a"),
    _valued("a line end of Windows before a value, a newline after it", "\r\na\n", "a"),
    _valued("a newline before a value, a line end of Windows after it", "\na\r\n", "a\r"),
    _valued("a line end of Windows at the end of a text", "a\r\n", "a\r\n"),
    _valued("half a line end of Windows before a text", "\ra", "\ra"),
    _valued("nothing on a line of Windows", "\r\n\r\n", ""),
    _typed("tags", "\r\n['a']\r\n", ["a"]),
    _case(
        "a text or nothing on a line of Windows",
        _block(_GOOD.replace("read", "typed").replace("path", "optional").replace(">a<", ">\r\n a\r\n<")),
        [Call("typed", {"optional": " a"})],
    ),
    _valued("nothing right after its tag", "", ""),
    _valued("nothing on a line of its own", "\n\n", ""),
    _valued(
        "tags in a value",
        "a</parameter> and </seed:tool_call>",
        "a</parameter> and </seed:tool_call>",
    ),
    _case(
        "a number on a line of its own",
        _block(_GOOD.replace("path", "limit").replace(">a<", ">\n20\n<")),
        [Call("read", {"limit": 20})],
    ),
    _typed("flag", "False", False),
    _typed("nothing", "None", None),
    _typed("options", "{'a': 1, 'b': [True, None]}", {"a": 1, "b": [True, None]}),
    _typed("tags", "\n['a', \"it's\"]\n", ["a", "it's"]),
    _typed("optional", "None", None),
    _typed("mixed", "['a']", "['a']"),
    _typed("place", "{'a': 1}", "{'a': 1}"),
    _typed("place", "True", "True"),
    _case("no line breaks", _block(_GOOD).replace("\n", ""), [A]),
    _case("no arguments in one line", _block("<function=list></function>"), [LIST]),
    _case("two functions in a block", _block(_GOOD + _GOOD), [A, A]),
    _case("two blocks", _block(_GOOD) + _block(_GOOD), [A, A]),
    _case(
        "a parameter twice",
        _block("<function=note><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
        [Call("note", {"a": "1"}, '{"a": "1"}')],
    ),
    _case("no end of the block", f"{_OPENER}\n{_GOOD}", [A]),
    _case("half the end of the block", f"{_OPENER}\n{_GOOD}</seed:to", [A]),
    _case("no end of the function", _block(_GOOD.replace("</function>\n", "")), [A]),
    _case("no ends at all", f"{_OPENER}\n{_BEGIN}</parameter>\n", [A]),
    _case("a reply that ends in a value", f"{_OPENER}\n{_BEGIN}", [A]),
    _case("half the end of a value", f"{_OPENER}\n{_BEGIN}</para", [A]),
    _case(
        "half the end of a value of which a space has gone out",
        f"{_OPENER}\n{_BEGIN.removesuffix('a')} </para",
        [Call("read", {"path": " "})],
    ),
    _case(
        "a cut after a parameter",
        f"{_OPENER}\n{_BEGIN}</parameter>",
        open_call=("read", '{"path": "a'),
        complete=False,
    ),
    _case("a tool that was not offered in the middle", _block(_GOOD + _BAD + _GOOD), [A, A], _BAD.rstrip()),
    _case("a tool that was not offered first", _block(_BAD + _GOOD), [A], f"{_OPENER}\n{_BAD}".rstrip()),
    _case("a tool that was not offered last", _block(_GOOD + _BAD), [A], _BAD + _END),
    _case(
        "a good call after a malformed one",
        f"{_OPENER}\n{_BROKEN}{_WRITER.write([READ])}",
        [READ],
        f"{_OPENER}\n{_BROKEN}".rstrip(),
    ),
    _case(
        "markup that prose quotes",
        f"Write `{_OPENER}` and `<function=read>` so: {_block(_GOOD)}",
        [A],
        f"Write `{_OPENER}` and `<function=read>` so:",
    ),
    _plain("an empty block", _block("")),
    _plain("text for parameters", _block(_BROKEN)),
    _plain("no name", _block("<function=></function>")),
    _plain("a name that is too long", _block(_GOOD.replace("read", "a" * 300))),
    _plain("nothing but the opener", _OPENER),
    _plain("a cut head", f"{_OPENER}\n<function=rea"),
)
