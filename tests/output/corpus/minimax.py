"""MiniMax-M2: invocations in a block."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST, READ
from tests.output.corpus.writers import WRITERS

_WRITER = WRITERS["minimax"]
_FAMILY = _WRITER.family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


A = Call("read", {"path": "a"}, '{"path": "a"}')
_OPENER, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_BEGIN = '<invoke name="read">\n<parameter name="path">a'
_GOOD = f"{_BEGIN}</parameter>\n</invoke>\n"
_BAD = _GOOD.replace("read", "remove!")
_BROKEN = '<invoke name="read">hello</invoke>\n'


def _block(inner: str) -> str:
    return f"{_OPENER}\n{inner}{_END}"


CASES = (
    _case("no line breaks", _block(_GOOD).replace("\n", ""), [A]),
    _case("line breaks everywhere", _block(_GOOD).replace("><", ">\n\n<"), [A]),
    _case("no quotes", _block(_GOOD.replace('"', "")), [A]),
    _case("single quotes and spaces", _block(_GOOD.replace('="', " = '").replace('">', "' >")), [A]),
    _case("no arguments in one line", _block('<invoke name="list"></invoke>'), [LIST]),
    _case(
        "newlines that belong to the value",
        _block(_GOOD.replace(">a<", ">\na\n<")),
        [Call("read", {"path": "\na\n"})],
    ),
    _case(
        "the names of the parameters as they come",
        _block('<invoke name="note"><parameter name="b c">1</parameter><parameter name="é">2</parameter>'),
        [Call("note", {"b c": "1", "é": "2"}, '{"b c": "1", "é": "2"}')],
    ),
    _case(
        "a parameter twice",
        _block(
            '<invoke name="note"><parameter name="a">1</parameter><parameter name="a">2</parameter></invoke>'
        ),
        [Call("note", {"a": "1"}, '{"a": "1"}')],
    ),
    _case(
        "parameters in another order",
        _block(
            '<invoke name="read">\n<parameter name="limit">2</parameter>\n'
            '<parameter name="path">a</parameter>\n</invoke>\n'
        ),
        [Call("read", {"limit": 2, "path": "a"}, '{"limit": 2, "path": "a"}')],
    ),
    _case("no end of the block", f"{_OPENER}\n{_GOOD}", [A]),
    _case("half the end of the block", f"{_OPENER}\n{_GOOD}</mini", [A]),
    _case("no end of the call", _block(_GOOD.replace("</invoke>\n", "")), [A]),
    _case("no ends at all", f"{_OPENER}\n{_BEGIN}</parameter>\n", [A]),
    _case("half the end of the call", f"{_OPENER}\n{_BEGIN}</parameter>\n</inv", [A]),
    _case("no ends and no arguments", f'{_OPENER}\n<invoke name="list">\n', [LIST]),
    _case("two blocks with nothing between them", _block(_GOOD) + _block(_GOOD), [A, A]),
    _case("text between two blocks", f"{_block(_GOOD)}\nThen\n{_block(_GOOD)}", [A, A], "Then"),
    _case("a block in a block that does not end", f"{_OPENER}\n{_GOOD}{_block(_GOOD)}", [A, A]),
    _case("a reply that ends in a value", f"{_OPENER}\n{_BEGIN}", [A]),
    _case("half the end of a value", f"{_OPENER}\n{_BEGIN}</para", [A]),
    _case(
        "a reply that ends in a second parameter's name",
        f'{_OPENER}\n{_BEGIN}</parameter>\n<parameter name="lim',
        [A],
    ),
    _case(
        "a cut after a parameter",
        f"{_OPENER}\n{_BEGIN}</parameter>",
        open_call=("read", '{"path": "a'),
        complete=False,
    ),
    _case(
        "a value that no tag ends",
        _block(f"{_BEGIN}\n</invoke>\n"),
        [A],
    ),
    _case(
        "prose after the end of a value",
        _block(_GOOD.replace("a<", "a</parameter> is a tag<")),
        [Call("read", {"path": "a</parameter> is a tag"})],
    ),
    _case(
        "all tags in a value",
        _block(_GOOD.replace("a<", f'a{_OPENER}<invoke name="list"></invoke></parameter>{_OPENER}<')),
        [Call("read", {"path": f'a{_OPENER}<invoke name="list"></invoke></parameter>{_OPENER}'})],
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
    _case("a good call before a malformed one", _block(_GOOD + _BROKEN), [A], _BROKEN + _END),
    _case(
        "markup that prose quotes",
        f'Write `{_OPENER}` and `<invoke name="read">` so: {_block(_GOOD)}',
        [A],
        f'Write `{_OPENER}` and `<invoke name="read">` so:',
    ),
    _plain("no block around a call", _GOOD),
    _plain("an empty block", _block("")),
    _plain("text for parameters", _block(_BROKEN)),
    _plain("no name", _block('<invoke name=""></invoke>')),
    _plain("a line break in a name", _block(_GOOD.replace("read", "re\nad"))),
    _plain("a name that is too long", _block(_GOOD.replace("read", "a" * 300))),
    _plain("a parameter without a name", _block(_GOOD.replace('"path"', '""'))),
    _plain("a parameter outside of a call", _block('<parameter name="path">a</parameter>')),
    _plain("spaces without end", f"{_OPENER}{' ' * 100}{_GOOD}{_END}"),
    _plain("nothing but the opener", _OPENER),
    _plain("a cut head", f'{_OPENER}\n<invoke name="rea'),
)
