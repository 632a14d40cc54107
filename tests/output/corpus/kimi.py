"""Kimi K2: a section of calls."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.writers import WRITERS

_WRITER = WRITERS["kimi"]
_FAMILY = _WRITER.family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


REMOVE = Call("remove")
A = Call("read", {"path": "a"}, '{"path": "a"}')
_END = "<|tool_call_end|>"
_GOOD = '<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{"path": "a"}<|tool_call_end|>'
_BAD = "<|tool_call_begin|>functions.remove:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
_BROKEN = '<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{"path": <|tool_call_end|>'


def _section(inner: str) -> str:
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


CASES = (
    _case("white space everywhere", _section(_GOOD).replace("|><|", "|>\n <|"), [A]),
    _case("no word before the name", _section(_GOOD.replace("functions.", "")), [A]),
    _case("no number after the name", _section(_GOOD.replace(":0", "")), [A]),
    _case("no section", f"I look.\n{_GOOD}", [A], "I look."),
    _case("no end of the section", f"<|tool_calls_section_begin|>{_GOOD}", [A]),
    _case("no end of the call", _section(_GOOD.removesuffix(_END)), [A]),
    _case("no ends at all", f"<|tool_calls_section_begin|>{_GOOD.removesuffix(_END)}", [A]),
    _case(
        "a call of another tool in the middle",
        _section(f"{_GOOD}{_BAD}{_GOOD}"),
        [A, REMOVE, A],
    ),
    _case(
        "a call of another tool first",
        _section(f"{_BAD}{_GOOD}"),
        [REMOVE, A],
    ),
    _case("a call of another tool last", _section(f"{_GOOD}{_BAD}"), [A, REMOVE]),
    _case(
        "a good call after a malformed one",
        _section(f"{_BROKEN}{_GOOD}"),
        [A],
        f"<|tool_calls_section_begin|>{_BROKEN}",
    ),
    _case("a misspelt section", _section(_GOOD).replace("calls_", "call_"), [A]),
    _case(
        "a misspelt end of the section", f"<|tool_calls_section_begin|>{_GOOD}<|tool_call_section_end|>", [A]
    ),
    _plain("an empty section", _section("")),
    _plain("a malformed call", _section(_BROKEN)),
    _plain("a list of arguments", _section(_GOOD.replace('{"path": "a"}', "[1]"))),
    _plain("a cut head", "<|tool_calls_section_begin|><|tool_call_begin|>functions.re"),
)
