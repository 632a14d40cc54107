"""Renders, with rich, what running requests do and how full the memory is."""

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from start_llm.core.columns import binary_size
from start_llm.telemetry.activity import Activity
from start_llm.telemetry.request_record import RequestRecord

_LEAST_ROWS = 3
_WIDE = 90
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
    r"(?P<again>read [\d,]+ tokens? again: .*)",
    r"^[\d:]{8} (?P<bad>refused +\d{3} [^ ]+ [^ ]+)",
    r"(?P<bad>\b(failed|timed out|ran away|cancelled) )",
)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that models and their caches take, and what they may take together."""

    used_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveColumn:
    """A column of the table.

    Attributes:
        text: of a request, at a time in seconds since 1970.
        is_wide: it is left out if the terminal has fewer than 90 columns.
    """

    name: str
    text: Callable[[RequestRecord, float], str]
    style: str = ""
    justify: Literal["left", "right"] = "right"
    is_wide: bool = False


_COLUMNS = (
    LiveColumn(name="session", justify="left", text=lambda record, _: record.facts.session_label),
    LiveColumn(
        name="client", justify="left", is_wide=True, text=lambda record, _: record.facts.client or "-"
    ),
    LiveColumn(
        name="endpoint", justify="left", is_wide=True, text=lambda record, _: record.facts.endpoint_name
    ),
    LiveColumn(name="now", justify="left", text=lambda record, _: record.phase),
    LiveColumn(name="prompt", text=lambda record, _: f"{record.facts.prompt_tokens:,}"),
    LiveColumn(name="cached", style="green", text=lambda record, _: f"{record.cached:,}"),
    LiveColumn(name="read", style="cyan", text=lambda record, _: f"{record.done - record.cached:,}"),
    LiveColumn(name="written", style="bold", text=lambda record, _: f"{record.written:,}"),
    LiveColumn(
        name="tok/s", text=lambda record, _: f"{speed:,.0f}" if (speed := record.tokens_per_s) else ""
    ),
    LiveColumn(name="s", style="dim", text=lambda record, now: f"{max(now - record.began, 0.0):,.0f}"),
)


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything that a frame shows: a cell for each request and column, and a line below them."""

    rows: tuple[tuple[str, ...], ...]
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
            color_system="standard",
            force_terminal=True,
            no_color=False,
            theme=Theme(_STYLES),
            highlight=False,
        )

    def state(self) -> LiveState:
        running = self._activity.running()
        now = self._activity.now
        rows = (tuple(column.text(record, now) for column in _COLUMNS) for record in running)
        return LiveState(tuple(rows), self._status(len(running)))

    def _status(self, running: int) -> str:
        memory, (hour, _) = self._memory(), self._activity.savings()
        parts = [
            f"{running} running" if running else "waiting for requests",
            f"memory {binary_size(memory.used_bytes)} of {binary_size(memory.budget_bytes)}",
        ]
        if asked := hour.cached + hour.computed:
            parts.append(f"{hour.cached / asked:.0%} of the last hour's {asked:,} prompt tokens cached")
        return "  ·  ".join(parts)

    def frame(self, state: LiveState, size: os.terminal_size) -> Sequence[str]:
        room = max(size.lines - _ROWS_AROUND - 1, _LEAST_ROWS)
        hidden = len(state.rows) - room
        table = [Text(""), _table(state.rows[:room], size.columns)] if state.rows else []
        more = [Text(f"and {hidden} more", style="dim")] if hidden > 0 else []
        self._console.width = size.columns - 1
        with self._console.capture() as captured:
            for part in (*table, *more, Text(state.status, style="dim")):
                self._console.print(part, no_wrap=True, overflow="ellipsis")
        return captured.get().splitlines()

    def painted(self, line: str) -> str:
        text = Text(line)
        for part in _PARTS:
            text.highlight_regex(part, style_prefix="line.")
        with self._console.capture() as captured:
            self._console.print(text, soft_wrap=True)
        return captured.get().removesuffix("\n")


def _table(rows: Sequence[Sequence[str]], width: int) -> Table:
    shown = [(place, column) for place, column in enumerate(_COLUMNS) if width >= _WIDE or not column.is_wide]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for _, column in shown:
        table.add_column(column.name, no_wrap=True, justify=column.justify, style=column.style)
    for row in rows:
        table.add_row(*(Text(row[place]) for place, _ in shown))
    return table
