"""Keep what the proxy prints in `proxy.log`, and pass on what it tells the server in this way."""

import errno
import logging
import logging.handlers
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, cast

from start_llm.proxy.refusals import ProxyRefusal, message_in
from start_llm.storage.private_files import private_folder, private_opener

_LOG_BYTES = 2 * 2**20
_LOG_FILES = 3

type Say = Callable[[str], None]
type TellRefusal = Callable[[ProxyRefusal], None]


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """Log files that only their owner can read, because they may contain parts of prompts."""

    def _open(self) -> TextIOWrapper:
        return cast(
            "TextIOWrapper",
            open(self.baseFilename, self.mode, encoding=self.encoding, opener=_opener),
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging calls it so
        """Drop a line that cannot be written, say because the disk is full."""


def _opener(path: str, flags: int) -> int:
    """Open a file, but no link: what is printed would be written into another file of the user."""
    try:
        return private_opener(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", path) from error
        raise


class ProxyLog:
    """Writes the proxy's output into rotating files."""

    def __init__(self, path: Path, say: Say, tell_refusal: TellRefusal = lambda _: None) -> None:
        self.path = path
        self.say = say
        self.tell_refusal = tell_refusal
        self._handler: _PrivateFile | None = None
        try:
            private_folder(path.parent)
            self._handler = _PrivateFile(path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, encoding="utf-8")
        except OSError as error:
            say(f"{path} cannot be written ({error.strerror}); what the proxy prints is not kept.")

    @property
    def is_kept(self) -> bool:
        """False if the file cannot be written."""
        return self._handler is not None

    def write(self, line: str) -> None:
        if self._handler:
            self._handler.emit(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        if self._handler:
            with suppress(OSError):
                self._handler.close()


class ProcessOutput:
    """The output of one process. If nobody read the pipe, the proxy would block."""

    def __init__(self, log: ProxyLog) -> None:
        self._log = log
        self._last: deque[str] = deque(maxlen=20)

    def drain(self, pipe: IO[bytes]) -> None:
        """Log every line until the pipe closes. Runs on a thread of its own."""
        for line in pipe:
            text = line.decode("utf-8", errors="replace").rstrip()
            message = message_in(text)
            if isinstance(message, str):
                self._log.write(text)
                self._log.say(message)
                continue
            self.note(text)
            if message:
                self._log.tell_refusal(message)

    def note(self, text: str) -> None:
        self._last.append(text)
        self._log.write(text)

    def last_words(self) -> str:
        """Return this process's last non-empty line, and the path of the log if there is one."""
        words = next((line for line in reversed(self._last) if line.strip()), "it printed nothing")
        return f"{words[:200]} (see {self._log.path})." if self._log.is_kept else f"{words[:200]}."
