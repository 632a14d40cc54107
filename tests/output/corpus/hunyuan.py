"""Hunyuan: a JSON list between tags; Hy3: GLM's keys and values between the same tags."""

import re
from dataclasses import replace

from tests.output.corpus.case import Call, Case
from tests.output.corpus.lists import A, ListForm, list_cases
from tests.output.corpus.writers import WRITERS

_FORM = ListForm(writer="hunyuan", opening="<tool_calls>[", closing="]</tool_calls>")
_FAMILY = WRITERS["hy3"].family


def _case(name, text, calls=(), content="", **more) -> Case:
    name = f"Hy3: {name}"
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


_OPENER, _END = "<tool_calls>\n", "</tool_calls>"
_BEGIN = "<tool_call>read<tool_sep>\n<arg_key>path</arg_key>\n<arg_value>a"
_GOOD = f"{_BEGIN}</arg_value>\n</tool_call>\n"
_BAD = "<tool_call>remove!<tool_sep>\n</tool_call>\n"
_BROKEN = "<tool_call>read<tool_sep>\npath a\n</tool_call>\n"
_TAGS = "a</arg_value> <arg_key></tool_calls>"

_HY4 = f"{_OPENER}{_GOOD}{_GOOD}{_END}".replace("<tool_sep>", "")


def _with_suffix(case: Case) -> Case:
    """With `:opensource` behind the name of each tag."""
    family = WRITERS["hy3_opensource"].family
    name = case.name.replace("Hy3", "Hy3 with suffixes")
    calls = tuple(Call(call.name, _suffixed(call.arguments)) for call in case.calls)
    return replace(
        case,
        name=name,
        text=_suffixed(case.text),
        content=_suffixed(case.content),
        calls=calls,
        family=family,
    )


def _suffixed(value):
    if isinstance(value, dict):
        return {key: _suffixed(inner) for key, inner in value.items()}
    return re.sub(r"(</?(?:tool_calls?|tool_sep|arg_key|arg_value))(?=>)", r"\1:opensource", value)


_HY3 = (
    _case("no line breaks", f"{_OPENER}{_GOOD}{_END}".replace("\n", ""), [A]),
    _case("no arguments", "<tool_calls><tool_call>list<tool_sep></tool_call></tool_calls>", [Call("list")]),
    _case("two calls", f"{_OPENER}{_GOOD}{_GOOD}{_END}", [A, A]),
    _case("text before calls", f"I look.{_OPENER}{_GOOD}{_END}", [A], "I look."),
    _case("newlines that belong to the value", f"{_OPENER}{_GOOD}{_END}".replace(">a<", ">\na\n<"),
          [Call("read", {"path": "\na\n"})]),
    _case("no end of the block", f"{_OPENER}{_GOOD}", [A]),
    _case("no end of the call", f"{_OPENER}{_BEGIN}</arg_value>\n", [A]),
    _case("a reply that ends in a value", f"{_OPENER}{_BEGIN}", [A]),
    _case("all tags in a value", f"{_OPENER}{_GOOD}{_END}".replace(">a<", f">{_TAGS}<"),
          [Call("read", {"path": _TAGS})]),
    _case("a tool that was not offered in the middle", f"{_OPENER}{_GOOD}{_BAD}{_GOOD}{_END}", [A, A],
          _BAD.rstrip()),
    _case("a good call after a malformed one", f"{_OPENER}{_BROKEN}{_OPENER}{_GOOD}{_END}", [A],
          f"{_OPENER}{_BROKEN}".rstrip()),
    _case("no mark behind the name, as in Hy4", _HY4, [A, A]),
    _plain("a malformed call", f"{_OPENER}{_BROKEN}{_END}"),
    _plain("an empty block", f"{_OPENER}{_END}"),
    _plain("a cut head", f"{_OPENER}<tool_call>read<tool_"),
)  # fmt: skip
CASES = (*list_cases(_FORM), *_HY3, *map(_with_suffix, _HY3))
