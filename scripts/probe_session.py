"""Four scenarios for the prompt cache: what a client changes may cost nothing, or has to cost what it costs.

    python scripts/probe_session.py [--base-url http://127.0.0.1:4000] [--only drift insert]

normal    A conversation that only grows. Each turn finds what was known: at least 97 % of it.
drift     The same, but each request is spelled in another way: another billing header in the system text, a
          message id that is gone in the next request, tools in another order, arguments of calls written
          anew. Nothing of it says anything new, so the same is expected.
semantic  A message in the middle is really edited. The hit ends there: it holds what stands in front of the
          message, and does not pass it.
insert    A call and its result are injected in the middle. The hit goes up to there, and not beyond.

One reply of the server stands in front of what is edited, and one behind it. Each bound is found in the
prompt lengths of earlier requests. Of the counters of /stats, vlm_retreat and exact_key_rejected_by_model_lcp
may not rise. The exit status is 1 if an expectation fails, which is named with its scenario, and 2 if nothing
can be measured.
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
"""Tokens of markup that a call may share with the reply in whose place it stands."""

Body = Mapping[str, Any]
Spell = Callable[[Body, int], Body]


def _as_it_is(body: Body, _: int) -> Body:
    return body


class Talk:
    """A conversation of three turns behind a call that the client made up.

    Args:
        spell: a request as the client sends it when it is the one of that number.
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
        """Ask once more, and give the number of messages that it took."""
        self._messages.append(question(f"question {number}, {self._name}"))
        end = len(self._messages)
        reply = self._ask(self._messages)
        self._messages += [reply.sent_back(), *pi_client.results(reply, f"turn {number}, {self._name}")]
        return end

    def _ask(self, messages: Sequence[Message], known: int | None = None) -> Reply:
        body = pi_client.body(messages, self._options)
        return self.session.ask(self._spell(body, len(self.session.turns)), known)

    def ask_edited(self) -> str | None:
        """Change the second question, and ask again. What is wrong with the hit, or None."""
        first, second = self.session.replies[:2]
        place = self._ends[1] - 1
        words = len(self._messages[place]["content"][0]["text"].split())
        self._messages[place] = question(f"other question, {self._name}")
        # Every word is a token at least, and none of them is the same.
        return self._ask_changed(first.prompt + first.completion, second.prompt - words)

    def ask_injected(self) -> str | None:
        """Put a call and its result behind the second question, and ask again."""
        second, place = self.session.replies[1], self._ends[1]
        self._messages[place:place] = call_and_result(f"something else, {self._name}")
        return self._ask_changed(second.prompt, second.prompt + _SLACK)

    def _ask_changed(self, known: int, most: int) -> str | None:
        """The hit has to hold what is `known` and no more than `most`."""
        self._ask([*self._messages, question(f"last question, {self._name}")], known)
        turn = self.session.last
        if turn.cached > most:
            told = f"{turn.cached:,} tokens were cached, and the change stands behind {most:,} at most"
            return f"turn {turn.number}: {told}"
        return turn.shortfall(self._options.healthy)

    def shortfalls(self) -> list[str | None]:
        """Of the turns behind the first."""
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
    """The same request in the spelling of its number."""
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
    except json.JSONDecodeError:  # a call that was cut
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
    """`judge` asks what is left to ask behind three turns, and gives what is wrong, if anything is."""

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
    """Each scenario's numbers, and what fails in it."""
    failures: list[str] = []
    for name in options.only:
        scenario = SCENARIOS[name]
        print(f"\n{name}: {scenario.expectation}")
        talk = Talk(server, f"{name} of {options.run}", options, scenario.spell)
        shortfalls = filter(None, scenario.judge(talk))
        failures += [f"{name}, {told}" for told in shortfalls]
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
