"""Probe the prompt cache with an agent session that sends what pi sends. This is the primary probe.

    python scripts/pi_like_probe.py [--base-url http://127.0.0.1:4000] [--turns 6]

The session has one long system prompt, four tools, calls and results, reasoning in reasoning_content, and
arguments that are serialized again. The server's own replies are sent back. After a reply with calls come
short results, after any other reply a short question. The system prompt is new in each run, so the first turn
is cold.

A healthy server caches at least 97 % of the prompt from the third turn on. Of its counters in /stats,
vlm_retreat and exact_key_rejected_by_model_lcp must not rise, and hybrid_trim_miss may rise on the first,
cold turn only. The counters include other traffic during the run. The exit status is 1 if a number falls
short, and 2 if nothing can be measured.
"""

from __future__ import annotations

import argparse
import secrets

import pi_client
from probing import (
    HEALTHY,
    TURN_COLUMNS,
    TURN_LEGEND,
    Counters,
    Session,
    Table,
    add_length_options,
    parser_of,
    run,
    server_of,
    verdict,
)

_FIRST_JUDGED = 3
_QUESTION = "Show me part {number} of notes.txt: run `sed -n {number}p notes.txt` with the bash tool."


def play(session: Session, counters: Counters, options: argparse.Namespace) -> None:
    """Play all turns. Read the counters after the first turn and after the last."""
    name, table = secrets.token_hex(6), Table(TURN_COLUMNS)
    messages = [pi_client.system(name, options.context_chars), pi_client.user(_QUESTION.format(number=1))]
    for number in range(1, options.turns + 1):
        reply = session.ask(pi_client.body(messages, options))
        table.row(session.last.cells())
        if number in (1, options.turns):
            counters.read()
        answer = pi_client.results(reply, f"turn {number} of {name}")
        messages += [reply.sent_back(), *(answer or [pi_client.user(_QUESTION.format(number=number + 1))])]


def shortfalls(session: Session, counters: Counters, healthy: float) -> list[str]:
    turns = [turn.shortfall(healthy) for turn in session.turns if turn.number >= _FIRST_JUDGED]
    return [*filter(None, turns), *counters.shortfalls(cold=1)]


def read_options() -> argparse.Namespace:
    parser = parser_of(f"{__doc__}\n{TURN_LEGEND}")
    parser.add_argument("--turns", type=int, default=6, help="requests, at least 3 (%(default)s)")
    parser.add_argument("--healthy", type=float, default=HEALTHY, help="share of a prompt (%(default)s)")
    add_length_options(parser)
    options = parser.parse_args()
    if options.turns < _FIRST_JUDGED:
        parser.error(f"--turns: at least {_FIRST_JUDGED}, the first turn that is judged")
    return options


def main() -> int:
    options = read_options()
    server = server_of(options).reach()
    print(f"A session of {options.turns} turns, as pi sends it, at {server.url}\n")
    session, counters = Session(server), Counters(server)
    play(session, counters, options)
    session.print_notes()
    counters.print("before", "cold turn", "last turn")
    return verdict(shortfalls(session, counters, options.healthy))


if __name__ == "__main__":
    run(main)
