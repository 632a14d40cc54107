"""Counts what a download has received, and shows it on a terminal."""

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

_WINDOW_S = 5.0
_BETWEEN_LINES_S = 10.0
_BETWEEN_UPDATES_S = 0.2
_MB = 10**6


class Progress:
    """The progress of one download. One thread writes; others may read, and ask it to stop.

    Attributes:
        received_bytes: of all files, with what was on disk before.
        stopping: set by another thread: the download ends after the current piece.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.current_file: str | None = None
        self.received_bytes = 0
        self.total_bytes = 0
        self.files_done = 0
        self.files_total = 0
        self.stopping = False
        self.on_piece: Callable[[], None] = lambda: None
        self._clock = clock
        self._pieces: deque[tuple[float, int]] = deque()

    def begin(self, files: int, total_bytes: int) -> None:
        """Start to count, for this many files together."""
        self.current_file = None
        self.files_done, self.files_total = 0, files
        self.received_bytes, self.total_bytes = 0, total_bytes

    def have(self, nbytes: int) -> None:
        """Count bytes that need not be fetched; a negative number takes back what has to come again."""
        self.received_bytes += nbytes

    def receive(self, nbytes: int) -> None:
        self.received_bytes += nbytes
        now = self._clock()
        self._pieces.append((now, nbytes))
        while self._pieces and self._pieces[0][0] < now - _WINDOW_S:
            self._pieces.popleft()
        self.on_piece()

    def file_done(self) -> None:
        self.files_done += 1
        self.current_file = None

    @property
    def bytes_per_sec(self) -> int:
        """The speed of the last five seconds."""
        now = self._clock()
        recent = [(at, nbytes) for at, nbytes in tuple(self._pieces) if at >= now - _WINDOW_S]
        if not recent:
            return 0
        return int(sum(nbytes for _, nbytes in recent) / max(now - recent[0][0], 1.0))


class ProgressLine:
    """Shows progress: one line that changes on a terminal, else a line every ten seconds."""

    def __init__(
        self, progress: Progress, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._stream = stream
        self._clock = clock
        self._changes = stream.isatty()
        self._last = clock() - _BETWEEN_LINES_S

    def update(self) -> None:
        now = self._clock()
        if now - self._last >= (_BETWEEN_UPDATES_S if self._changes else _BETWEEN_LINES_S):
            self._last = now
            self._stream.write(f"\r{self._text():<78}" if self._changes else f"{self._text()}\n")
            self._stream.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._changes:
            self._stream.write("\n")
            self._stream.flush()

    def _text(self) -> str:
        seen = self._progress
        share = seen.received_bytes / seen.total_bytes if seen.total_bytes else 1.0
        return (
            f"  {share:4.0%}  {seen.received_bytes / _MB:,.0f} of {seen.total_bytes / _MB:,.0f} MB"
            f"  {seen.bytes_per_sec / _MB:,.1f} MB/s  {seen.current_file or ''}"
        )
