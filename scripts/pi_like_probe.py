"""The primary probe of the prompt cache: a session of an agent that sends what pi sends.

    python scripts/pi_like_probe.py [--base-url http://127.0.0.1:4000] [--turns 6]

One long system prompt, four tools, calls and results, thoughts in reasoning_content, arguments written anew.
The server's own replies are sent back; where one calls tools, short results follow, else a short question.
The system prompt is new in each run, so that the first turn is a cold one.

Healthy, from the third turn on: at least 97 % of the prompt cached. In the counters of /stats: no rise of
vlm_retreat and exact_key_rejected_by_model_lcp, and hybrid_trim_miss on the first, cold turn alone. Counters
are the server's; other traffic during the run is in them too. The exit status is 1 if a number falls short,
and 2 if nothing can be measured.
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
    """All turns; the counters are read behind the first one and behind the last."""
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
