"""Two ranks on this machine that are killed in turn while replies are written: a part of `scale.py`."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median
from unittest.mock import patch

from benchmarks.harness import row, table
from scripts import tiny_models
from tests.ranks.launches import Launched, descendants, is_free, until
from tests.ranks.services import HOSTS, ask, begin_reply, chat, is_ready, served

_AT_ONCE_S, _BACK_S = 15, 240
_LAST_LINES, _FIRST_LETTERS = 12, 200
_PAUSES_S = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Seconds from the beginning of a reply to the kill."""


def ranks(folder: Path, *, kills: int = 50) -> Iterable[str]:
    """`serve --hosts` with `--restart`: one of two ranks is killed (SIGKILL) while a reply is written.

    Checked: both processes end, the service says so and is back, and a question is answered as before, from
    what the disks have or anew; in the end it stops with status 0 and leaves no process and no port. Where it
    ends early, the last line says at which kill, what was waited for, how loaded the machine was, and what
    the service has printed last.

    Args:
        kills: how many, of either rank in turn
    """
    model = tiny_models.build("qwen3", folder / "model", hidden=128, layers=2)
    question = chat([{"role": "user", "content": "Tell."}])
    seconds: list[float] = []
    variables = {"ENABLE_REQUEST_LOGGING": "false"}
    with patch.dict(os.environ, variables), served(model, folder / "state", launcher=HOSTS) as (launch, port):
        first = ask(port, "/v1/chat/completions", question)["choices"]
        for number in range(kills):
            try:
                seconds.append(_killed_in_mid_reply(launch, port, number))
                is_same = ask(port, "/v1/chat/completions", question)["choices"] == first
            except (AssertionError, OSError) as error:
                yield f"kill {number + 1}, of rank {number % 2}: {_what_is_wrong(launch, error)}"
                break
            if not is_same:
                yield f"after kill {number + 1} the answer is another one"
        yield from _wrong_at_the_end(launch, port)
    if seconds:
        table("kills | both have ended, median | at most")
        row(len(seconds), f"{median(seconds):.2f} s", f"{max(seconds):.2f} s")


def _killed_in_mid_reply(launch: Launched, port: int, number: int) -> float:
    """Kill a rank while a reply is written. Returns, when the service is back, how long it took to end."""
    begin_reply(port)
    time.sleep(_PAUSES_S[number % len(_PAUSES_S)])
    ended_s = _killed(launch, number % 2, number + 1)
    until(lambda: is_ready(launch, port), _BACK_S, "it is back", launch)
    return ended_s


def _what_is_wrong(launch: Launched, error: Exception) -> str:
    """Return why no more ranks are killed."""
    status = launch.process.poll()
    runs = "the service runs" if status is None else f"the service has ended with status {status}"
    load, printed = os.getloadavg()[0], "".join(launch.lines[-_LAST_LINES:])
    wrong = f"{type(error).__name__}: {str(error)[:_FIRST_LETTERS]}"
    return f"{wrong}\n{runs}, load {load:.1f}; it has printed last:\n{printed}"


def _wrong_at_the_end(launch: Launched, port: int) -> Iterable[str]:
    """Stop the service, and return what it leaves behind."""
    pids = descendants(launch.process.pid)
    launch.process.send_signal(signal.SIGTERM)
    if (status := launch.wait(_BACK_S)) != 0:
        yield f"it stopped with status {status}"
    if left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        yield f"{left} still run"
    if not is_free(port):
        yield f"port {port} is still open"


def _killed(launch: Launched, rank: int, times: int) -> float:
    """Kill a rank, and return the seconds until both have ended."""
    pids = [launch.rank(0), launch.rank(1)]
    began = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(pids[rank], signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), _AT_ONCE_S, "both end", launch)
    ended = time.monotonic() - began
    until(lambda: launch.text.count("starts again") == times, _AT_ONCE_S, "it says so", launch)
    return ended
