"""The command line: `python -m start_llm serve` and `python -m start_llm settings`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from dotenv import dotenv_values

# The tokenizer library warns that it has no PyTorch, which nothing here needs. Set before it is imported.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from start_llm import settings as settings_table
from start_llm import settings_text
from start_llm.app import App
from start_llm.configured import DEMO_MODEL, ROOT
from start_llm.core.errors import StartupError
from start_llm.settings import Settings, Source
from start_llm.telemetry.terminal import Terminal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FLAGS: Mapping[str, tuple[str, str]] = {
    "--model": ("MODEL_PATH", "PATH_OR_REPO"),
    "--mlx-host": ("MLX_HOST", "ADDRESS"),
    "--mlx-port": ("MLX_PORT", "N"),
    "--proxy-port": ("PROXY_PORT", "N"),
    "--batch": ("BATCH", "N"),
    "--hot-cache-max-size": ("PROMPT_CACHE_MAX_BYTES", "SIZE"),
    "--initial-cache-blocks": ("INITIAL_CACHE_BLOCKS", "N"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 2 if it cannot start."""
    options = _parser().parse_args(arguments)
    if options.command == "settings":
        text = settings_text.as_env_file() if options.format == "env" else settings_text.as_markdown()
        sys.stdout.write(text)
        return 0
    try:
        return serve(_sources(options), Terminal())
    except StartupError as error:
        print(f"start_llm cannot start.\n{error}", file=sys.stderr)
        return 2


def serve(sources: Sequence[Source], terminal: Terminal) -> int:
    """Serve until a signal comes. A second signal ends the process at once."""
    settings = settings_table.load(*sources)
    for row in settings_table.waiting_for_later(*sources):
        terminal.say(f"{row.name} is set, but acts {row.acts}.")
    _leave_on_signals()
    app = App(settings, terminal)
    app.start()
    _warn_if_open(settings, terminal)
    _wait_for_a_signal()
    terminal.say("Stopping ...")
    if not app.close():
        _leave("Stopped while the engine was still computing.", 0)
    terminal.say("Stopped.")
    return 0


def _leave(message: str, status: int) -> NoReturn:
    """End the process although a thread is deep in something that cannot be interrupted."""
    with suppress(OSError):
        # Not print: a signal may have come in the middle of one.
        os.write(sys.stdout.fileno(), f"{message}\n".encode())
    os._exit(status)


def _leave_on_signals() -> None:
    """While the model is found and loaded: an exception would wait for the threads of a download to end."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        _leave("Interrupted before the server was ready.", 128 + number)

    for number in _SIGNALS:
        signal.signal(number, on_signal)


def _wait_for_a_signal() -> None:
    """Return after the first signal; from then on another one ends the process at once.

    A pipe and no threading.Event: a handler can interrupt another one that holds the event's lock (lesson 6).
    The interpreter writes into it in whichever thread the kernel gave the signal to (lesson 9).
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    asked = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(130)
        asked = True

    signal.set_wakeup_fd(writer)
    for number in _SIGNALS:
        signal.signal(number, on_signal)
    os.read(reader, 1)


def _warn_if_open(settings: Settings, terminal: Terminal) -> None:
    if settings.mlx_host not in ("127.0.0.1", "::1", "localhost"):
        terminal.say(f"WARNING: {settings.mlx_host} is not loopback, and nothing asks for a key yet.")


def _sources(options: argparse.Namespace) -> list[Source]:
    flags = {variable: value for flag, (variable, _) in _FLAGS.items() if (value := _given(options, flag))}
    if options.demo:
        flags["MODEL_PATH"] = str(DEMO_MODEL)
    if options.no_proxy:
        flags["PROXY"] = "false"
    if options.no_cache:
        flags["PROMPT_CACHE"] = "false"
    dotenv = {name: value for name, value in dotenv_values(ROOT / ".env").items() if value is not None}
    return [Source("command line", flags), Source("environment", os.environ), Source(".env", dotenv)]


def _given(options: argparse.Namespace, flag: str) -> str | None:
    return getattr(options, flag.removeprefix("--").replace("-", "_"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m start_llm", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="serve a model", allow_abbrev=False)
    for flag, (variable, value) in _FLAGS.items():
        server.add_argument(flag, metavar=value, help=f"wins over {variable} in the environment and .env")
    server.add_argument("--demo", action="store_true", help="serve the demo model of this repository")
    server.add_argument("--no-proxy", action="store_true", help="the server alone, without the LiteLLM proxy")
    server.add_argument("--no-cache", action="store_true", help="compute every prompt anew")
    table = commands.add_parser("settings", help="print every setting with default and meaning")
    table.add_argument("--format", choices=("env", "markdown"), default="markdown")
    return parser
