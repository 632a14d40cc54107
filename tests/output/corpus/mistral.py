"""Mistral: a list of calls, or a head before each."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["mistral_list"].family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


A = Call("read", {"path": "a"}, '{"path": "a"}')
_GOOD = '{"name": "read", "arguments": {"path": "a"}}'
_BAD = '{"name": "remove!", "arguments": {}}'

CASES = (
    _case(
        "an id in the object", '[TOOL_CALLS] [{"name": "list", "arguments": {}, "id": "abcdefghi"}]', [LIST]
    ),
    _case("no brackets", f"[TOOL_CALLS]{_GOOD}", [A]),
    _case("no last bracket", f"[TOOL_CALLS] [{_GOOD}, {_GOOD}", [A, A]),
    _case("no spaces", f"[TOOL_CALLS][{_GOOD},{_GOOD}]", [A, A]),
    _case("prose after the list", f"[TOOL_CALLS][{_GOOD}]\n\nDone.", [A], "Done."),
    _case("a bad call in the middle", f"[TOOL_CALLS][{_GOOD}, {_BAD}, {_GOOD}]", [A, A], f", {_BAD}"),
    _case("a bad call first", f"[TOOL_CALLS][{_BAD}, {_GOOD}]", [A], f"[TOOL_CALLS][{_BAD}"),
    _case("a bad call last", f"[TOOL_CALLS][{_GOOD}, {_BAD}]", [A], f", {_BAD}]"),
    _case("a malformed call last", f'[TOOL_CALLS][{_GOOD}, {{"name": x}}]', [A], ', {"name": x}]'),
    _case("junk after the comma", f"[TOOL_CALLS][{_GOOD}, 5]", [A]),
    _case("an id in the head", '[TOOL_CALLS]read[CALL_ID]abc123[ARGS]{"path": "a"}', [A]),
    _case("a head with spaces", '[TOOL_CALLS] read[ARGS] {"path": "a"}', [A]),
    _case("prose after a head", '[TOOL_CALLS]read[ARGS]{"path": "a"}\n\nDone.', [A], "Done."),
    _case(
        "a headed call after one of another tool",
        '[TOOL_CALLS]remove[ARGS]{}[TOOL_CALLS]read[ARGS]{"path": "a"}',
        [Call("remove"), A],
    ),
    _plain("an empty list", "[TOOL_CALLS][]"),
    _plain("a head without an object", "[TOOL_CALLS]read[ARGS]"),
    _plain("a head with a list", "[TOOL_CALLS]read[ARGS][1]"),
    _case("no mark of arguments", '[TOOL_CALLS]read{"path": "a"}', [A]),
    _case("no mark of arguments in two calls", '[TOOL_CALLS]read{"path": "a"}[TOOL_CALLS]list {}', [A, LIST]),
    _case("prose after a call without a mark", '[TOOL_CALLS]read{"path": "a"}\nDone.', [A], "Done."),
    _case(
        "a tool that was not offered without a mark",
        '[TOOL_CALLS]remove{"path": "a"}',
        [Call("remove", {"path": "a"})],
    ),
    _plain("an object in prose", "[TOOL_CALLS] opens {it}."),
    _plain("malformed arguments", '[TOOL_CALLS]read[ARGS]{"path": a}'),
    _plain("a cut list", '[TOOL_CALLS][{"name": "read", "argum'),
)
