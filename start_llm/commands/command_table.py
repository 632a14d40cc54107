"""The table of these commands: their arguments, and what they do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from start_llm.commands.server_status import tell_status
from start_llm.commands.stop import stop
from start_llm.config.settings import Settings
from start_llm.launch.server_info import NO_KEY, own_url, servers_of

_END_S = 20.0
"""Seconds that a server may take to end after its running requests."""


def add_commands(commands: Any) -> None:
    """Add the parsers of these commands."""
    told = commands.add_parser(
        "status", help="which server runs, and what it does; exit status 3 if none does", allow_abbrev=False
    )
    told.add_argument("--json", action="store_true", help="as JSON")
    stopped = commands.add_parser(
        "stop", help="stop the running server; exit status 3 if none runs", allow_abbrev=False
    )
    stopped.add_argument("--port", type=int, metavar="N", help="of the server to stop, if several run")
    stopped.add_argument("--now", action="store_true", help="do not wait for running requests")


def _status(settings: Settings, options: argparse.Namespace) -> int:
    key, url = next(iter(settings.keys), NO_KEY), own_url(settings.mlx_host, settings.mlx_port)
    return tell_status(servers_of(settings), url, key, as_json=options.json, stream=sys.stdout)


def _stop(settings: Settings, options: argparse.Namespace) -> int:
    """Stop the server, in the time that it has for running requests and for its own end."""
    return stop(
        lambda: servers_of(settings),
        options.port,
        settings.mlx_port,
        _say,
        patience_s=settings.drain_s + _END_S,
        at_once=options.now,
    )


def _say(line: str) -> None:
    print(line, flush=True)


COMMANDS: Mapping[str, Callable[[Settings, argparse.Namespace], int]] = {"status": _status, "stop": _stop}
UNDONE: Mapping[str, str] = {"status": "tell the status", "stop": "stop the server"}
"""What a command cannot do when it fails, by its name."""
