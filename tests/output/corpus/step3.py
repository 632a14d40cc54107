"""Step 3: tags of a namespace between DeepSeek's marks."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["step3"].family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


A = Call("read", {"path": "a"}, '{"path": "a"}')
_OPENER, _END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_HEAD, _CALL_END = "<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"
_BEGIN = f'{_HEAD}<steptml:invoke name="read"><steptml:parameter name="path">a'
_GOOD = f"{_BEGIN}</steptml:parameter></steptml:invoke>{_CALL_END}"
_BAD = f'{_HEAD}<steptml:invoke name="remove!"></steptml:invoke>'
_BROKEN = f'{_HEAD}<steptml:invoke name="read">path a</steptml:invoke>{_CALL_END}'
_TAGS = "a</steptml:parameter> <steptml:invoke"


def _block(*calls: str, between: str = "") -> str:
    return f"{_OPENER}{between.join(calls)}{_END}"


CASES = (
    _case("white space everywhere", _block(_GOOD).replace("><", ">\n <"), [A]),
    _case("no word before the call", _block(_GOOD.replace("function<｜tool_sep｜>", "")), [A]),
    _case("the name before the call", _block(_GOOD.replace("<steptml:inv", "read\n<steptml:inv")), [A]),
    _case("a mark between two calls", _block(_GOOD, _GOOD, between="<｜tool_sep｜>"), [A, A]),
    _case("calls side by side", _block(_GOOD, _GOOD), [A, A]),
    _case("no arguments and no end of the call", _block(_BAD.replace("remove!", "list")), [Call("list")]),
    _case("white space that belongs to a value", _block(_GOOD.replace(">a<", ">\n  a\n<")),
          [Call("read", {"path": "\n  a\n"})]),
    _case("text around calls", f"I look.\n\n{_block(_GOOD)}\n\nDone.", [A], "I look.Done."),
    _case("no end of the block", f"{_OPENER}{_GOOD}", [A]),
    _case("no end of the call", f"{_OPENER}{_BEGIN}</steptml:parameter></steptml:invoke>", [A]),
    _case("half an end of the block", _block(_GOOD)[:-5], [A]),
    _case("a reply that ends in a value", f"{_OPENER}{_BEGIN}", [A]),
    _case("tags in a value", _block(_GOOD.replace(">a<", f">{_TAGS}<")), [Call("read", {"path": _TAGS})]),
    _case("a tool that was not offered in the middle", _block(_GOOD, f"{_BAD}{_CALL_END}", _GOOD), [A, A],
          f"{_CALL_END}{_BAD}"),
    _case("a good call after a malformed one", f"{_OPENER}{_BROKEN}{_block(_GOOD)}", [A],
          f"{_OPENER}{_BROKEN}"),
    _plain("a malformed call", _block(_BROKEN)),
    _plain("an empty block", _block()),
    _plain("no name", _block(_GOOD.replace('"read"', '""'))),
    _plain("a cut head", f'{_OPENER}{_HEAD}<steptml:invoke name="rea'),
)  # fmt: skip
