"""Qwen3-Coder and Qwen3.5: functions and parameters in tags."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST, READ
from tests.output.corpus.writers import WRITERS

_WRITER = WRITERS["qwen_xml"]
_FAMILY = _WRITER.family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


A = Call("read", {"path": "a"}, '{"path": "a"}')
_BEGIN = "<tool_call>\n<function=read>\n<parameter=path>\na"
_GOOD = "<function=read>\n<parameter=path>\na\n</parameter>\n</function>\n"
_BAD = "<function=remove!>\n<parameter=path>\na\n</parameter>\n</function>\n"

_ATTRIBUTES = _GOOD.replace("=read", ' name="read"').replace("=path", " name='path'")
_INVOKED = '<invoke name="read">\n<parameter name="path">a</parameter>\n</invoke>\n'
_PARAMS = '<function name="read">\n<param name="path">a</param>\n</function>\n'

CASES = (
    _case("names as attributes", f"<tool_call>\n{_ATTRIBUTES}</tool_call>", [A]),
    _case("names as attributes, twice", f"<tool_call>\n{_ATTRIBUTES}{_ATTRIBUTES}</tool_call>", [A, A]),
    _case("calls as Claude writes them", f"So.\n<function_calls>\n{_INVOKED}</function_calls>", [A], "So."),
    _case(
        "two calls as Claude writes them", f"<function_calls>\n{_INVOKED}{_INVOKED}</function_calls>", [A, A]
    ),
    _case("parameters as MiniCPM writes them", f"<tool_call>\n{_PARAMS}</tool_call>", [A]),
    _case(
        "parameters as MiniCPM writes them, in two functions",
        f"<tool_call>{_PARAMS}{_PARAMS}</tool_call>",
        [A, A],
    ),
    _case(
        "a parameter in CDATA",
        f"<tool_call>{_PARAMS.replace('a</param>', '<![CDATA[</param>]]></param>')}</tool_call>",
        [Call("read", {"path": "</param>"})],
    ),
    _case(
        "a parameter in CDATA on lines of Windows",
        f"<tool_call>{_PARAMS.replace('a</param>', '<![CDATA[*a*]]></param>')}</tool_call>".replace(
            "*", "\r\n"
        ),
        [A],
    ),
    _plain("a block of Claude's without a call", "<function_calls>\nnone\n</function_calls>"),
    _case("no line breaks", _WRITER.write([A]).replace("\n", ""), [A]),
    _case("no first tag", f"I look.\n{_GOOD}</tool_call>\n", [A], "I look."),
    _case("two functions in a block", f"<tool_call>\n{_GOOD}{_GOOD}</tool_call>", [A, A]),
    _case("no tags around two functions", f"I look.\n\n{_GOOD}{_GOOD}", [A, A], "I look."),
    _case("no arguments in one line", "<tool_call><function=list></function></tool_call>", [LIST]),
    _case(
        "the names of the parameters as they come",
        "<tool_call><function=note><parameter=b c>\n1\n</parameter><parameter=é>\n2\n</parameter></function>",
        [Call("note", {"b c": "1", "é": "2"}, '{"b c": "1", "é": "2"}')],
    ),
    _case(
        "a parameter twice",
        "<tool_call><function=note><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        [Call("note", {"a": "1"}, '{"a": "1"}')],
    ),
    _case(
        "a parameter twice, and a third time with half an end",
        f"{_BEGIN}\n</parameter>\n<parameter=path>\na\n</parameter>\n<parameter=limit>\n2\n</parameter>\n"
        "<parameter=path>\nb\n</para",
        [Call("read", {"path": "a", "limit": 2}, '{"path": "a", "limit": 2}')],
    ),
    _case(
        "a parameter twice before the limit",
        f"{_BEGIN}\n</parameter>\n<parameter=path>\nb",
        open_call=("read", '{"path": "a"'),
        complete=False,
    ),
    _case(
        "a parameter before and behind all of them",
        f"{_BEGIN}\n</parameter>\n<parameter=arguments>\n"
        '{"path": "b", "limit": 2}\n</parameter>\n'
        "<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>",
        [Call("read", {"path": "a", "limit": 2}, '{"path": "a", "limit": 2}')],
    ),
    _case(
        "all parameters in two parts",
        '<tool_call>\n<function=read>\n<parameter=arguments>\n{"path": "a"}\n</parameter>\n'
        '<parameter=arguments>\n{"limit": 2}\n</parameter>\n</function>\n</tool_call>',
        [Call("read", {"path": "a", "limit": 2}, '{"path": "a", "limit": 2}')],
    ),
    _case(
        "a word under the name of all parameters, twice",
        "<tool_call>\n<function=read>\n<parameter=arguments>\nb\n</parameter>\n"
        "<parameter=arguments>\nc\n</parameter>\n</function>\n</tool_call>",
        [Call("read", {"arguments": "b"}, '{"arguments": "b"}')],
    ),
    _case("no last tag", f"<tool_call>\n{_GOOD}", [A]),
    _case("no last tags", f"{_BEGIN}\n</parameter>", [A]),
    _case("no last tags after a line break", f"{_BEGIN}\n</parameter>\n", [A]),
    _case("half of the last tags", f"{_BEGIN}\n</parameter>\n</func", [A]),
    _case("no last tags and no arguments", "<tool_call>\n<function=list>\n", [LIST]),
    _case("no end of the function", f"{_BEGIN}\n</parameter>\n</tool_call>", [A]),
    _case(
        "no end of the function before another call",
        f"{_BEGIN}</parameter></tool_call>\n{_GOOD}",
        [A, A],
    ),
    _case("a reply that ends in a value", f"{_BEGIN}\nb", [Call("read", {"path": "a\nb"})]),
    _plain("a reply that ends after a parameter's name", _BEGIN[:-2]),
    _case(
        "a reply that ends in a second parameter's name",
        f"{_BEGIN}\n</parameter>\n<parameter=lim",
        [A],
    ),
    _case(
        "a cut after a parameter",
        f"{_BEGIN}\n</parameter>",
        open_call=("read", '{"path": "a'),
        complete=False,
    ),
    _case(
        "a value that no tag ends",
        f"{_BEGIN}\n</function>\n</tool_call>",
        [A],
    ),
    _case(
        "prose after the end of a value",
        f"{_BEGIN}</parameter> is a tag\n</parameter>\n</function>\n</tool_call>",
        [Call("read", {"path": "a</parameter> is a tag"})],
    ),
    _case(
        "a tool that was not offered in the middle",
        f"<tool_call>\n{_GOOD}{_BAD}{_GOOD}</tool_call>",
        [A, A],
        _BAD.rstrip(),
    ),
    _case(
        "a tool that was not offered first",
        f"<tool_call>\n{_BAD}{_GOOD}</tool_call>",
        [A],
        f"<tool_call>\n{_BAD}".rstrip(),
    ),
    _case(
        "a tool that was not offered last",
        f"<tool_call>\n{_GOOD}{_BAD}</tool_call>",
        [A],
        f"{_BAD}</tool_call>",
    ),
    _case(
        "a good function after a malformed one",
        f"<tool_call>\n<function=read>hello</function>\n{_GOOD}</tool_call>",
        [A],
        "<tool_call>\n<function=read>hello</function>",
    ),
    _case(
        "a good call after a malformed one",
        f"<tool_call><function=remove!>all\n{_WRITER.write([READ])}",
        [READ],
        "<tool_call><function=remove!>all",
    ),
    _plain("text for parameters", "<tool_call><function=read>hello</function></tool_call>"),
    _plain("no name", "<tool_call><function=></function></tool_call>"),
    _plain(
        "a parameter without a name",
        "<tool_call><function=read><parameter=>a</parameter></function></tool_call>",
    ),
    _plain("spaces without end", "<tool_call>" + " " * 100 + _GOOD.replace("read", "remove!")),
    _plain("nothing but the opener", "<tool_call>"),
    _plain("a cut function", "<tool_call>\n<function=rea"),
    Case(
        name="a cut function without arguments",
        text="<tool_call>\n<function=list>\n",
        content="<tool_call>\n<function=list>\n",
        family=_FAMILY,
        complete=False,
    ),
)
