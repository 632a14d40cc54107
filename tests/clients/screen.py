"""A client on a terminal of its own: what it shows, and keys for it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyte

ROWS, COLUMNS = 50, 120
ENTER, ESCAPE, DOWN, RIGHT = "\r", "\x1b", "\x1b[B", "\x1b[C"
_LOOK_S = 0.2
_PATIENCE_S = 90


class Screen:
    """Runs a command on a pseudo terminal and reads the screen that it draws.

    Args:
        environment: the whole of it, but for what tells the terminal.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], work: Path) -> None:
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._screen.write_process_input = self._answer
        self._stream = pyte.Stream(self._screen)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._ended = False
        self._terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            command,
            cwd=work,
            env={**environment, "TERM": "xterm-256color"},
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the client and everything that it started in its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._terminal)

    @property
    def text(self) -> str:
        """What stands there now, without the blanks at the ends."""
        lines = (line.rstrip() for line in self._screen.display)
        return "\n".join(line for line in lines if line)

    def press(self, *keys: str) -> None:
        """Type keys, with a pause after each: clients take those that come at once for a paste."""
        for key in keys:
            os.write(self._terminal, key.encode())
            self.look(0.4)

    def look(self, seconds: float) -> None:
        """Read for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._ended:
            if select.select([self._terminal], [], [], min(left, _LOOK_S))[0]:
                self._read()

    def wait(self, until: Callable[[str], Any], seconds: float = _PATIENCE_S) -> str:
        """Return the text of the screen once it fulfils the condition.

        Raises:
            AssertionError: it does not in time.
        """
        end = time.monotonic() + seconds
        while not until(self.text):
            assert time.monotonic() < end and not self._ended, f"the screen shows:\n{self.text}"
            self.look(_LOOK_S)
        return self.text

    def _read(self) -> None:
        try:
            data = os.read(self._terminal, 65536)
        except OSError:
            data = b""
        if data:
            self._stream.feed(self._decode(data))
        else:
            self._ended = True

    def _answer(self, data: str) -> None:
        """Answer what the client asks its terminal."""
        os.write(self._terminal, data.encode())
