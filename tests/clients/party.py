"""Clients that ask one server at the same time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.clients.model import ANSWER, NOTE, QUESTION
from tests.clients.table import Agent
from tests.clients.talk import IsOver, Line, Talk, Turn


@dataclass(frozen=True, slots=True)
class Guest:
    """One of them.

    Attributes:
        nominal_port: 8080 or 4000.
        mark: a word that stands in its question, and so in every prompt of its turn.
    """

    name: str
    nominal_port: int
    mark: str
    talk: Talk

    def ask(self, is_over: IsOver = lambda: False) -> Visit:
        began = time.monotonic()
        turn = self.talk.say(f"{QUESTION} ({self.mark})", is_over=is_over)
        return Visit(self, turn, time.monotonic() - began)

    def again(self) -> Guest:
        """With another question, which begins a new conversation."""
        self.talk.begin_anew()
        return replace(self, mark=secrets.token_hex(6))


@dataclass(frozen=True, slots=True)
class Visit:
    """The turn of a guest."""

    guest: Guest
    turn: Turn
    seconds: float

    @property
    def key(self) -> tuple[str, int]:
        return self.guest.name, self.guest.nominal_port

    @property
    def is_answered(self) -> bool:
        return self.turn.status == 0 and ANSWER in self.turn.printed

    def summary(self, lines: Sequence[Line]) -> str:
        """Args:
        lines: of the trace that are about it.
        """
        ends = ", ".join(
            f"{line['ending']} after {line['total_seconds']:.0f} s ({line['computed_tokens']} computed, "
            f"{line['lost_tokens']} lost)"
            for line in lines
        )
        answered = "answered" if self.is_answered else f"exit {self.turn.status}"
        return f"{self.guest.name} on {self.guest.nominal_port}: {answered} in {self.seconds:.0f} s: {ends}"


def invite(
    agents: Mapping[str, Agent], clients_home: Path, ports: Mapping[int, int], root: Path
) -> list[Guest]:
    """Each of the agents at all endpoints, with a note in its folder below the new folder `root`.

    Args:
        ports: by nominal port.
    """
    guests: list[Guest] = []
    for name, agent in agents.items():
        for nominal_port, port in ports.items():
            talk = Talk(agent, clients_home, port, None, root / f"{name}-{nominal_port}")
            (talk.place.work / NOTE).write_text("A note.\n")
            guests.append(Guest(name, nominal_port, secrets.token_hex(6), talk))
    return guests


def ask_all(guests: Sequence[Guest]) -> list[Visit]:
    with ThreadPoolExecutor(len(guests)) as pool:
        return list(pool.map(Guest.ask, guests))
