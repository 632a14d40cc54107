"""A server in a process of its own is stopped between any two turns of ten conversations.

    python benchmarks/restarts.py [--family NAME ...] [--idle-s 40] [--write-after-s 30] [--turns 3]

Each family's conversations are held three times: on a server that is never stopped, on one that gets SIGTERM
after each turn, and on one that gets SIGKILL `--idle-s` seconds after the last reply of each turn. Four of
the ten clients echo, three spell differently what they send again, three write the time in front of their
system text.

Checked: of a prompt no more is computed than what is new in it and 64 tokens; replies, which are greedy, are
those of the server that was never stopped; no file is hurt and no row is rejected. What must not be is
printed, and the status is then 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from tests.http.continued import FAMILIES, Conversation, conversations, turn  # noqa: E402

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
        for one in self.everybody:
            for number in range(1, len(one.turns)):
                yield one, number

    def compare(self, kept: Sequence[Conversation]) -> None:
        """Note what is otherwise than on a server that was never stopped, or than it should be."""
        for one, other in zip(self.everybody, kept, strict=True):
            if one.messages != other.messages:
                self.problems.append(f"{one.name} ({one.sends.__name__}): another reply")
        for one, number in self.later:
            heard = one.turns[number]
            if heard.computed > heard.new + MOST_AGAIN:
                self.problems.append(f"{one.name} ({one.sends.__name__}), turn {number}: {heard}")


@contextmanager
def life(model: Path, log: Path, ssd_folder: Path | None, idle_s: float | None) -> Generator[int]:
    """A server's life: its port. It is killed `idle_s` seconds after the block, or told to end, if None."""
    port = servers.free_port()
    options = ["--model", str(model), "--mlx-port", str(port)]
    options += ["--ssd-cache-dir", str(ssd_folder or "off")]
    with servers.running(
        servers.start_llm(*options), lambda: servers.health_seconds(port), log=log
    ) as process:
        yield port
        if idle_s is not None:
            time.sleep(idle_s)
            os.kill(process, signal.SIGKILL)


def hold(model: Path, folder: Path, turns: int, idle_s: float | None) -> Round:
    """Hold the conversations with the server's end, and a new one, between any two turns."""
    found = Round(conversations())
    for number in range(turns):
        began = time.monotonic()
        with life(model, folder / "server.log", folder / "ssd", idle_s) as port:
            found.starts.append(time.monotonic() - began)
            turn(partial(servers.ask, port), found.everybody, number)
            ssd = servers.ask(port, "/stats")["ssd"]
            found.restored += ssd["restored_tokens"]
            if ssd["rejected_files"] or ssd["conversations"]["rejected_rows"]:
                found.problems.append(f"rejected: {ssd}")
    return found


def never_stopped(model: Path, folder: Path, turns: int) -> list[Conversation]:
    everybody = conversations()
    with life(model, folder / "server.log", None, None) as port:
        for number in range(turns):
            turn(partial(servers.ask, port), everybody, number)
    return everybody


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


def measure(family: str, options: argparse.Namespace) -> list[str]:
    """Print a row for each way to end. Returns the problems."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        os.environ |= settings(Path(name), options.write_after_s)
        folder = Path(name) / "model"
        folder.mkdir()
        model = tiny_models.build(family, folder, hidden=128, layers=2)
        kept = never_stopped(model, Path(name), options.turns)
        for end, idle_s in (("SIGTERM", None), (f"SIGKILL after {options.idle_s:g} s", options.idle_s)):
            folder = Path(name) / end.partition(" ")[0]
            folder.mkdir()
            found = hold(model, folder, options.turns, idle_s)
            found.compare(kept)
            print(f"| {' | '.join(row(family, end, found, kept))} |", flush=True)
            problems += [f"{family}, {end}: {problem}" for problem in found.problems]
    return problems


def row(family: str, end: str, found: Round, kept: Sequence[Conversation]) -> list[str]:
    heard = [one.turns[number] for one, number in found.later]
    again = [one.computed - one.new for one in heard]
    never = [one.turns[number].computed for one in kept for number in range(1, len(one.turns))]
    equal = sum(one.messages == other.messages for one, other in zip(found.everybody, kept, strict=True))
    return [
        family,
        end,
        f"{len(heard)}",
        f"{sum(one.new for one in heard):,}",
        f"{sum(one.computed for one in heard):,}",
        f"{sum(never):,}",
        f"{max(again)}",
        f"{found.restored:,}",
        f"{equal} of {len(kept)}",
        f"{max(found.starts):.1f} s",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=40, help="from the last reply to SIGKILL")
    parser.add_argument("--write-after-s", type=float, default=30, help="the server's setting")
    options = parser.parse_args()
    print(f"{servers.machine('mlx', 'mlx-lm')}; {options.turns} turns of ten conversations\n")
    print("| family | end | later turns | new tokens | computed | never stopped | most beyond what is new "
          "| from the disk | equal replies | slowest start |\n|" + "---|" * 10)  # fmt: skip
    problems = [problem for family in options.family for problem in measure(family, options)]
    for problem in problems:
        print(f"  PROBLEM  {problem[:1000]}")
    return 1 if problems else 0


if __name__ == "__main__":
    run_with_openblas()
    sys.exit(main())
