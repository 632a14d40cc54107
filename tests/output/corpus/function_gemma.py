"""FunctionGemma: Gemma's notation with another quote."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.writers import WRITERS

_WRITER = WRITERS["function_gemma"]


def _case(name, text, calls=(), content="") -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_WRITER.family)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


def _typed(inner: str) -> str:
    return f"<start_function_call>call:typed{{{inner}}}<end_function_call>"


A = Call("read", {"path": "a"}, '{"path": "a"}')
_GOOD = "<start_function_call>call:read{path:<escape>a<escape>}<end_function_call>"
_NESTED = {"options": {"a": [1, -2.5, True, None, '<|"|>x,y}'], "b": {}}, "tags": [], "count": 3}

CASES = (
    _case("a number between the marks of a text",
          "<start_function_call>call:typed{count:<escape>-3<escape>}<end_function_call>",
          [Call("typed", {"count": -3})]),
    _case("values of every kind", _WRITER.write([Call("typed", _NESTED)]), [Call("typed", _NESTED)]),
    _case("white space everywhere",
          "<start_function_call> call:read { path : <escape>a<escape> } <end_function_call>", [A]),
    _case("quoted keys", _GOOD.replace("path", "<escape>path<escape>"), [A]),
    _case("braces in a text", _typed("free:<escape>}{<end_function_call><escape>"),
          [Call("typed", {"free": "}{<end_function_call>"})]),
    _case("two calls in one block", _GOOD.replace("<end", "call:list{}<end"), [A, Call("list")]),
    _case("no last mark", _GOOD.removesuffix("<end_function_call>"), [A]),
    _case("calls side by side", _GOOD * 3, [A, A, A]),
    _case("a good call after a malformed one", f"{_typed('path')}{_GOOD}", [A], _typed("path")),
    _case("a text without quotes", _typed("free:hello"), [Call("typed", {"free": "hello"})]),
    _plain("an empty value", _typed("free:")),
    _plain("the quote of Gemma 4", _GOOD.replace("<escape>", '<|"|>')),
    _case("a text that does not end", _GOOD.replace("a<escape>", "a"), [A]),
    _plain("no word before the name", "<start_function_call>read{}<end_function_call>"),
    _plain("a cut text", "<start_function_call>call:read{path:<escape>a<esc"),
)  # fmt: skip
