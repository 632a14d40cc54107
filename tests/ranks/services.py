"""Services of two ranks, started as a user starts them, and what is asked of them."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.ranks.launches import Launched, free_ports, launched, ranks, until

SERVE = ("-m", "start_llm", "serve", "--no-proxy")
_PATIENCE_S = 180


def ask(port: int, path: str, body: object = None) -> Any:
    """What a server answers; an error of HTTP raises."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


HOSTS = (sys.executable, *SERVE, "--hosts", "127.0.0.1,127.0.0.1", "--restart")


@contextmanager
def served(
    model: Path, state: Path, *, launcher: Sequence[str] = (), **variables: str
) -> Generator[tuple[Launched, int]]:
    """A service of two ranks that answers, and its port."""
    port = free_ports(1)
    own = ("--model", str(model), "--port", str(port))
    command = [*launcher, *own] if launcher else ranks(2, [*SERVE, *own])
    with launched(command, STATE_ROOT=str(state), **variables) as launch:
        until(lambda: is_ready(launch, port), _PATIENCE_S, "it answers", launch)
        yield launch, port


def is_ready(launch: Launched, port: int) -> bool:
    """Whether the model is loaded."""
    assert launch.process.poll() is None, launch.text
    try:
        return ask(port, "/health")["status"] == "ok"
    except OSError:
        return False


def chat(messages: Sequence[dict[str, str]], **more: Any) -> dict[str, Any]:
    """A greedy request for a short answer."""
    return {
        "messages": list(messages),
        "max_tokens": 40,
        "temperature": 0,
        "reasoning_effort": "none",
        **more,
    }


def begin_reply(port: int) -> None:
    """Have a long reply written meanwhile."""

    def write() -> None:
        with suppress(OSError):
            ask(
                port, "/v1/chat/completions", chat([{"role": "user", "content": "Tell."}], max_tokens=100_000)
            )

    threading.Thread(target=write, daemon=True).start()
    until(lambda: ask(port, "/stats")["batch"]["active_rows"], 20, "a reply is written")
