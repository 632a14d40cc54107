"""Solar Open: calls with an id, a name and an object between marks; an answer and calls are messages."""

from dataclasses import replace

from start_llm.formats.registry import FAMILIES
from tests.output.corpus.case import Call, Case

_FAMILY = FAMILIES["solar_open"].family
A, B = Call("read", {"path": "a"}), Call("read", {"path": "b"})
_NEXT = "<|end|><|begin|>assistant"


def _call(path: str, number: str = "a1b2c3d4e5", end: str = "<|tool_call:end|>") -> str:
    return f'<|tool_call:begin|>{number}<|tool_call:name|>read<|tool_call:args|>{{"path": "{path}"}}{end}'


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


CASES = (
    _case("a call", f"<|tool_calls|>{_call('a')}", [A]),
    _case("two calls", f"<|tool_calls|>{_call('a')}{_call('b', 'f6')}<|calls|>", [A, B]),
    _case("no mark around the calls", _call("a"), [A]),
    _case("no id", f"<|tool_calls|>{_call('a', '')}", [A]),
    _case("no end", f"<|tool_calls|>{_call('a', end='')}", [A]),
    _case("text, then calls", f"I look.{_NEXT}<|tool_calls|>{_call('a')}", [A], "I look."),
    _case(
        "reasoning, then an answer",
        f"<|think|>Hm.{_NEXT}<|content|>Yes.<|end|>",
        content="Yes.",
        reasoning="Hm.",
    ),
    _case(
        "reasoning, then text, then calls",
        f"<|think|>Hm.{_NEXT}<|content|>I look.{_NEXT}<|tool_calls|>{_call('a')}<|calls|>",
        [A],
        "I look.",
        reasoning="Hm.",
    ),
    _case("single quotes", f"<|tool_calls|>{_call('a')}".replace('"', "'"), [A]),
    replace(
        _case("a call that the limit cuts", f"<|tool_calls|>{_call('a')}<|tool_call:begin|>f6", [A]),
        complete=False,
    ),
    _case(
        "no object",
        "<|tool_call:begin|>x<|tool_call:name|>read<|tool_call:args|>a",
        content="<|tool_call:begin|>x<|tool_call:name|>read<|tool_call:args|>a",
    ),
)
