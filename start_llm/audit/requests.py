"""Sample requests of every kind that agents send.

Words such as `ask502x` mark what must reach the model: each has three digits and a final x.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from start_llm.core.chat import ChatRequest, Json, Message, ToolCall
from start_llm.prompt.template_audit import probe

_WORD = re.compile(r"[a-z]+\d{3}x")
_MEANINGS: Mapping[str, str] = {
    **dict.fromkeys(("does101x", "about602x", "writes614x"), "what a tool does"),
    **dict.fromkeys(("read201x", "bare601x", "write611x"), "the name of a tool"),
    **dict.fromkeys(
        ("path202x", "mode603x", "object606x", "list607x", "maybe609x", "text612x"), "the name of a parameter"
    ),
    **dict.fromkeys(("where203x", "todos608x", "or610x", "of613x"), "what a parameter means"),
    **dict.fromkeys(("line301x", "deep303x", "deeper304x"), "the names inside a parameter"),
    "number302x": "what a value inside a parameter means",
    **dict.fromkeys(("this305x", "that306x"), "the values that are allowed inside a parameter"),
    **dict.fromkeys(("fast604x", "slow605x"), "the values that a parameter may have"),
    **dict.fromkeys(("file401x", "file402x"), "the argument of a call"),
    **dict.fromkeys(("part403x", "one404x", "two405x", "three406x"), "what is inside an argument"),
    "system501x": "the system message",
    "late506x": "the later system message",
    "ask502x": "the question",
    "more504x": "the later question",
    "answer505x": "the answer",
    **dict.fromkeys(("before507x", "behind508x", "last509x"), "text beside a quoted mark"),
    "says510x": "the text beside a call",
    **dict.fromkeys(("result503x", "result511x"), "the result of a call"),
}
"""What the marked words stand for, for a person."""


tool = partial(probe.tool, description="does101x")


def meanings(words: Iterable[str]) -> list[str]:
    """Return what marked words stand for, each once."""
    return list(dict.fromkeys(_MEANINGS[word] for word in words))


def words_of(request: ChatRequest) -> list[str]:
    """Return the marked words of a request's tools, texts and calls, without its reasoning."""
    texts = [json.dumps(list(request.tools))]
    for message in request.messages:
        texts.append(message.content)
        texts += [json.dumps([call.name, dict(call.arguments)]) for call in message.tool_calls]
    return list(dict.fromkeys(_WORD.findall("\n".join(texts))))


def _bare(**function: Json) -> dict[str, Json]:
    return {"type": "function", "function": function}


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


def _system(content: str) -> Message:
    return Message(role="system", content=content)


def _user(content: str) -> Message:
    return Message(role="user", content=content)


def _reply(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def _result(content: str, call_id: str = "c1") -> Message:
    return Message(role="tool", content=content, tool_call_id=call_id)


_READ = tool("read201x", {"path202x": _text("where203x")})
_OBJECT: Json = {
    "type": "object",
    "properties": {"line301x": _text("number302x"), "deep303x": {"type": "object", "properties": {
        "deeper304x": {"type": "string", "enum": ["this305x", "that306x"]}}}},
}  # fmt: skip
_CALL = ToolCall("c1", "read201x", {"path202x": "file401x"})
_OTHER = ToolCall("c2", "read201x", {"path202x": "file402x"})
_NESTED = ToolCall("c1", "read201x", {"path202x": {"part403x": ["one404x", {"two405x": "three406x"}]}})
_SYSTEM, _ASK = _system("system501x"), _user("ask502x")
_CALLED = (_reply("", _CALL), _result("result503x"))
_TOOLS: Mapping[str, Sequence[Mapping[str, Json]]] = {
    "a tool": (_READ,),
    "a tool without a description": (_bare(name="bare601x", parameters=_OBJECT),),
    "a tool without parameters": (_bare(name="bare601x", description="about602x"),),
    "a parameter with a list of values": (
        tool("read201x", {"mode603x": {"type": "string", "enum": ["fast604x", "slow605x"]}}),
    ),
    "a parameter that is an object": (tool("read201x", {"object606x": _OBJECT}),),
    "a parameter that is a list of objects": (
        tool("read201x", {"list607x": {"type": "array", "items": _OBJECT, "description": "todos608x"}}),
    ),
    "a parameter that may be null": (
        tool(
            "read201x",
            {"maybe609x": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "or610x"}},
        ),
    ),
    "several tools": (_READ, tool("write611x", {"text612x": _text("of613x")}, description="writes614x")),
}
_TALKS: Mapping[str, Sequence[Message]] = {
    "a question": (_ASK,),
    "a system message": (_SYSTEM, _ASK),
    "two questions": (_ASK, _user("more504x")),
    "an answer": (_SYSTEM, _ASK, _reply("answer505x"), _user("more504x")),
    "a system message in the middle": (_ASK, _reply("answer505x"), _system("late506x"), _user("more504x")),
    "a system message at the end": (_SYSTEM, _ASK, _system("late506x")),
    "two system messages": (_SYSTEM, _system("late506x"), _ASK),
    "an empty answer": (_SYSTEM, _ASK, _reply(""), _user("more504x")),
    "an answer that quotes a reasoning mark": (
        _SYSTEM,
        _ASK,
        _reply("before507x </think> behind508x <|channel|>final<|message|> last509x"),
        _user("more504x"),
    ),
}
_LOOPS: Mapping[str, Sequence[Message]] = {
    "a call": _CALLED,
    "text beside a call": (_reply("says510x", _CALL), _result("result503x")),
    "reasoning beside a call": (_reply("", _CALL, reasoning="because"), _result("result503x")),
    "reasoning and text beside a call": (
        _reply("says510x", _CALL, reasoning="because"),
        _result("result503x"),
    ),
    "two calls": (_reply("", _CALL, _OTHER), _result("result503x"), _result("result511x", "c2")),
    "a call without arguments": (_reply("", ToolCall("c1", "read201x", {})), _result("result503x")),
    "arguments in arguments": (_reply("", _NESTED), _result("result503x")),
    "a question after a result": (*_CALLED, _user("more504x")),
}
KINDS: Mapping[str, ChatRequest] = {
    **{kind: ChatRequest(messages=tuple(talk)) for kind, talk in _TALKS.items()},
    **{kind: ChatRequest(messages=(_SYSTEM, _ASK), tools=tuple(tools)) for kind, tools in _TOOLS.items()},
    **{kind: ChatRequest(messages=(_SYSTEM, _ASK, *loop), tools=(_READ,)) for kind, loop in _LOOPS.items()},
}
