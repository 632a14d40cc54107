"""Pseudo-terminals, as people have them: a thread reads what is written to them, unless they are stopped."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import termios
import threading
import time
import tty
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TextIO

LIVELY = {"TERM": "xterm-256color"}
ERASED = "\r\x1b[{}A\x1b[J"
COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Tty:
    """A pseudo-terminal; what is written to it is read by a thread, unless it is stopped."""

    def __init__(self, columns: int = 40) -> None:
        self.reader, self.writer = pty.openpty()
        tty.setraw(self.writer)
        self.resize(columns)
        self.stream: TextIO = os.fdopen(self.writer, "w", closefd=False)
        self.text = ""
        self._thread = threading.Thread(target=self._read, daemon=True)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with suppress(OSError):
            while data := os.read(self.reader, 65536):
                self.text += decoder.decode(data)

    def until(self, text: str, within_s: float = 5) -> None:
        deadline = time.monotonic() + within_s
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def close(self) -> None:
        """End the thread first: what it reads may be another terminal's descriptor afterwards."""
        os.close(self.writer)
        if self._thread.ident:
            self._thread.join(5)
        os.close(self.reader)


@contextmanager
def a_tty(columns: int = 40, *, is_read: bool = True) -> Generator[Tty]:
    terminal = Tty(columns)
    if is_read:
        terminal.read()
    try:
        yield terminal
    finally:
        terminal.close()
