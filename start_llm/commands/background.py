"""Start a server that outlives the command that starts it."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from start_llm.config.paths import from_root, program
from start_llm.config.settings import Settings
from start_llm.core.errors import CommandError
from start_llm.launch.server_info import servers_of
from start_llm.storage.private_files import private_folder, private_opener

type Say = Callable[[str], None]

_POLL_S = 0.2
_SHOW_EVERY_S = 5.0
_LAST_LINES = 15


def start_in_background(settings: Settings, flags: Sequence[str], say: Say) -> bool:
    """Start `serve`, and wait until it answers. Return False if it has ended before, or Ctrl-C was pressed.

    Its output goes to `server.log` in LOG_ROOT.

    Raises:
        CommandError: the log cannot be written.
    """
    log = from_root(settings.log.root) / "server.log"
    process = _start([program(), "serve", *flags], log)
    say(f"The server starts (process {process.pid}). What it prints goes to {log}.")
    try:
        return _is_ready(settings, process, log, say)
    except KeyboardInterrupt:
        say("It goes on loading. start_llm status says when it answers, start_llm stop ends it.")
        return False


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    try:
        private_folder(log.parent)
        output = open(log, "wb", opener=private_opener)  # noqa: SIM115 - closed below, and private
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be written: {error.strerror}.") from None
    with output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _is_ready(settings: Settings, process: subprocess.Popen[bytes], log: Path, say: Say) -> bool:
    shown_at, shown = time.monotonic(), ""
    while process.poll() is None:
        if any(server.pid == process.pid and not server.is_loading for server in servers_of(settings)):
            return True
        time.sleep(_POLL_S)
        if time.monotonic() - shown_at > _SHOW_EVERY_S:
            shown_at, last = time.monotonic(), next(iter([*_last_lines(log, 1)]), "")
            if last != shown:
                say(f"  {last}")
                shown = last
    say(f"It has ended with status {process.returncode}:")
    for line in _last_lines(log, _LAST_LINES):
        say(f"  {line}")
    return False


def _last_lines(log: Path, count: int) -> Iterator[str]:
    """Yield the last lines of a log. Of a line that was written over only the end is shown."""
    with suppress(OSError):
        text = log.read_bytes().decode(errors="replace").rstrip()
        yield from (line.rpartition("\r")[2] for line in text.split("\n")[-count:] if text)
