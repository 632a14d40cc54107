"""Hermes and stock Qwen3: JSON in `<tool_call>`."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST, READ
from tests.output.corpus.writers import WRITERS

_WRITER = WRITERS["hermes"]
_FAMILY = _WRITER.family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


def _wrapped(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


A = Call("read", {"path": "a"}, '{"path": "a"}')
_GOOD = '{"name": "read", "arguments": {"path": "a"}}'

CASES = (
    _case("two objects in a block", _wrapped(f"{_GOOD}\n{_GOOD}"), [A, A]),
    _case("the name after the arguments", _wrapped('{"arguments": {"path": "a"}, "name": "read"}'), [A]),
    _case(
        "arguments as they were written",
        _wrapped('{"name":"read","arguments":{ "path" :"\\u0061\\/b" ,"limit":1.0e1}}'),
        [Call("read", {"path": "a/b", "limit": 10.0}, '{ "path" :"\\u0061\\/b" ,"limit":1.0e1}')],
    ),
    _case(
        "arguments as a text",
        _wrapped('{"name": "read", "arguments": "{\\"path\\": \\"a\\"}"}'),
        [A],
    ),
    _case(
        "arguments under the name of parameters",
        _wrapped('{"name": "read", "parameters": {"path": "a"}}'),
        [A],
    ),
    _case("no member for arguments", _wrapped('{"name": "list"}'), [Call("list", {}, "{}")]),
    _case("members that say nothing", _wrapped('{"type": "function", "id": "1", "name": "list"}'), [LIST]),
    _case(
        "no value for arguments", _wrapped('{"name": "list", "arguments": null}'), [Call("list", {}, "{}")]
    ),
    _case(
        "an empty text for arguments", _wrapped('{"name": "list", "arguments": ""}'), [Call("list", {}, "{}")]
    ),
    _case("a list of calls", _wrapped(f"[{_GOOD}, {_GOOD}]"), [A, A]),
    _case("a list in the tag's line", f"<tool_call>[{_GOOD}]</tool_call>", [A]),
    _case("a list without the last tag", f"<tool_call> [{_GOOD}]", [A]),
    _case("a list with something else", _wrapped(f'[{_GOOD}, "list"]'), [A]),
    _case("a fence in a block", _wrapped(f"```json\n{_GOOD}\n```"), [A]),
    _case("a fence and a list in a block", _wrapped(f"```\n[{_GOOD}]\n```"), [A]),
    _case("the last tag twice", f"{_wrapped(_GOOD)}\n</tool_call>\n\nDone.", [A], "Done."),
    _case(
        "the form of a tool",
        _wrapped('{"type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}'),
        [A],
    ),
    _case(
        "a function for the name",
        _wrapped('{"type": "function", "function": "read", "parameters": {"path": "a"}}'),
        [A],
    ),
    _case(
        "the tag of the tools",
        f"I look.\n<tools>\n{_GOOD}\n</tools>\n<tools>{_GOOD}</tools>",
        [A, A],
        "I look.",
    ),
    _case("the tag of the tools about something else", "<tools> and </tools>", [], "<tools> and </tools>"),
    _case("an empty object", _wrapped('{"name": "list", "arguments": {}}'), [Call("list", {}, "{}")]),
    _case(
        "a line break inside a text",
        _wrapped('{"name": "write", "arguments": {"text": "one\n\ttwo"}}'),
        [Call("write", {"text": "one\n\ttwo"}, '{"text": "one\\n\\ttwo"}')],
    ),
    _case(
        "a name twice, of which clients take the last",
        _wrapped('{"name": "read", "arguments": {"path": "a", "path": "b"}}'),
        [Call("read", {"path": "b"}, '{"path": "a", "path": "b"}')],
    ),
    _case(
        "half a character",
        _wrapped('{"name": "read", "arguments": {"path": "a \\ud83d b"}}'),
        [Call("read", {"path": "a \ufffd b"}, '{"path": "a \ufffd b"}')],
    ),
    _case(
        "halves of characters around whole ones",
        _wrapped('{"name": "note", "arguments":  {"\\uDE00": "\\ud83d\\ud83D\\ude00\\ude00\\u00e9\\n"}}'),
        [
            Call(
                "note",
                {"\ufffd": "\ufffd😀\ufffdé\n"},
                '{"\ufffd": "\ufffd\\ud83D\\ude00\ufffd\\u00e9\\n"}',
            )
        ],
    ),
    _case(
        "half a character in the first of two values",
        _wrapped('{"name": "read", "arguments": {"path": "\\ud83d", "path": "b"}}'),
        [Call("read", {"path": "b"}, '{"path": "\ufffd", "path": "b"}')],
    ),
    _case(
        "a character of two escapes",
        _wrapped('{"name": "read", "arguments": {"path": "\\ud83d\\ude00"}}'),
        [Call("read", {"path": "😀"}, '{"path": "\\ud83d\\ude00"}')],
    ),
    _case(
        "a backslash in front of what is no escape",
        _wrapped('{"name": "read", "arguments": {"path": "\\\\ud83d"}}'),
        [Call("read", {"path": "\\ud83d"}, '{"path": "\\\\ud83d"}')],
    ),
    _case(
        "half a character beside a line break",
        _wrapped('{"name": "read", "arguments": {"path": "\\ud83d\n"}}'),
        [Call("read", {"path": "\ufffd\n"}, '{"path": "\ufffd\\n"}')],
    ),
    _case(
        "half a character in arguments as a text",
        _wrapped('{"name": "read", "arguments": "{\\"path\\": \\"\\ud83d\\"}"}'),
        [Call("read", {"path": "\ufffd"}, '{"path": "\ufffd"}')],
    ),
    _case("no line breaks", f"<tool_call>{_GOOD}</tool_call>", [A]),
    _case("two objects on one line", _wrapped(f"{_GOOD}{_GOOD}"), [A, A]),
    _case("no last tag", f"<tool_call>\n{_GOOD}", [A]),
    _case("half a last tag", f"<tool_call>\n{_GOOD}\n</tool", [A]),
    _case("no tag between two calls", f"<tool_call>{_GOOD}\n<tool_call>{_GOOD}", [A, A]),
    _case("a brace too many", f"<tool_call>{_GOOD}}}</tool_call>", [A]),
    _case(
        "a tool that was not offered in the middle",
        _wrapped(f'{_GOOD}\n{{"name": "remove!", "arguments": {{}}}}\n{_GOOD}'),
        [A, A],
        '{"name": "remove!", "arguments": {}}',
    ),
    _case(
        "a tool that was not offered first",
        _wrapped(f'{{"name": "remove!"}}\n{_GOOD}'),
        [A],
        '<tool_call>\n{"name": "remove!"}',
    ),
    _case(
        "a tool that was not offered last",
        _wrapped(f'{_GOOD}\n{{"name": "remove!"}}'),
        [A],
        '{"name": "remove!"}\n</tool_call>',
    ),
    _case(
        "a good call after a malformed one",
        '<tool_call>{"name": "read", "arguments": {"path": "a"]}</tool_call>\n' + _WRITER.write([READ]),
        [READ],
        '<tool_call>{"name": "read", "arguments": {"path": "a"]}</tool_call>',
    ),
    _case(
        "a good call after a text that does not end",
        '<tool_call>{"name": "read", "arguments": {"path": "a}}</tool_call>\n' + _WRITER.write([READ]),
        [READ],
        '<tool_call>{"name": "read", "arguments": {"path": "a}}</tool_call>',
    ),
    _case("a comma too many", _wrapped('{"name": "read", "arguments": {"path": "a",}}'), [A]),
    _case("a comma after the arguments", _wrapped('{"name": "read", "arguments": {"path": "a"},}'), [A]),
    _plain("a comma in front", _wrapped('{, "name": "list"}')),
    _case("a brace too few", _wrapped('{"name": "read", "arguments": {"path": "a"}'), [A]),
    _plain("a bracket for a brace", _wrapped('{"name": "read", "arguments": {"path": "a"]}')),
    *(
        _case(
            name,
            _wrapped(f'{{"name": "read", "arguments": {{"limit": {number}}}}}'),
            [Call("read", {"limit": number})],
        )
        for name, number in {
            "no number": "NaN",
            "a number without end": "-Infinity",
            "a number that is too large": "1e999",
            "a number that is too long": "1" * 5000,
        }.items()
    ),
    _plain("arguments too deep", _wrapped('{"name": "list", "arguments": ' + '{"a":' * 1_500 + "}" * 1_500)),
    _plain("a list of arguments", _wrapped('{"name": "read", "arguments": ["a"]}')),
    _plain("a list as a text", _wrapped('{"name": "read", "arguments": "[1]"}')),
    _plain("arguments beside the name", _wrapped('{"name": "read", "path": "a"}')),
    _case("single quotes", _wrapped("{'name': 'read', 'arguments': {}}"), [Call("read", {})]),
    _case("a comment", _wrapped('{"name": "list" /* all */}'), [LIST]),
    _plain("no name", _wrapped('{"arguments": {"path": "a"}}')),
    _plain("a name that is a number", _wrapped('{"name": 1, "arguments": {}}')),
    _plain("an empty list", _wrapped("[]")),
    _plain("a list of something else", _wrapped("[1, null, [], {}]")),
    _plain(
        "the definition of a tool",
        _wrapped('{"type": "function", "function": {"name": "read", "description": "", "parameters": {}}}'),
    ),
    _plain(
        "a definition without its wrapper", _wrapped('{"name": "read", "description": "", "parameters": {}}')
    ),
    _plain("a function that is a number", _wrapped('{"function": 1, "arguments": {}}')),
    _plain("a word for the arguments", _wrapped('{"name": "read", "arguments": "a"}')),
    _plain("nothing in the block", _wrapped("")),
    _plain("prose in the block", _wrapped("Please use tags like this")),
    _plain("spaces without end", "<tool_call>" + " " * 100 + _GOOD),
    _case("a reply that ends before the last brace", "<tool_call>" + _GOOD[:-1], [A]),
    _plain("a cut opener", "I write <tool_ca"),
    *(
        _case(f"other tags: {before}{inner[0]}", f"{before}{inner}{after}", [A])
        for before, inner, after in (
            ("<function_call>", _GOOD, "</function_call>"),
            ("<function_calls>\n[", _GOOD, "]\n</function_calls>"),
            ('<function name="read">', '{"path": "a"}', "</function>"),
            ('<function name="read">', '<parameter name="path">a</parameter>', "</function>"),
            ('<tool_call>\n<function name="read">', '{"path": "a"}', "</function>\n</tool_call>"),
            ("<tool_call>\n<function=read>\n", '{"path": "a"}', "\n</function>\n</tool_call>"),
        )
    ),
    _plain("other tags of another tool", '<function name="erase">{"path": "a"}</function>'),
    _plain("other tags in prose", "Write `<function_calls>` and `<function name=...>` around them."),
)
