"""A server in a process of its own is stopped between any two turns: a part of `disk.py`."""

import os
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

from benchmarks import servers
from benchmarks.harness import row, table
from scripts import tiny_models
from tests.http.continued import FAMILIES, Conversation, conversations, turn

MOST_AGAIN = 64
"""Tokens of a prompt that may be computed again."""


@dataclass
class Round:
    """Ten conversations, held over several lives of a server.

    Attributes:
        starts: seconds from the start of a process until it answers.
        restored: tokens that came from the disk.
    """

    everybody: list[Conversation]
    starts: list[float] = field(default_factory=list[float])
    restored: int = 0
    problems: list[str] = field(default_factory=list[str])

    @property
    def later(self) -> Generator[tuple[Conversation, int]]:
        """Each conversation with the number of each turn but its first."""
        for conversation in self.everybody:
            for number in range(1, len(conversation.turns)):
                yield conversation, number

    def compare(self, kept: Sequence[Conversation]) -> None:
        """Note what is otherwise than on a server that was never stopped, or than it should be."""
        for conversation, other in zip(self.everybody, kept, strict=True):
            if conversation.messages != other.messages:
                self.problems.append(f"{conversation.name} ({conversation.sends.__name__}): another reply")
        for conversation, number in self.later:
            heard = conversation.turns[number]
            if heard.computed > heard.new + MOST_AGAIN:
                self.problems.append(
                    f"{conversation.name} ({conversation.sends.__name__}), turn {number}: {heard}"
                )


def hold(model: Path, folder: Path, turns: int, idle_s: float | None) -> Round:
    """Hold the conversations with the server's end, and a new one, between any two turns.

    A server is killed `idle_s` seconds after its turn, or asked to end if that is None.
    """
    played = Round(conversations())
    for number in range(turns):
        began = time.monotonic()
        with _life(model, folder, "--ssd-cache-dir", folder / "ssd") as server:
            played.starts.append(time.monotonic() - began)
            turn(partial(servers.ask, server.port), played.everybody, number)
            ssd = servers.ask(server.port, "/stats")["ssd"]
            played.restored += ssd["restored_tokens"]
            if ssd["rejected_files"] or ssd["conversations"]["rejected_rows"]:
                played.problems.append(f"rejected: {ssd}")
            if idle_s is not None:
                time.sleep(idle_s)
                os.kill(server.pid, signal.SIGKILL)
    return played


def never_stopped(model: Path, folder: Path, turns: int) -> list[Conversation]:
    everybody = conversations()
    with patch.dict(os.environ, SSD_CACHE_DIR="off"), _life(model, folder) as server:
        for number in range(turns):
            turn(partial(servers.ask, server.port), everybody, number)
    return everybody


def _life(model: Path, folder: Path, *options: object) -> AbstractContextManager[servers.Served]:
    return servers.served("--model", model, *options, log=folder / "server.log")


def settings(root: Path, write_after_s: float) -> dict[str, str]:
    """The environment of the servers."""
    return {
        "PROXY": "false",
        "ENABLE_REQUEST_LOGGING": "false",
        "DEFAULT_THINKING": "false",
        "STATE_ROOT": f"{root}/state",
        "LOG_ROOT": f"{root}/logs",
        "SSD_CACHE_WRITE_AFTER_SECONDS": str(write_after_s),
    }


def restarts(
    folder: Path,
    *,
    family: Annotated[Sequence[str], FAMILIES] = FAMILIES,
    turns: int = 3,
    idle_s: float = 40,
    write_after_s: float = 30,
) -> Iterator[str]:
    """A server is stopped between any two turns of ten conversations.

    Each family's are held three times: on a server that is never stopped, on one that gets SIGTERM after each
    turn, and on one that gets SIGKILL a while after the last reply of each turn. Four of ten clients echo,
    three spell differently what they send again, three write the time in front of their system text.

    Checked: of a prompt no more is computed than what is new in it and 64 tokens; replies, which are greedy,
    are those of the server that was never stopped; no file is damaged and no row is rejected.

    Args:
        idle_s: from the last reply to SIGKILL
        write_after_s: the server's setting
    """
    table(
        "family | end | later turns | new tokens | computed | never stopped | most beyond what is new | "
        "from the disk | equal replies | slowest start"
    )
    for name in family:
        os.environ |= settings(folder / name, write_after_s)
        model = tiny_models.build(name, folder / name / "model", hidden=128, layers=2)
        kept = never_stopped(model, folder / name, turns)
        for end, wait_s in (("SIGTERM", None), (f"SIGKILL after {idle_s:g} s", idle_s)):
            place = folder / name / end.partition(" ")[0]
            place.mkdir()
            played = hold(model, place, turns, wait_s)
            played.compare(kept)
            row(name, end, *cells(played, kept))
            yield from (f"{name}, {end}: {problem}" for problem in played.problems)


def cells(played: Round, kept: Sequence[Conversation]) -> list[str]:
    later = [conversation.turns[number] for conversation, number in played.later]
    never_stopped = sum(turn.computed for conversation in kept for turn in conversation.turns[1:])
    new, computed = (
        sum(counts) for counts in zip(*((turn.new, turn.computed) for turn in later), strict=True)
    )
    equal = [mine.messages == other.messages for mine, other in zip(played.everybody, kept, strict=True)]
    return [
        *(f"{count:,}" for count in (len(later), new, computed, never_stopped)),
        f"{max(turn.computed - turn.new for turn in later)}",
        *(f"{played.restored:,}", f"{sum(equal)} of {len(kept)}", f"{max(played.starts):.1f} s"),
    ]
