"""A client that reads chat completions strictly, and gets every reply both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.grammar import completions, wire
from tests.server.client import CHAT, ask, without_cached
from tests.serving import Server

QUESTION = [{"role": "user", "content": "How deep is the sea?"}]

REPORT = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
"""Fields of a request that ask for everything there is to know about the tokens of the reply."""

type Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Called:
    """A call as a client gets it; `arguments` is JSON text. Ids are another story each time."""

    name: str
    arguments: str
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyContent:
    """The content of a reply."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class Heard:
    """One request, answered twice.

    Attributes:
        reply: the same, whether it was streamed or not.
        deltas: of the stream, without the first one and those that change nothing.
        choices: of every chunk of the stream.
        body: the reply that was not streamed.
    """

    reply: ReplyContent
    deltas: Sequence[dict[str, Any]]
    choices: Sequence[dict[str, Any]]
    body: dict[str, Any]

    @property
    def usage(self) -> dict[str, Any]:
        return self.body["usage"]

    @property
    def reasoning_tokens(self) -> int:
        return self.usage["completion_tokens_details"]["reasoning_tokens"]

    @property
    def kinds(self) -> list[str]:
        """The members of the deltas, in the order in which they began."""
        return list(dict.fromkeys(name for delta in self.deltas for name in delta))

    def fragments(self, kind: str) -> list[str]:
        """The pieces in which a text came: `content`, `reasoning_content`."""
        return [delta[kind] for delta in self.deltas if kind in delta]

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """Of the whole reply; asked for with `REPORT`."""
        return self.body["choices"][0]["logprobs"]["content"]

    def tokens_until(self, pattern: str) -> int:
        """How many tokens it takes until a pattern stands in the text, markup included. Needs `REPORT`."""
        text = b""
        for count, entry in enumerate(self.logprobs, start=1):
            text += bytes(entry["bytes"])
            if re.search(pattern, text.decode(errors="replace")):
                return count
        raise AssertionError(f"{pattern!r} is not in {text.decode()!r}")

    def argument_fragments(self, index: int = 0) -> list[str]:
        parts = [part for delta in self.deltas for part in delta.get("tool_calls", [])]
        return [
            part["function"]["arguments"] for part in parts if part["index"] == index and "id" not in part
        ]


def hear(server: Server, **fields: Any) -> Heard:
    """Ask twice; what is streamed has to be what is sent whole."""
    body = {"messages": QUESTION, **fields}
    whole = post(server, body).json
    chunks = stream(server, body)
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = completions.read([*chunks, wire.DONE]).body
    reply = content_of(streamed)
    assert reply == content_of(whole)
    was_cut = reply.finish == "length"
    whole_characters = choices[: -2 if was_cut else None]
    assert not any("\ufffd" in str(choice["delta"]) for choice in whole_characters), "a character is broken"
    assert without_cached(streamed["usage"]) == without_cached(whole["usage"])
    deltas = [choice["delta"] for choice in choices]
    return Heard(reply, [delta for delta in deltas[1:] if delta], choices, whole)


def post(server: Server, body: Fields) -> Any:
    reply = ask(server.port, "POST", CHAT, body)
    assert reply.status == 200, reply.body
    return reply


def stream(server: Server, body: Fields) -> list[dict[str, Any]]:
    """The chunks of a stream, which has the grammar of one."""
    events = list(wire.events_in(post(server, {**body, "stream": True}).body))
    assert completions.read(events).failure is None
    *chunks, _ = events
    return chunks


def content_of(body: Fields) -> ReplyContent:
    (choice,) = body["choices"]
    message = choice["message"]
    assert isinstance(message["content"], str)
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = message.get("tool_calls", [])
    assert calls or "tool_calls" not in message
    return ReplyContent(
        content=message["content"],
        reasoning=message.get("reasoning_content", ""),
        calls=tuple(map(_called, calls)),
        finish=choice["finish_reason"],
    )


def _called(call: Fields) -> Called:
    if call["type"] == "custom":
        return Called(call["custom"]["name"], call["custom"]["input"], id=call["id"])
    return Called(**call["function"], id=call["id"])
