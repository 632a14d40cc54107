"""Renders, with rich, what running requests do and how full the memory is."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from start_llm.telemetry.activity import Activity, RunningRequest

_GIB, _MIB = 2**30, 2**20
_LEAST_ROWS = 3
_WIDEST = 500
_ROWS_AROUND = 4
"""Rows of a frame besides those of requests: a blank one, the names of columns, what is not shown, memory."""
_STYLES = {
    "line.clock": "dim",
    "line.name": "bold",
    "line.cached": "green",
    "line.read": "cyan",
    "line.written": "bold",
    "line.again": "yellow",
    "line.bad": "red",
}
_PARTS = (
    r"^(?P<clock>\d\d:\d\d:\d\d) ",
    r"^  (?P<name>[a-z]+)  ",
    r"(?P<cached>[\d,]+ cached)",
    r"(?P<read>[\d,]+ read)",
    r"(?P<written>[\d,]+ written)",
    r"(?P<again>read [\d,]+ tokens again: .*)",
    r"^[\d:]{8} (?P<bad>refused .*)",
    r"(?P<bad>\b(failed|timed out|cancelled) )",
)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that models and their caches take, and what they may take together."""

    used_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class LiveRow:
    """One running request as it is shown."""

    session: str
    client: str
    endpoint: str
    phase: str
    read: str
    written: str
    speed: str
    seconds: str


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything that a frame shows."""

    rows: tuple[LiveRow, ...]
    status: str


class LiveTable:
    """The live view of a terminal. Used by the terminal's thread only.

    Args:
        memory: returns the present use of memory, without waiting for the engine.
    """

    def __init__(self, activity: Activity, memory: Callable[[], MemoryUse]) -> None:
        self._activity = activity
        self._memory = memory
        self._console = Console(
            file=io.StringIO(),
            width=_WIDEST,
            color_system="standard",
            force_terminal=True,
            theme=Theme(_STYLES),
            highlight=False,
        )

    def state(self) -> LiveState:
        running = self._activity.running()
        now = self._activity.now
        return LiveState(tuple(_row(one, now) for one in running), self._status(len(running)))

    def _status(self, running: int) -> str:
        memory, (hour, _) = self._memory(), self._activity.savings()
        parts = [
            f"{running} running" if running else "waiting for requests",
            f"memory {_size(memory.used_bytes)} of {_size(memory.budget_bytes)}",
        ]
        if asked := hour.cached + hour.computed:
            parts.append(f"{hour.cached / asked:.0%} of the last hour's {asked:,} prompt tokens cached")
        return "  ·  ".join(parts)

    def frame(self, state: LiveState, size: os.terminal_size) -> Sequence[str]:
        room = max(size.lines - _ROWS_AROUND - 1, _LEAST_ROWS)
        hidden = len(state.rows) - room
        table = [Text(""), _table(state.rows[:room])] if state.rows else []
        more = [Text(f"and {hidden} more", style="dim")] if hidden > 0 else []
        with self._console.capture() as captured:
            for one in (*table, *more, Text(state.status, style="dim")):
                self._console.print(one, width=size.columns - 1, no_wrap=True, overflow="ellipsis")
        return captured.get().splitlines()

    def painted(self, line: str) -> str:
        text = Text(line)
        for part in _PARTS:
            text.highlight_regex(part, style_prefix="line.")
        with self._console.capture() as captured:
            self._console.print(text, soft_wrap=True)
        return captured.get().removesuffix("\n")


def _table(rows: Sequence[LiveRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("session", "client", "endpoint", "now"):
        table.add_column(name, no_wrap=True, max_width=12)
    for name, style in (("read", "cyan"), ("written", "bold"), ("tok/s", ""), ("s", "dim")):
        table.add_column(name, no_wrap=True, justify="right", style=style)
    for row in rows:
        table.add_row(
            row.session, row.client, row.endpoint, row.phase, row.read, row.written, row.speed, row.seconds
        )
    return table


def _row(running: RunningRequest, now: float) -> LiveRow:
    facts, speed = running.facts, running.tokens_per_s
    read = f"{running.done:,}/{facts.prompt_tokens:,}"
    return LiveRow(
        session=facts.name or "-",
        client=facts.client or "-",
        endpoint=facts.endpoint.removeprefix("/v1/").partition("/")[0],
        phase=running.phase,
        read=f"{read} ({running.cached:,} cached)" if running.cached else read,
        written=f"{running.written:,}",
        speed="" if speed is None else f"{speed:,.0f}",
        seconds=f"{max(now - running.began, 0.0):,.0f}",
    )


def _size(count: int) -> str:
    return f"{count / _GIB:,.1f} GiB" if count >= _GIB else f"{count / _MIB:,.0f} MiB"
