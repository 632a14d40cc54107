"""Every protocol's stream keeps its grammar, whatever happens to a reply, and says what the whole reply says.

The readers in `tests/grammar` are the grammar; that they can complain is shown with streams that were broken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import CallArguments, CallEnded, CallStarted, Content, Output, Reasoning
from start_llm.protocols.anthropic import messages as anthropic_messages
from start_llm.protocols.base import Parser, Reply
from start_llm.protocols.openai import chat_completions as openai_chat
from start_llm.protocols.openai import completions as openai_completions
from start_llm.protocols.responses import create as openai_responses
from tests.grammar import completions, messages, responses, wire
from tests.grammar.events import FAILURE, Story, broken, sent, stories
from tests.grammar.wire import COMPLAINTS, StreamContent
from tests.protocols.helpers import CONTEXT, body

_HI = [{"role": "user", "content": "hi"}]
_READ, _CLOSE, _NOTE = "read", "agents__close", "note"
_RESPONSE_TOOLS = [
    {"type": "function", "name": _READ},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]},
    {"type": "custom", "name": _NOTE},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One wire format, and the grammar of its streams.

    Attributes:
        fields: of a request; `forms` are further ones, which change how a reply is written.
        is_life: whether an event says nothing but that the server lives. Numbered ones say more.
    """

    parse: Parser
    fields: dict[str, Any]
    forms: Sequence[dict[str, Any]]
    read: Callable[[Sequence[Any]], StreamContent]
    tools: Sequence[str] = ()
    thinks: bool = True
    is_life: Callable[[Any], bool]

    def reply(self, form: dict[str, Any]) -> Reply:
        return self.parse(body(**self.fields, **form), {}, CONTEXT).reply

    def content_of(self, events: Sequence[bytes]) -> StreamContent:
        return self.read(list(wire.events_in(b"".join(events))))


def _is_empty_chunk(event: Any) -> bool:
    (choice,) = event["choices"] if event != wire.DONE and event["choices"] else ({},)
    says = any((choice.get("delta") or {}).values()) or choice.get("text")
    return choice.get("finish_reason", "") is None and not says


_DETAILED = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}
_WITH_USAGE = {"stream_options": {"include_usage": True}}
PROTOCOLS = {
    "chat": Protocol(
        parse=openai_chat.parse,
        fields={"messages": _HI},
        forms=[{}, _WITH_USAGE, _DETAILED],
        read=completions.read,
        tools=[_READ, _NOTE],
        is_life=_is_empty_chunk,
    ),
    "completions": Protocol(
        parse=openai_completions.parse,
        fields={"prompt": "hi"},
        forms=[{}, _WITH_USAGE, {"return_token_ids": True, "logprobs": 2}],
        read=completions.read,
        thinks=False,
        is_life=_is_empty_chunk,
    ),
    "messages": Protocol(
        parse=anthropic_messages.parse,
        fields={"messages": _HI, "max_tokens": 9},
        forms=[{}, {"thinking": {"type": "adaptive", "display": "omitted"}}],
        read=messages.read,
        tools=[_READ, _NOTE],
        is_life=lambda event: event == {"type": "ping"},
    ),
    "responses": Protocol(
        parse=openai_responses.parse,
        fields={"input": "hi", "tools": _RESPONSE_TOOLS, "store": False},
        forms=[{}, {"reasoning": {"summary": "auto"}}, {"include": ["message.output_text.logprobs"]}],
        read=responses.read,
        tools=[_READ, _CLOSE, _NOTE],
        is_life=lambda _: False,
    ),
}
every = pytest.mark.parametrize("name", PROTOCOLS)


def drawn(data: st.DataObject, protocol: Protocol, *, fails: bool = False) -> tuple[Story, dict[str, Any]]:
    """Something that happens, and how it is to be written."""
    story = data.draw(stories(tools=protocol.tools, thinks=protocol.thinks, fails=fails))
    return story, data.draw(st.sampled_from(protocol.forms))


@every
@given(data=st.data())
@pytest.mark.sample(6)
def test_a_stream_keeps_the_grammar_and_says_what_the_whole_reply_says(name: str, data: st.DataObject):
    protocol = PROTOCOLS[name]
    story, form = drawn(data, protocol)
    assert story.end
    content = protocol.content_of(sent(protocol.reply(form), story))
    whole = protocol.reply(form).whole(story.outputs, story.end)
    assert content.failure is None
    assert _comparable(content.body) == _comparable(json.loads(json.dumps(whole)))
    if content.parts:
        assert list(content.parts) == _parts(story.outputs, is_one_text=name == "chat")


def _comparable(reply: Any) -> Any:
    """Without what is another each time; that there is nothing to say of no tokens needs no saying."""
    (choice,) = reply.get("choices", [{}])
    if choice.get("logprobs") in ({"content": [], "refusal": None}, _NO_SCORES):
        choice["logprobs"] = None
    if not choice.get("token_ids", True):
        del choice["token_ids"]
    return wire.bare(reply)


_NO_SCORES = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _parts(outputs: Sequence[Output], *, is_one_text: bool) -> list[tuple[str, str]]:
    """Return the spoken parts, in their order.

    Args:
        is_one_text: texts around a call are one text, in which the second begins a line.
    """
    parts: list[tuple[str, str]] = []
    for output in outputs:
        match output:
            case Content(text):
                kinds = [kind for kind, _ in parts]
                called = next((kind for kind in reversed(kinds) if kind != "reasoning_content"), "")
                begins_line = is_one_text and called.startswith("call") and "content" in kinds
                kind, piece = "content", "\n" * (begins_line and bool(text)) + text
            case Reasoning(text):
                kind, piece = "reasoning_content", text
            case CallStarted(index):
                parts.append((f"call {index}", ""))
                continue
            case CallArguments(index, text):
                kind, piece = f"call {index}", text
            case CallEnded():
                continue
        if parts and parts[-1][0] == kind:
            piece = parts.pop()[1] + piece
        parts.append((kind, piece))
    return parts


@every
@given(data=st.data())
@pytest.mark.sample(3)
def test_a_failure_may_come_at_any_place_and_is_the_last_thing(name: str, data: st.DataObject):
    protocol = PROTOCOLS[name]
    story, form = drawn(data, protocol, fails=True)
    events = sent(protocol.reply(form), story)
    assert protocol.content_of(events) == StreamContent(failure=FAILURE)
    assert _complains(protocol, events[:-1])
    assert _complains(protocol, [*events, events[-1]])
    assert _complains(protocol, [*events, *sent(protocol.reply(form), story)[:1]])


@pytest.mark.thorough
@every
@given(data=st.data())
def test_an_event_that_is_missing_repeated_or_late_is_noticed(name: str, data: st.DataObject):
    protocol = PROTOCOLS[name]
    story, form = drawn(data, protocol)
    events = sent(protocol.reply(form), story)
    whole = protocol.content_of(events)
    for what, stream in broken(events):
        if _content(protocol, stream) != _content(protocol, events):
            assert _complains(protocol, stream, whole), what


def _content(protocol: Protocol, events: Sequence[bytes]) -> list[Any]:
    """Return all that is sent, but for signs of life."""
    return [event for event in wire.events_in(b"".join(events)) if not protocol.is_life(event)]


def _complains(protocol: Protocol, events: Sequence[bytes], whole: StreamContent | None = None) -> bool:
    """The stream is refused, or says something else than it did."""
    try:
        return protocol.content_of(events) != whole if whole else not protocol.content_of(events)
    except COMPLAINTS:
        return True
