"""Check two OpenClaw sessions that alternate at the same server, in the form in which OpenClaw sends them.

    python scripts/test_openclaw_integration.py [--base-url http://127.0.0.1:4000] [--turns 5]

The system prompt has a date in its dynamic part. The newest question has a message_id that is removed later.
Calls come back without the underscores in their ids. Every request ends with a message that the next request
does not have: <<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> ... <<<END_OPENCLAW_INTERNAL_CONTEXT>>>. The checks are:

hit rate         new / computed tokens, from the second turn on, is at least --min-efficiency. The known
                 prefix ends where the last request had its transient message. The reply was generated after
                 it, so its computed state is valid at no other place, and the reply counts as new. A model
                 that answers without a call and at temperature 0 falls short: nothing proves whose reply it
                 is, so the question that loses its id is computed again.
reasoning twice  The reasoning is not repeated in its reply's text, and no prompt is longer than the last one
                 with its reply and the added messages. A few small requests measure those messages. Repeated
                 reasoning of some 30 tokens is noticed.
another session  A first turn restores no more than what both sessions share, later turns no more than their
                 own tokens, and no reply has the other session's mark.

The exit status is 1 if a check fails, which is named with its session, and 2 if nothing can be measured. Of
the counters in /stats, vlm_retreat and exact_key_rejected_by_model_lcp must not rise.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from chat_client import Message, Reply, Server, Tool
from probing import (
    TURN_LEGEND,
    Counters,
    Session,
    add_length_options,
    parser_of,
    prose,
    run,
    server_of,
    verdict,
)

_QUESTION_CHARACTERS, _RESULT_CHARACTERS = 600, 1200
_SLACK = 32
"""Tokens of markup, dates and ids that added messages bring with them."""

_SYSTEM = """\
<!-- openclaw:attempt:STABLE -->
You are a personal assistant in run {run}.

{context}
<!-- /openclaw:attempt:STABLE -->
<!-- openclaw:attempt:DYNAMIC -->
## Current date
{date}

## Runtime
agent=main | shell=bash | reasoning={effort}
<!-- /openclaw:attempt:DYNAMIC -->"""


def _tool(name: str, description: str, parameter: str) -> Tool:
    properties = {parameter: {"type": "string", "description": f"The {parameter}."}}
    schema = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("exec", "Runs a command in the shell.", "command"),
    _tool("read", "Reads a file of the workspace.", "path"),
    _tool("web_fetch", "Reads a page.", "url"),
]


def transient(number: int) -> Message:
    """Return the message at the end of a request that the next request does not have."""
    lines = [f'"Sessions:\\nmain is in request {number:04}"', '"Helpers:\\nnone"']
    text = "\n\n".join(lines)
    marks = ("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")
    return {"role": "user", "content": [{"type": "text", "text": f"{marks[0]}\n{text}\n{marks[1]}"}]}


@dataclass(frozen=True)
class Sizes:
    """Tokens of the messages that a session adds, as this server counts them."""

    transient: int
    question: int
    result: int


def measure(server: Server, today: datetime) -> Sizes:
    """Measure the sizes from the prompt lengths of four small requests."""
    nothing, mark = {"role": "user", "content": "x"}, secrets.token_hex(8)

    def tokens(*messages: Message) -> int:
        return server.ask({"messages": messages, "max_completion_tokens": 1}).prompt

    least = tokens(nothing)
    asked = tokens(with_id(question(1, mark, today), mark[:12]))
    with_result = tokens({**nothing, "content": result("x", mark)["content"]})
    return Sizes(tokens(nothing, transient(1)) - least, asked - least, with_result - least)


def question(number: int, mark: str, today: datetime) -> Message:
    """Return a question with the session's mark. The first one also has the session's id."""
    text = f"I am {mark}. Run `step {number}`, please, and tell me of it: "
    text += prose(f"question {number} of {mark}", _QUESTION_CHARACTERS)
    if number == 1:
        text += f"\n\nRuntime: agent=main | sessionId={mark} | shell=bash"
    block = 'Conversation info:\n```json\n{\n  "sender": "somebody"\n}\n```\n\n'
    return {"role": "user", "content": f"{block}[{today:%a %Y-%m-%d %H:%M} UTC] {text}"}


def with_id(asked: Message, message_id: str) -> Message:
    """Add the message id that a question has while it is the newest."""
    line = f'{{\n  "message_id": "{message_id}",\n'
    return {**asked, "content": asked["content"].replace("{\n", line, 1)}


def result(call_id: str, name: str) -> Message:
    text = prose(f"result of {name}", _RESULT_CHARACTERS)
    return {"role": "tool", "content": text, "tool_call_id": without_underscores(call_id)}


def without_underscores(call_id: str) -> str:
    return call_id.replace("_", "")


class OpenClaw:
    """One session, on the client's side.

    Attributes:
        mark: random text that identifies the session.
        added: for each request, the tokens of its new messages.
        own_words: words of the first question after the part that both sessions share.
    """

    def __init__(self, name: str, server: Server, sizes: Sizes, options: argparse.Namespace) -> None:
        self.name, self.mark = name, secrets.token_hex(8)
        self.session = Session(server)
        self.added: list[int] = []
        self._sizes, self._options = sizes, options
        self._message_id = ""
        self._history: list[Message] = []
        self._new = [self._question()]
        self.own_words = len(self._new[0]["content"].partition(self.mark)[2].split())

    def turn(self) -> None:
        """Send one request, and prepare the next one from the reply."""
        self._history += self._new
        size = self._sizes.result if self._new[0]["role"] == "tool" else self._sizes.question
        self.added.append(size * len(self._new))
        known = self.session.last.prompt - self._sizes.transient if self.session.turns else None
        reply = self.session.ask(self._body(), known)
        self._history.append(reply.sent_back(without_underscores))
        self._new = self._results(reply) or [self._question()]

    def _body(self) -> Mapping[str, Any]:
        number = len(self.session.turns) + 1
        newest = max(index for index, entry in enumerate(self._history) if entry["role"] == "user")
        history = [
            with_id(message, self._message_id) if index == newest else message
            for index, message in enumerate(self._history)
        ]
        return {
            "messages": [self._system(number), *history, transient(number)],
            "tools": TOOLS,
            "tool_choice": "auto",
            "max_completion_tokens": self._options.max_tokens,
            "reasoning_effort": self._options.effort,
            # OpenClaw sends no name; the chance in a real model's replies proves whose they are. A model that
            # always says the same, as the demo model does, gives no such proof.
            "session_id": f"{self._options.run} {self.name}",
        }

    def _system(self, number: int) -> Message:
        options = self._options
        day = options.today + timedelta(days=options.midnight is not None and number >= options.midnight)
        context = prose(f"The assistant's rules in {options.run}", options.context_chars)
        fields = {"run": options.run, "context": context, "date": f"{day:%A, %Y-%m-%d}"}
        return {"role": "system", "content": _SYSTEM.format(**fields, effort=options.effort)}

    def _question(self) -> Message:
        """Return a new question, and make a new id for it."""
        self._message_id = secrets.token_hex(6)
        return question(len(self.session.turns) + 1, self.mark, self._options.today)

    def _results(self, reply: Reply) -> list[Message]:
        turn = f"turn {len(self.session.turns)} of {self.mark}"
        return [result(call["id"], f"{turn}, call {number}") for number, call in enumerate(reply.calls)]


# ----------------------------------------------------------------------------------------------------- checks


def hit_rate(chat: OpenClaw, least: float) -> Iterator[str]:
    for turn in chat.session.turns[1:]:
        if turn.efficiency < least:
            figures = (
                f"{turn.efficiency:.2f} ({turn.computed:,} tokens computed, about {turn.new:,} of them new)"
            )
            yield f"turn {turn.number}: an efficiency of {figures}, {least:.2f} is healthy"


def reasoning_twice(chat: OpenClaw) -> Iterator[str]:
    turns, replies = chat.session.turns, chat.session.replies
    for turn, reply in zip(turns, replies, strict=True):
        reasoning = reply.reasoning.strip()
        if (reasoning and reasoning in reply.content) or "</think>" in reply.content:
            yield f"turn {turn.number}: reasoning stands in the reply's text"
    for (last, turn), reply, added in zip(pairwise(turns), replies, chat.added[1:], strict=False):
        grown, expected = turn.prompt - last.prompt, reply.completion + added
        if grown > expected + _SLACK * (1 + len(reply.calls)):
            yield f"turn {turn.number}: the prompt grew by {grown:,} tokens, and {expected:,} were added"


def another_session(chat: OpenClaw, other: OpenClaw) -> Iterator[str]:
    first, replies = chat.session.turns[0], chat.session.replies
    if (most := first.prompt - chat.own_words) < first.cached:
        yield f"turn 1: {first.cached:,} tokens were cached, and at most {most:,} are not its own"
    for turn, reply in zip(chat.session.turns[1:], replies, strict=False):
        if (most := reply.prompt + reply.completion + _SLACK) < turn.cached:
            yield f"turn {turn.number}: {turn.cached:,} tokens were cached, and {most:,} at most are its own"
    for turn, reply in zip(chat.session.turns, replies, strict=True):
        if other.mark in str(reply.sent_back()):
            yield f"turn {turn.number}: the reply has the mark of session {other.name}"


def shortfalls(chat: OpenClaw, other: OpenClaw, options: argparse.Namespace) -> list[str]:
    checks = {
        "hit rate": hit_rate(chat, options.min_efficiency),
        "reasoning twice": reasoning_twice(chat),
        "another session": another_session(chat, other),
    }
    return [
        f"{name}, session {chat.name}, {shortfall}" for name, check in checks.items() for shortfall in check
    ]


# ---------------------------------------------------------------------------------------------------- program


def play(sessions: Sequence[OpenClaw], turns: int) -> None:
    """Play both sessions turn by turn at the same server, and print their numbers."""
    for _ in range(turns):
        for session in sessions:
            session.turn()
    for session in sessions:
        print(f"\nsession {session.name}")
        session.session.print()


def read_options() -> argparse.Namespace:
    parser = parser_of(f"{__doc__}\n{TURN_LEGEND}")
    parser.add_argument("--turns", type=int, default=5, help="requests of each session (%(default)s)")
    parser.add_argument("--min-efficiency", type=float, default=0.95, help="new / computed (%(default)s)")
    parser.add_argument("--midnight", type=int, metavar="TURN", help="a new day begins with this request")
    add_length_options(parser)
    parser.set_defaults(run=secrets.token_hex(6), today=datetime.now(UTC))
    return parser.parse_args()


def main() -> int:
    options = read_options()
    server = server_of(options).reach()
    counters, sizes = Counters(server), measure(server, options.today)
    print(f"Tokens: transient message {sizes.transient}, question {sizes.question}, result {sizes.result}")
    first, second = (OpenClaw(name, server, sizes, options) for name in "AB")
    play([first, second], options.turns)
    counters.read()
    counters.print("before", "after")
    problems = shortfalls(first, second, options) + shortfalls(second, first, options)
    return verdict([*problems, *counters.shortfalls()])


if __name__ == "__main__":
    run(main)
