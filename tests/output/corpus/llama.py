"""Llama 3: bare objects, and objects in a function's tag."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["llama_bare"].family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


A = Call("read", {"path": "a"}, '{"path": "a"}')
_GOOD = '{"name": "read", "parameters": {"path": "a"}}'
_BAD = '{"name": "remove", "parameters": {}}'
_TAGGED = '<function=read>{"path": "a"}</function>'

CASES = (
    _case("a type before the name", '{"type": "function", "name": "list", "parameters": {}}', [LIST]),
    _case("parameters before the name", '{"parameters": {"path": "a"}, "name": "read"}', [A]),
    _case("arguments for parameters", '{ "name": "read", "arguments": {"path": "a"}}', [A]),
    _case("objects without a mark between them", f"{_GOOD}\n{_GOOD}", [A, A]),
    _case("objects after a comma", f"{_GOOD}, {_GOOD}", [A, A]),
    _case("a bad object first", f"{_BAD}; {_GOOD}", [A], _BAD),
    _case("a bad object in the middle", f"{_GOOD}; {_BAD}; {_GOOD}", [A, A], f"; {_BAD}"),
    _case("prose after an object", f"{_GOOD} is it.", [A], " is it."),
    _case("a mark after an object", f"{_GOOD};", [A], ";"),
    _case("a bare object after reasoning", f"<think>Hm.</think>\n\n{_GOOD}", [A], reasoning="Hm."),
    _case("no end of the function", _TAGGED.removesuffix("</function>"), [A]),
    _case("half an end of the function", _TAGGED.removesuffix("ction>"), [A]),
    _case("functions side by side", _TAGGED * 2, [A, A]),
    _case("a good function after a bad one", f"<function=remove!>{{}}</function>{_TAGGED}", [A],
          "<function=remove!>{}</function>"),
    _case("a good function after a malformed one", f'<function=read>{{"path": a}}</function>{_TAGGED}', [A],
          '<function=read>{"path": a}</function>'),
    _case("the form of a tool",
          '{"type": "function", "function": {"name": "read", "parameters": {"path": "a"}}}', [A]),
    _case("a function before its name", '{"function": {"name": "read", "parameters": {"path": "a"}}}', [A]),
    _case("a function for the name", '{"function": "read", "parameters": {"path": "a"}}', [A]),
    _case("a call in Python", "<|python_tag|>read.call(path='a')", [A]),
    _case("a call in Python after text", "I look.\n<|python_tag|>read.call(path=\"a\", limit=1)",
          [Call("read", {"path": "a", "limit": 1})], "I look."),
    _plain("a call in Python of another tool", "<|python_tag|>remove.call(path='a')"),
    _plain("a call in Python that is cut", "<|python_tag|>read.call(path='a'"),
    _plain("another method in Python", "<|python_tag|>read.text(path='a')"),
    _plain("the definition of a tool", '{"type": "function", "function": {"name": "read", "description": "", '
           '"parameters": {}}}'),
    _plain("an answer in JSON", ' {"path": "a", "lines": [1, 2]}\n'),
    _plain("an answer with a name", '{"name": "Ada", "born": 1815}'),
    _plain("an answer that names a tool", '{"name": "list"}'),
    _plain("an answer with a tool's name", '{"name": "read", "path": "a"}'),
    _plain("answers line by line", '{"name": "Ada"}\n{"name": "Grace"}\n'),
    _plain("a schema", '{"type": "object", "properties": {}}'),
    _plain("half an object", '{"name": "read", "parameters": {"path"'),
    _plain("half an opener before an object", f"<|python_{_GOOD}"),
    _plain("Python after the tag", "<|python_tag|>print({1: 2})"),
    _plain("a function that is only named", "Write `<function=read>` first."),
    _plain("a list of arguments", "<function=read>[1]</function>"),
)  # fmt: skip
