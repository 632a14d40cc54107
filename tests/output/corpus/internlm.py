"""InternLM: a JSON object after two marks."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["internlm"].family


def _case(name, text, calls=(), content="") -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


A = Call("read", {"path": "a"}, '{"path": "a"}')
_MARKS, _END = "<|action_start|><|plugin|>", "<|action_end|>"
_GOOD = f'{_MARKS}{{"name": "read", "parameters": {{"path": "a"}}}}{_END}'
_BAD = f'{_MARKS}{{"name": "remove!", "parameters": {{}}}}'
_MALFORMED = f'{_MARKS}{{"name": "read", "parameters": {{"path": }}}}'

CASES = (
    _case("white space everywhere", _GOOD.replace("|>", "|> \n").replace("<|action_e", " <|action_e"), [A]),
    _case("arguments for parameters", _GOOD.replace("parameters", "arguments"), [A]),
    _case("no last mark", _GOOD.removesuffix(_END), [A]),
    _case("half a last mark", _GOOD.removesuffix("end|>"), [A]),
    _case("calls side by side", _GOOD * 3, [A, A, A]),
    _case("text around a call", f"I look.\n{_GOOD}\nDone.", [A], "I look.Done."),
    _case("a good call after a bad one", f"{_BAD}{_END}{_GOOD}", [A], f"{_BAD}{_END}"),
    _case("a bad call after a good one", f"{_GOOD}{_BAD}{_END}", [A], f"{_BAD}{_END}"),
    _case("a good call after a malformed one", f"{_MALFORMED}{_END}{_GOOD}", [A], f"{_MALFORMED}{_END}"),
    _case("its marks in a value", _GOOD.replace('"a"', f'"{_MARKS}{_END}"'),
          [Call("read", {"path": f"{_MARKS}{_END}"})]),
    _plain("a malformed call", f"{_MALFORMED}{_END}"),
    _plain("another plugin", _GOOD.replace("plugin", "interpreter")),
    _plain("one mark", _GOOD.replace("<|plugin|>", "")),
    _plain("a list of arguments", _GOOD.replace('{"path": "a"}', "[1]")),
    _plain("a text for parameters", _GOOD.replace('{"path": "a"}', '"a"')),
    _plain("prose", f"{_MARKS}read the file{_END}"),
    _plain("an empty block", f"{_MARKS}{_END}"),
    _plain("a cut call", _GOOD[: len(_GOOD) // 2]),
    _plain("a cut mark", "<|action_start|><|plu"),
)  # fmt: skip
