"""K2 Horizon: GLM's cases in tags of its own, blocks of calls, stated types, and objects."""

from dataclasses import replace

from tests.output.corpus import glm
from tests.output.corpus.case import Call, Case
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["k2_horizon"].family
A = Call("read", {"path": "a"}, '{"path": "a"}')
_BLOCK, _BLOCK_END = "<ifm|tool_calls>\n", "</ifm|tool_calls>"
_GOOD = (
    "<ifm|tool_call>read\n<ifm|arg_key>path</ifm|arg_key>\n"
    "<ifm|arg_value>a</ifm|arg_value>\n</ifm|tool_call>\n"
)
_OBJECT = '<ifm|tool_call>{"name": "read", "arguments": {"path": "a"}}</ifm|tool_call>\n'


def _own_tags(text: str) -> str:
    for tag in ("tool_", "arg_"):
        text = text.replace(f"<{tag}", f"<ifm|{tag}").replace(f"</{tag}", f"</ifm|{tag}")
    return text


def _own(case: Case) -> Case:
    calls = tuple(
        Call(call.name, {key: _own_value(value) for key, value in call.arguments.items()})
        for call in case.calls
    )
    return replace(
        case, text=_own_tags(case.text), content=_own_tags(case.content), calls=calls, family=_FAMILY
    )


def _own_value(value: object) -> object:
    return _own_tags(value) if isinstance(value, str) else value


def _typed(kind: str, value: str) -> str:
    key = f"<ifm|arg_key>mixed</ifm|arg_key>\n<ifm|arg_type>{kind}</ifm|arg_type>\n"
    return f"<ifm|tool_call>typed\n{key}<ifm|arg_value>{value}</ifm|arg_value>\n</ifm|tool_call>"


def _case(name: str, text: str, *calls: Call, content: str = "") -> Case:
    return Case(name=name, text=text, calls=calls, content=content, family=_FAMILY)


CASES = (
    *(_own(case) for case in glm.CASES),
    _case("K2: two calls in a block", f"{_BLOCK}{_GOOD}{_GOOD}{_BLOCK_END}", A, A),
    _case("text around a block", f"I look.{_BLOCK}{_GOOD}{_BLOCK_END}Done.", A, content="I look.Done."),
    _case("no end of the block", f"{_BLOCK}{_GOOD}", A),
    _case("a stated number", _typed("integer", "3"), Call("typed", {"mixed": 3})),
    _case("a stated text", _typed("string", "3"), Call("typed", {"mixed": "3"})),
    _case("an object", f"{_BLOCK}{_OBJECT}{_BLOCK_END}", A),
    _case("two objects", f"{_BLOCK}{_OBJECT}{_OBJECT}{_BLOCK_END}", A, A),
    _case("an object without a block", f"{_OBJECT}Done.", A, content="Done."),
)
