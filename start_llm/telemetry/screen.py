"""Writes lines to a terminal or a pipe from a thread of its own, above a live view if there is one.

Whoever puts a line never waits. What a terminal that is not read would hold up is dropped, and counted.
The cursor stays visible, so that a process that is killed leaves nothing behind but the last view.
"""

import math
import os
import queue
import re
import select
import threading
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

_MOST_LINES = 1000
_TICK_S = 0.5
_BETWEEN_FRAMES_S = 0.2
"""A frame takes some 4 ms; so a flood of lines has them drawn together, and costs 2 % of a core."""
_CLOSE_S = 1.0
_INDENT = " " * 5
_PIECE = 4096
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_DEFAULT_SIZE = os.terminal_size((80, 24))


@dataclass(frozen=True, slots=True)
class Line:
    """A line in parts. A terminal that is too narrow shows further parts below the first one."""

    parts: Sequence[str]

    def __str__(self) -> str:
        return "  ".join(self.parts)

    def folded(self, width: int) -> Sequence[str]:
        """Return lines that end before `width` where the parts allow it."""
        lines = [self.parts[0]]
        for part in self.parts[1:]:
            joined = f"{lines[-1]}  {part}"
            if len(joined) < width:
                lines[-1] = joined
            else:
                lines.append(f"{_INDENT}{part}")
        return lines


class LiveView[State: Hashable](Protocol):
    """Shows what happens now, and paints lines."""

    def state(self) -> State:
        """Return what is to be seen. Equal states look alike."""
        ...

    def frame(self, state: State, size: os.terminal_size) -> Sequence[str]:
        """Return the painted lines of a state. Each fits the width, all of them the height."""
        ...

    def painted(self, line: str) -> str:
        """Return a line with colours."""
        ...


def is_lively(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Return True for a terminal that understands escape codes, if the user wants them."""
    is_plain = environment.get("NO_COLOR") or environment.get("TERM", "dumb") in ("", "dumb")
    return os.isatty(descriptor) and not is_plain


class Screen:
    """A descriptor that one thread writes to.

    Args:
        view: shown below the lines; None: lines without escape codes, and nothing else.
    """

    def __init__(self, descriptor: int, view: LiveView[Any] | None) -> None:
        self._descriptor = descriptor
        self._view = view
        self._lines: queue.Queue[Line | None] = queue.Queue(_MOST_LINES)
        self._dropped = 0
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._shown: tuple[Hashable, os.terminal_size] | None = None
        self._frame_widths: Sequence[int] = ()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    @property
    def is_live(self) -> bool:
        return self._view is not None

    def put(self, line: Line) -> None:
        """Have a line written. Never waits: it is dropped if 1,000 lines are waiting."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            with self._lock:
                self._dropped += 1

    def close(self) -> None:
        """Write the rest and remove the view, unless the terminal takes nothing for a second."""
        self._is_ending.set()
        with suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_CLOSE_S)

    def abandon(self) -> None:
        """Remove the view now, if the terminal takes it at once."""
        with suppress(OSError):
            if self._frame_widths and select.select((), (self._descriptor,), (), 0)[1]:
                os.write(self._descriptor, self._erasing().encode())

    def _run(self) -> None:
        with suppress(OSError):  # the terminal was closed; requests are still answered
            while not (self._is_ending.is_set() and self._lines.empty()):
                self._show(self._take())
                if self._view:
                    self._is_ending.wait(_BETWEEN_FRAMES_S)
            self._write(self._erasing())

    def _take(self) -> Sequence[Line]:
        """Return the lines that wait; none after half a second, for the sake of the view."""
        taken: list[Line | None] = []
        with suppress(queue.Empty):
            taken.append(self._lines.get(timeout=_TICK_S if self._view else None))
            while len(taken) < _MOST_LINES:
                taken.append(self._lines.get_nowait())
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        missed = [Line((f"{dropped:,} lines were not shown: the terminal was not read.",))] if dropped else []
        return [line for line in taken if line] + missed

    def _show(self, lines: Sequence[Line]) -> None:
        if self._view is None:
            self._write("".join(f"{line}\n" for line in lines))
            return
        size, state = self._size(), self._view.state()
        if not lines and self._shown == (state, size):
            return
        painted = [self._view.painted(row) for line in lines for row in line.folded(size.columns)]
        frame = self._view.frame(state, size)
        erasing = self._erasing()
        self._shown, self._frame_widths = (state, size), [len(_COLOUR.sub("", row)) for row in frame]
        self._write("".join((erasing, *(f"{row}\n" for row in (*painted, *frame)))))

    def _erasing(self) -> str:
        """Return the codes that remove the view. A terminal that is narrower now has wrapped its rows."""
        columns = self._size().columns
        rows = sum(max(math.ceil(width / columns), 1) for width in self._frame_widths)
        return f"\r\x1b[{rows}A\x1b[J" if rows else ""

    def _size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._descriptor)
        except OSError:
            return _DEFAULT_SIZE
        return size if size.columns and size.lines else _DEFAULT_SIZE

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(errors="replace"))
        while data:
            select.select((), (self._descriptor,), ())
            with suppress(BlockingIOError):
                data = data[os.write(self._descriptor, data[:_PIECE]) :]
