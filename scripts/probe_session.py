"""Probe the prompt cache in four scenarios: meaningless changes must cost nothing, edits must end the hit.

    python scripts/probe_session.py [--base-url http://127.0.0.1:4000] [--only drift insert]

normal    A conversation that only grows. Each turn restores at least 97 % of what is known.
drift     The same, but each request is written differently: another billing header in the system text, a
          message id that is missing in the next request, tools in another order, arguments of calls that are
          serialized again. None of this changes the meaning, so the expectation is the same.
semantic  A message in the middle is edited. The hit includes everything before the message, and ends there.
insert    A call and its result are inserted in the middle. The hit goes up to that point, and not beyond.

One reply of the server is before the edited message, and one after it. The bounds come from the prompt
lengths of earlier requests. Of the counters in /stats, vlm_retreat and exact_key_rejected_by_model_lcp must
not rise. The exit status is 1 if an expectation fails, which is named with its scenario, and 2 if nothing can
be measured.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pi_client
from chat_client import Message, Reply, Server
from probing import (
    HEALTHY,
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

_QUESTION_CHARACTERS = 400
_SLACK = 8
"""Tokens of markup that an inserted call may share with the reply that it displaces."""

Body = Mapping[str, Any]
Spell = Callable[[Body, int], Body]


def _as_it_is(body: Body, _: int) -> Body:
    return body


class Talk:
    """A conversation of three turns after a call that the client invented.

    Args:
        spell: rewrites a request's body as the client sends it; its second argument is the request's number.
    """

    def __init__(
        self, server: Server, name: str, options: argparse.Namespace, spell: Spell = _as_it_is
    ) -> None:
        self.session = Session(server)
        self._name, self._options, self._spell = name, options, spell
        system = pi_client.system(options.run, options.context_chars)
        self._messages = [system, pi_client.user(f"Look at {name}."), *call_and_result(name)]
        self._ends = [self._turn(number) for number in (1, 2, 3)]

    def _turn(self, number: int) -> int:
        """Ask the next question, and return the number of messages in that request."""
        self._messages.append(question(f"question {number}, {self._name}"))
        end = len(self._messages)
        reply = self._ask(self._messages)
        self._messages += [reply.sent_back(), *pi_client.results(reply, f"turn {number}, {self._name}")]
        return end

    def _ask(self, messages: Sequence[Message], known: int | None = None) -> Reply:
        # What drifts may be taken for the same only if the conversation is proven to be: here by its name.
        body = {**pi_client.body(messages, self._options), "session_id": self._name}
        return self.session.ask(self._spell(body, len(self.session.turns)), known)

    def ask_edited(self) -> str | None:
        """Change the second question and ask again. Return what is wrong with the hit, or None."""
        first, second = self.session.replies[:2]
        place = self._ends[1] - 1
        words = len(self._messages[place]["content"][0]["text"].split())
        self._messages[place] = question(f"other question, {self._name}")
        # Every word is at least one token, and all words have changed.
        return self._ask_changed(first.prompt + first.completion, second.prompt - words)

    def ask_injected(self) -> str | None:
        """Insert a call and its result after the second question, and ask again."""
        second, place = self.session.replies[1], self._ends[1]
        self._messages[place:place] = call_and_result(f"something else, {self._name}")
        return self._ask_changed(second.prompt, second.prompt + _SLACK)

    def _ask_changed(self, known: int, most: int) -> str | None:
        """Ask, and return what is wrong if the hit misses part of `known` tokens or exceeds `most` tokens."""
        self._ask([*self._messages, question(f"last question, {self._name}")], known)
        turn = self.session.last
        if turn.cached > most:
            problem = f"{turn.cached:,} tokens were cached, and the change stands after {most:,} at most"
            return f"turn {turn.number}: {problem}"
        return turn.shortfall(self._options.healthy)

    def shortfalls(self) -> list[str | None]:
        """Return the shortfall, or None, of each turn after the first."""
        return [turn.shortfall(self._options.healthy) for turn in self.session.turns[1:]]


def question(name: str) -> Message:
    return pi_client.user(prose(name, _QUESTION_CHARACTERS))


def call_and_result(name: str) -> list[Message]:
    arguments = json.dumps({"command": f"cat 'notes of {name}'", "timeout": 1000.0})
    call_id = f"call{secrets.token_hex(8)}"
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    result = prose(f"notes of {name}", _QUESTION_CHARACTERS)
    return [
        {"role": "assistant", "content": f"I open {name} first.", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": call_id},
    ]


# ------------------------------------------------------------------------------------------------------ drift


def drifting(body: Body, number: int) -> Body:
    """Rewrite a request without changing its meaning; the number selects the spelling."""
    system, *others = body["messages"]
    header = f"x-anthropic-billing-header: cc_version=2.1.126.d79; cc_entrypoint=cli; cch={number:05x};\n"
    messages = [{**system, "content": header + system["content"]}, *others]
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    spelled = [_spelled(message, number, index == last) for index, message in enumerate(messages)]
    by = number % len(body["tools"])
    return {**body, "messages": spelled, "tools": [*body["tools"][by:], *body["tools"][:by]]}


def _spelled(message: Message, number: int, is_last_question: bool) -> Message:
    if message["role"] == "user":
        text = _metadata(number if is_last_question else None) + message["content"][0]["text"]
        return pi_client.user(text)
    calls = [
        {**call, "function": _respelt(call["function"], number)} for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def _metadata(message_id: int | None) -> str:
    line = "" if message_id is None else f'  "message_id": "{message_id:012x}",\n'
    return f'Conversation info:\n```json\n{{\n{line}  "sender": "somebody"\n}}\n```\n\n'


def _respelt(function: Mapping[str, str], number: int) -> Mapping[str, str]:
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:  # a call that was cut short
        return function
    spellings: Sequence[Mapping[str, Any]] = (
        {"separators": (",", ":"), "ensure_ascii": False},
        {"indent": 2},
        {"sort_keys": True},
    )
    return {**function, "arguments": json.dumps(arguments, **spellings[number % len(spellings)])}


# -------------------------------------------------------------------------------------------------- scenarios


@dataclass(frozen=True)
class Scenario:
    """A scenario. After three turns, `judge` sends any further request and returns what is wrong."""

    expectation: str
    judge: Callable[[Talk], Sequence[str | None]]
    spell: Spell = _as_it_is


SCENARIOS: Mapping[str, Scenario] = {
    "normal": Scenario("each turn finds what was known", Talk.shortfalls),
    "drift": Scenario("each turn finds what was known, however it is spelled", Talk.shortfalls, drifting),
    "semantic": Scenario("the last hit ends at the edited message", lambda talk: [talk.ask_edited()]),
    "insert": Scenario("the last hit goes up to the injected result", lambda talk: [talk.ask_injected()]),
}


def play(server: Server, options: argparse.Namespace) -> list[str]:
    """Play the scenarios, print their numbers, and return the failures."""
    failures: list[str] = []
    for name in options.only:
        scenario = SCENARIOS[name]
        print(f"\n{name}: {scenario.expectation}")
        talk = Talk(server, f"{name} of {options.run}", options, scenario.spell)
        shortfalls = filter(None, scenario.judge(talk))
        failures += [f"{name}, {shortfall}" for shortfall in shortfalls]
        talk.session.print()
    return failures


def read_options() -> argparse.Namespace:
    parser = parser_of(f"{__doc__}\n{TURN_LEGEND}")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--healthy", type=float, default=HEALTHY, help="share of what is known (%(default)s)")
    add_length_options(parser)
    parser.set_defaults(run=secrets.token_hex(6))
    return parser.parse_args()


def main() -> int:
    options = read_options()
    server = server_of(options).reach()
    counters = Counters(server)
    failures = play(server, options)
    counters.read()
    counters.print("before", "after")
    return verdict([*failures, *counters.shortfalls()])


if __name__ == "__main__":
    run(main)
