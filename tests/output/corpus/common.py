"""Cases that every format has: values that look like markup, and calls in every place."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.output.corpus.case import NO_TOOLS, Call, Case
from tests.output.corpus.writers import WRITERS, Writer

VALUES: Mapping[str, str] = {
    "indented code": "    def f():\n        return 1\n",
    "white space around it": " \t a \t ",
    "newlines around it": "\n\na\n\n",
    "a newline alone": "\n",
    "a space alone": " ",
    "nothing": "",
    "Qwen's end of a value": "a</parameter>b",
    "Qwen's end of a value last": "a</parameter>",
    "Qwen's end of a value first": "</parameter>a",
    "GLM's end of a value": "a</arg_value>b",
    "GLM's end of a value last": "a</arg_value>",
    "MiniCPM's end of a value": "a</param>b",
    "the end of a function": "a</function>b",
    "the start of a block": "a<tool_call>b",
    "the end of a block": "a</tool_call>b",
    "a whole call of Hermes": '<tool_call>{"name": "list", "arguments": {}}</tool_call>',
    "Kimi's end of a call": "a<|tool_call_end|>b",
    "Gemma's end of a call": "a<tool_call|>b",
    "Mistral's start": "a[TOOL_CALLS]b[ARGS]{}",
    "marks of reasoning": "<think>a</think>",
    "entities": "&lt;b&gt; &amp;amp; &#10;",
    "CDATA": "<![CDATA[a]]>",
    "the end of CDATA": "a]]>b",
    "quotes": '"a" \'b\' `c` """',
    "backslashes": 'C:\\new\\table \\" \\\\ \\u0041',
    "braces": "{[}]{",
    "letters of the world": "日本 é 🐟 \u2028\u00a0\ufeff",
    "line ends of Windows": "a\r\nb\r\n",
    "a number": "123",
    "a truth": "true",
    "Python's truth": "True",
    "no number": "NaN",
    "an object": '{"a":1}',
    "no value": "null",
    "a quoted text": '"a"',
}
"""Texts that must arrive byte for byte."""


def common_cases() -> Iterator[tuple[str, Case]]:
    """Name of the writer and case."""
    for writer in WRITERS.values():
        for case in (*_values(writer), *_places(writer), *_refusals(writer)):
            yield writer.name, case


def _values(writer: Writer) -> Iterator[Case]:
    """Tagged formats have to find the end of each value; in an object they can all stand together."""
    if writer.streams:
        for name, value in VALUES.items():
            yield _calls(writer, f"value: {name}", [Call("write", {"text": value})])
        yield _on_lines_of_windows(writer)
    together = {f"v{index}": value for index, value in enumerate(VALUES.values())}
    yield _calls(writer, "all values in one call", [Call("note", together)])


def _on_lines_of_windows(writer: Writer) -> Case:
    """What stands around the values is no part of them; what stands in them is."""
    call = Call("write", {"path": "src/a.py", "text": "x = 1\n\ty"})
    return Case(
        name="every line end one of Windows",
        text=writer.write([call]).replace("\n", "\r\n"),
        calls=(Call("write", {"path": "src/a.py", "text": "x = 1\r\n\ty"}),),
        family=writer.family,
    )


def _calls(writer: Writer, name: str, calls: Sequence[Call]) -> Case:
    return Case(name=name, text=writer.write(calls), calls=tuple(calls), family=writer.family)


READ = Call("read", {"path": "a.py", "limit": 20})
WRITE = Call("write", {"path": "b.py", "text": "one\ntwo\n"})
LIST = Call("list")
UNKNOWN = Call("remove", {"path": "/"})


def _places(writer: Writer) -> Iterator[Case]:
    yield _calls(writer, "a number beside a text", [READ])
    yield _calls(writer, "no arguments", [LIST])
    yield _calls(writer, "two calls in a block", [READ, WRITE])
    yield _calls(writer, "three calls in a block", [LIST, READ, LIST])
    if not writer.starts_reply:
        yield _blocks(writer)
    if not writer.family.channels:
        yield from _around(writer)
        yield from _reasoning_texts(writer)


def _blocks(writer: Writer) -> Case:
    text = f"{writer.write([READ])}\n\n{writer.write([WRITE])}\n{writer.write([LIST])}\n"
    return Case(name="several blocks", text=text, calls=(READ, WRITE, LIST), family=writer.family)


def _around(writer: Writer) -> Iterator[Case]:
    call = writer.write([READ])
    yield Case(
        name="prose after a call",
        text=f"{call}\n\nDone.\n",
        content="Done.\n",
        calls=(READ,),
        family=writer.family,
    )
    yield Case(name="white space around a call", text=f"\n \n{call}\n", calls=(READ,), family=writer.family)
    if writer.starts_reply:
        yield Case(
            name="prose before JSON",
            text=f"Like this: {call}",
            content=f"Like this: {call}",
            family=writer.family,
        )
        return
    yield Case(
        name="prose around calls",
        text=f"I look.\n\n{call} Then\n{writer.write([WRITE])}\nthe end\n",
        content="I look. Thenthe end\n",
        calls=(READ, WRITE),
        family=writer.family,
    )
    yield Case(
        name="prose about the opener",
        text=f"`{writer.opener}` opens a call, {writer.opener} too.",
        content=f"`{writer.opener}` opens a call, {writer.opener} too.",
        family=writer.family,
    )
    yield Case(
        name="a call after prose about the opener",
        text=f"`{writer.opener}` opens a call: {call}",
        content=f"`{writer.opener}` opens a call:",
        calls=(READ,),
        family=writer.family,
    )


def _reasoning_texts(writer: Writer) -> Iterator[Case]:
    call, other = writer.write([READ]), writer.write([LIST])
    family = writer.family
    yield Case(
        name="a call inside reasoning",
        text=f"<think>\nI could {call}\n</think>\n\nNo.",
        reasoning=f"I could {call}",
        content="No.",
        family=family,
    )
    yield Case(
        name="a call inside reasoning and one after it",
        text=f"<think>{call}</think>{other}",
        reasoning=call,
        calls=(LIST,),
        family=family,
    )
    yield Case(
        name="a call right after reasoning that the prompt opened",
        text=f"\nHm.\n</think>\n\n{call}",
        reasoning="Hm.",
        calls=(READ,),
        reasoning_is_open=True,
        family=family,
    )
    yield from _never_closed(writer)


def _never_closed(writer: Writer) -> Iterator[Case]:
    """Reasoning that nothing closes. A bare object in one may be anything."""
    call, other, unknown = writer.write([READ]), writer.write([LIST]), writer.write([UNKNOWN])
    reasoning_texts = {
        "something after a call in reasoning that never ends": f"{call} Well.",
        "a call of another tool in reasoning that never ends": f"{call}\n{unknown}",
        "half a call after another in reasoning that never ends": f"{call}\n{other[: len(other) // 2]}",
    }
    for name, text in reasoning_texts.items():
        yield _open_reasoning(writer, name, text, reasoning=text)
    yield _open_reasoning(writer, "a call in reasoning that is cut", call, reasoning=call, complete=False)
    if writer.starts_reply:
        yield _open_reasoning(writer, "an object in reasoning that never ends", call, reasoning=call)
        return
    yield _open_reasoning(writer, "a call in reasoning that never ends", call, calls=(READ,))
    yield _open_reasoning(
        writer, "calls in reasoning that never ends", f"\n{call}\n \n{other}\n", calls=(READ, LIST)
    )
    quoted = f"`{writer.opener}` opens one, then {other} is one. So: "
    yield _open_reasoning(
        writer, "a call after others in reasoning", quoted + call, reasoning=quoted, calls=(READ,)
    )


def _open_reasoning(writer: Writer, name: str, text: str, reasoning: str = "", **more: Any) -> Case:
    return Case(
        name=name,
        text=f"Hm. {text}",
        reasoning=f"Hm. {reasoning}",
        reasoning_is_open=True,
        family=writer.family,
        **more,
    )


def _refusals(writer: Writer) -> Iterator[Case]:
    unknown = writer.write([UNKNOWN])
    if writer.starts_reply:
        yield Case(name="a tool that was not offered", text=unknown, content=unknown, family=writer.family)
    else:
        yield _calls(writer, "a tool that was not offered", [UNKNOWN])
    text = writer.write([READ])
    if not writer.family.channels:
        yield Case(name="no tools", text=text, content=text, tools=NO_TOOLS, family=writer.family)
    inner = Call("remove", {"text": f"{writer.call('list')} {WRITERS['qwen_xml'].call('list')}"})
    nested = writer.write([inner])
    if not writer.starts_reply and not writer.family.channels:
        yield _calls(writer, "calls in the arguments of a tool that was not offered", [inner])
    elif writer.starts_reply:
        yield Case(
            name="calls in the arguments of a tool that was not offered",
            text=nested,
            content=nested,
            family=writer.family,
        )
    if not writer.starts_reply and not writer.family.channels:
        yield Case(
            name="a tool that was not offered in a fence",
            text=f"So:\n```\n{unknown}\n```",
            content=f"So:\n```\n{unknown}\n```",
            family=writer.family,
        )
        yield Case(
            name="a tool that was not offered beside others",
            text=f"{writer.write([READ])}\n{unknown}\n{writer.write([LIST])}",
            calls=(READ, UNKNOWN, LIST),
            family=writer.family,
        )
