"""LongCat: GLM's cases in tags of its own, and objects."""

from dataclasses import replace

from tests.output.corpus import glm
from tests.output.corpus.case import Call, Case
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["longcat"].family
_A = Call("read", {"path": "a"}, '{"path": "a"}')
_OPENER, _END = "<longcat_tool_call>", "</longcat_tool_call>"
_GOOD = '{"name": "read", "arguments": {"path": "a"}}'


def _own_tags(text: str) -> str:
    for tag in ("tool_", "arg_"):
        text = text.replace(f"<{tag}", f"<longcat_{tag}").replace(f"</{tag}", f"</longcat_{tag}")
    return text


def _own(case: Case) -> Case:
    calls = tuple(
        Call(call.name, {key: _own_value(value) for key, value in call.arguments.items()})
        for call in case.calls
    )
    text, content = _own_tags(case.text), _own_tags(case.content)
    return replace(case, text=text, content=content, calls=calls, family=_FAMILY)


def _own_value(value: object) -> object:
    return _own_tags(value) if isinstance(value, str) else value


def _object(name: str, text: str, calls: tuple[Call, ...] = (), content: str = "") -> Case:
    return Case(name=name, text=text, calls=calls, content=content, family=_FAMILY)


CASES = (
    *(_own(case) for case in glm.CASES),
    _object("an object", f"{_OPENER}{_GOOD}{_END}", (_A,)),
    _object("two objects in a block", f"{_OPENER}\n{_GOOD}\n{_GOOD}\n{_END}", (_A, _A)),
    _object("no end after an object", f"{_OPENER}{_GOOD}", (_A,)),
    _object(
        "the end of the block in a text",
        f"{_OPENER}{_GOOD.replace('"a"', f'"{_END}"')}{_END}",
        (Call("read", {"path": _END}),),
    ),
    _object("an object that breaks off", f'{_OPENER}{{"name": {_END}', (), f'{_OPENER}{{"name": {_END}'),
)
