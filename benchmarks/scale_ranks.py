"""Two ranks on this machine that are killed in turn while replies are written: a part of `scale.py`."""

from __future__ import annotations

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
from tests.ranks.launches import Launched, is_free, until
from tests.ranks.services import HOSTS, ask, begin_reply, chat, is_ready, served

_AT_ONCE_S, _BACK_S = 15, 240
_PAUSES_S = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Seconds from the beginning of a reply to the kill."""


def ranks(folder: Path, *, kills: int = 50) -> Iterable[str]:
    """`serve --hosts` with `--restart`: one of two ranks is killed (SIGKILL) while a reply is written.

    Checked: both processes end, the service says so and is back, and a question is answered as before; in the
    end it stops with status 0 and leaves no process and no port.

    Args:
        kills: how many, of either rank in turn
    """
    model = tiny_models.build("qwen3", folder / "model", hidden=128, layers=2)
    question = chat([{"role": "user", "content": "Tell."}])
    seconds: list[float] = []
    variables = {"SSD_CACHE_DIR": "off", "ENABLE_REQUEST_LOGGING": "false"}
    with patch.dict(os.environ, variables), served(model, folder / "state", launcher=HOSTS) as (launch, port):
        first = ask(port, "/v1/chat/completions", question)["choices"]
        for number in range(kills):
            begin_reply(port)
            time.sleep(_PAUSES_S[number % len(_PAUSES_S)])
            seconds.append(_killed(launch, number % 2, number + 1))
            until(lambda: is_ready(launch, port), _BACK_S, "it is back", launch)
            if ask(port, "/v1/chat/completions", question)["choices"] != first:
                yield f"after kill {number + 1} the answer is another one"
        pids = [launch.rank(0), launch.rank(1)]
        launch.process.send_signal(signal.SIGTERM)
        if (status := launch.wait(_BACK_S)) != 0:
            yield f"it stopped with status {status}"
    if left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        yield f"{left} still run"
    if not is_free(port):
        yield f"port {port} is still open"
    table("kills | both have ended, median | at most")
    row(kills, f"{median(seconds):.2f} s", f"{max(seconds):.2f} s")


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
