"""Gemma 4: a notation of its own."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST, READ
from tests.output.corpus.writers import WRITERS

_WRITER = WRITERS["gemma4"]
_FAMILY = _WRITER.family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


def _typed(inner: str) -> str:
    return f"<|tool_call>call:typed{{{inner}}}<tool_call|>"


A = Call("read", {"path": "a"}, '{"path": "a"}')
_GOOD = '<|tool_call>call:read{path:<|"|>a<|"|>}<tool_call|>'
_NESTED = {"options": {"a": [1, -2.5, True, None, "x,y}"], "b": {}}, "tags": [], "count": 3}

CASES = (
    _case("values of every kind", _WRITER.write([Call("typed", _NESTED)]), [Call("typed", _NESTED)]),
    _case("Python's None", _typed('tags:["one",None],count:None'),
          [Call("typed", {"tags": ["one", None], "count": None})]),
    _case("white space everywhere", '<|tool_call> call:read { path : <|"|>a<|"|> } <tool_call|>', [A]),
    _case("quoted keys", _GOOD.replace("path", '<|"|>path<|"|>'), [A]),
    _case("texts in JSON's quotes", _GOOD.replace('<|"|>', '"'), [A]),
    _case("a text with spaces in JSON's quotes", _typed('free:"a, b: {c}"'),
          [Call("typed", {"free": "a, b: {c}"})]),
    _case("texts without quotes", _typed("free:New York (US) , mixed: 東京 ,tags:[a b,c]"),
          [Call("typed", {"free": "New York (US)", "mixed": "東京", "tags": ["a b", "c"]})]),
    _case("Python's constants", _typed("flag:True,nothing:None,free:False"),
          [Call("typed", {"flag": True, "nothing": None, "free": False})]),
    _case("a colon before the call", _GOOD.replace("call:", ":call:"), [A]),
    _case("a comma too many", _GOOD.replace("}", ",}"), [A]),
    _case("a key twice", _typed("count:1,count:2"), [Call("typed", {"count": 2})]),
    _case("half a character", _typed('free:"\\ud83d"'),
          [Call("typed", {"free": "\ufffd"}, '{"free": "\ufffd"}')]),
    _case("empty braces", "<|tool_call>call:list{}<tool_call|>", [LIST]),
    _case("no last mark", _GOOD.removesuffix("<tool_call|>"), [A]),
    _case("half a last mark", _GOOD.removesuffix("call|>"), [A]),
    _case("calls side by side", _GOOD * 3, [A, A, A]),
    _case("a good call after a malformed one", f"<|tool_call>call:read{{path}}<tool_call|>{_GOOD}", [A],
          "<|tool_call>call:read{path}<tool_call|>"),
    _case("a good call after a text that does not end",
          f'<|tool_call>call:read{{path:<|"|>a}}<tool_call|>\n{_WRITER.write([READ])}', [A, READ]),
    _case("two calls in one block", _GOOD.replace("<tool", "call:list{}<tool"), [A, LIST]),
    _case("two calls in one block in lines", _GOOD.replace("<tool", "\n call:list{}\n<tool"), [A, LIST]),
    _case("a call of another tool in a block", "<|tool_call>call:remove{}call:list{}<tool_call|>",
          [Call("remove"), LIST]),
    _case("a call after its end", f"{_GOOD}call:list{{}}", [A], "call:list{}"),
    _case("a bare call", 'call:read{path:<|"|>a<|"|>}', [A]),
    _case("bare calls", '\ncall:read{path:<|"|>a<|"|>}\ncall:list{}', [A, LIST]),
    _case("a bare call with its end", _GOOD.removeprefix("<|tool_call>"), [A]),
    _case("a bare call after reasoning", "<think>Hm.</think>\n\ncall:list{}", [LIST], reasoning="Hm."),
    _plain("a bare call after text", "I look. call:list{}"),
    _plain("a bare call of another tool", "call:remove{}"),
    _plain("a word and a colon", "call: me later"),
    _plain("half a bare call", "call:list{"),
    _plain("half a word", "cal"),
    _case("keys in JSON's quotes", '<|tool_call>call:read{"path":<|"|>a<|"|>}<tool_call|>', [A]),
    _case("no number", _typed("ratio:NaN"), [Call("typed", {"ratio": "NaN"})]),
    _case("a number that is too large", _typed("ratio:1e999"), [Call("typed", {"ratio": "1e999"})]),
    _plain("a text without quotes that has a colon", _typed("free:see: it")),
    _plain("a path without quotes", _typed("free:/a/b")),
    _plain("no value", _typed("free:")),
    _plain("no comma", _typed("count:1 ratio:2")),
    _plain("two commas", _typed("count:1,,ratio:2")),
    _plain("a bracket for a brace", _typed("options:{a:1]")),
    _case("a brace too few", "<|tool_call>call:typed{options:{a:1}<tool_call|>",
          [Call("typed", {"options": {"a": 1}})]),
    _plain("values too deep", _typed("tags:" + "[" * 1_500 + "]" * 1_500)),
    _plain("a list of arguments", "<|tool_call>call:read[1]<tool_call|>"),
    _plain("no word before the name", "<|tool_call>read{}<tool_call|>"),
    _plain("a cut text", '<|tool_call>call:read{path:<|"|>a<|"'),
)  # fmt: skip
