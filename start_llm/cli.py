"""The command line: `python -m start_llm COMMAND`, and the flags of each command."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from start_llm import __version__
from start_llm.cache.disk.disk_maintenance import clear, report
from start_llm.commands import command_table
from start_llm.commands.completion import SHELLS, completion_script
from start_llm.commands.main_menu import ListedOnDisk, Menu, MenuWorld, compute
from start_llm.commands.model_arguments import add_doctor, add_model_commands
from start_llm.commands.parser import SuggestingParser
from start_llm.commands.rank_launch import add_rank_flags, launch_of, serve_on_hosts
from start_llm.commands.server_status import answers
from start_llm.config import documents
from start_llm.config import settings as settings_table
from start_llm.config.env_file import read_env_file
from start_llm.config.flags import add_flags, variables_of
from start_llm.config.foreign_names import foreign_lines
from start_llm.config.paths import ENV_FILE, disk_tier_folder
from start_llm.config.settings import Settings, SettingSource
from start_llm.core.allocator import limit_malloc_retention
from start_llm.core.errors import SettingsError, StartupError
from start_llm.core.named_paths import expanded
from start_llm.launch.server_info import addresses, servers_of
from start_llm.telemetry.terminal import Terminal

if TYPE_CHECKING:
    from start_llm.app import App
    from start_llm.ranks.leader import Leader

_ABOUT = (
    "A local LLM server on MLX for coding agents. Without a command: a menu. Each command has its own --help."
)
_ABOUT_FLAGS = (
    "In brackets: the setting that a flag stands for, and its default. A flag wins over the environment, and "
    "the environment over the file .env. `start_llm settings` prints all settings."
)
RANK = "MLX_RANK"
"""The variable by which `mlx.launch` tells a process that it is one of several."""
SWITCH_S = 0.001
"""Time that a thread waits for the interpreter's lock before it asks for it.

A step of the engine takes the lock a dozen times, and so does a request on its way. With Python's own 5 ms
and a few threads that prepare large requests, that was a second.
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_UNDONE: Mapping[str, str] = {
    "audit": "look into {folder}",
    "doctor": "examine this machine",
    "cache": "look into the disk tier",
    "models": "list the models",
    "search": "search the hub",
    "pull": "download {repo}",
    "fit": "judge the model",
    "rm": "remove {repo}",
    **command_table.UNDONE,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; 2 if the command cannot start."""
    options = _parser().parse_args(arguments)
    if options.command is None:
        return _menu()
    try:
        return _COMMANDS[options.command](options)
    except StartupError as error:
        what = _UNDONE.get(options.command, "start").format(**vars(options))
        print(f"start_llm cannot {what}.\n{error}", file=sys.stderr)
        return error.status


def _menu() -> int:
    """Open the menu in a terminal; elsewhere print what it would say."""
    try:
        world = MenuWorld(
            settings=settings_table.load(*_outside()),
            run=_run_in_menu,
            compute=compute,
            models=_models_in_menu,
            read=input,
            say=partial(print, flush=True),
        )
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            Menu(world).tell()
            return 0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return Menu(world).open()
    except StartupError as error:
        print(f"start_llm cannot open its menu.\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130


def _run_in_menu(words: Sequence[str]) -> int:
    try:
        return main(words)
    except SystemExit as ended:  # of a command line that the parser does not understand
        return int(ended.code or 0)


def _models_in_menu() -> tuple[Sequence[str], Sequence[ListedOnDisk]]:
    _quiet_tokenizers()
    from start_llm.commands.model_commands import HEAD, rows_and_words  # noqa: PLC0415

    return HEAD, [ListedOnDisk(*row) for row in rows_and_words(settings_table.load(*_outside()))]


def _serve(options: argparse.Namespace) -> int:
    terminal = Terminal()
    if launch := launch_of(options, variables_of(options)):
        return serve_on_hosts(launch, terminal.say, restarts=options.restart)
    return serve(_sources(options), terminal)


def _settings(options: argparse.Namespace) -> int:
    width = shutil.get_terminal_size().columns
    written = {
        "table": lambda: documents.as_table(width),
        "env": documents.as_env_file,
        "markdown": documents.as_markdown,
    }
    sys.stdout.write(written[options.format]())
    return 0


def _about_servers(options: argparse.Namespace) -> int:
    """Run a command of `commands`."""
    return command_table.COMMANDS[options.command](settings_table.load(*_outside()), options)


def _completion(options: argparse.Namespace) -> int:
    sys.stdout.write(completion_script(_parser(), options.shell))
    return 0


def serve(sources: Sequence[SettingSource], terminal: Terminal) -> int:
    """Serve until a signal arrives. A second signal ends the process at once."""
    settings = settings_table.load(*sources)
    for row in settings_table.set_without_effect(*sources):
        terminal.say(f"{row.name} is set, and has no effect. {row.help}")
    _tell_foreign_names(sources, terminal)
    limit_malloc_retention()
    sys.setswitchinterval(SWITCH_S)
    _leave_on_signals()
    if RANK in os.environ:
        return _serve_together(settings, terminal)
    return _run(_app(settings, terminal), terminal)


def _serve_together(settings: Settings, terminal: Terminal) -> int:
    """Serve as one of several ranks, which `mlx.launch` has started."""
    _quiet_tokenizers()
    from start_llm.ranks.rank_processes import serve_together  # noqa: PLC0415

    return serve_together(settings, terminal, lambda own, leader: _run(_app(own, terminal, leader), terminal))


def _run(app: App, terminal: Terminal) -> int:
    """Start the app, and stop it after a signal."""
    try:
        app.start()
        # The loaded objects stay. A full collection that scans them stops every thread for 50 ms (lesson 84).
        gc.freeze()
        _wait_for_a_signal(app.abandon)
        terminal.say("Stopping ...")
        has_stopped = app.close()
        terminal.say("Stopped." if has_stopped else "Stopped while the engine was still computing.")
    finally:
        terminal.close()
    if not has_stopped:
        os._exit(0)
    return 0


def _tell_foreign_names(sources: Sequence[SettingSource], terminal: Terminal) -> None:
    """Tell of names in `.env` that other servers have for a setting."""
    for line in foreign_lines(sources):
        terminal.say(line)


def _app(settings: Settings, terminal: Terminal, leader: Leader | None = None) -> App:
    """Make the app. Its imports take seconds, and only this command needs them."""
    _quiet_tokenizers()
    from start_llm.app import App  # noqa: PLC0415

    return App(settings, terminal, leader)


def _audit(options: argparse.Namespace) -> int:
    """Print the audit's page. Return 1 if an agent would miss something, else 0."""
    _quiet_tokenizers()
    from start_llm.audit.audit_page import audit_folder  # noqa: PLC0415

    page = audit_folder(settings_table.load(*_outside()), expanded(options.folder))
    Terminal().summary(page.rows)
    return 0 if page.is_fine else 1


def _doctor(options: argparse.Namespace) -> int:
    """Examine the machine with a model, and write `doctor.json`. Return 1 if something is wrong, else 0."""
    sources, terminal = _sources(options), Terminal()
    settings = settings_table.load(*sources)
    _refuse_beside_a_server(settings)
    _tell_foreign_names(sources, terminal)
    limit_malloc_retention()
    _quiet_tokenizers()
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler)
    from start_llm.doctor.examination import QUICK, WHOLE  # noqa: PLC0415
    from start_llm.doctor.report import examine_and_report  # noqa: PLC0415

    try:
        return examine_and_report(settings, Path(options.json), terminal, QUICK if options.quick else WHOLE)
    except KeyboardInterrupt:
        print("Interrupted. Nothing was left behind.", file=sys.stderr)
        return 130


def _refuse_beside_a_server(settings: Settings) -> None:
    """Refuse to measure while a server of this user runs.

    Raises:
        StartupError: one runs.
    """
    running = [server.url for server in servers_of(settings)]
    running += [url for url, key in addresses(settings) if answers(url, key)]
    if running:
        raise StartupError(
            f"A server runs at {running[0]}. It and the examination would disturb each other: stop it first."
        )


def _cache(options: argparse.Namespace) -> int:
    """Print what the folder of the disk tier holds, or remove it. Return 1 if a file is damaged, else 0."""
    settings = settings_table.load(*_sources(options))
    folder, terminal = disk_tier_folder(settings.ssd.folder, settings.server.state_root), Terminal()
    if folder is None:
        raise SettingsError("SSD_CACHE_DIR=off: there is no disk tier.")
    try:
        if options.action == "clear":
            terminal.say(f"Removed {clear(folder):,} files from {folder}.")
            return 0
        contents = report(folder, verifies=options.action == "verify")
    except BlockingIOError as error:
        raise SettingsError(f"Process {error} uses {folder}. Stop that server first.") from error
    except OSError as error:
        raise SettingsError(f"SSD_CACHE_DIR={str(folder)!r}: {error.strerror}.") from error
    terminal.summary(
        [
            (kind, f"{count:,} files, {contents.nbytes[kind]:,} bytes")
            for kind, count in sorted(contents.files.items())
        ]
    )
    if not contents.files:
        terminal.say(f"{folder} holds no files of the disk tier.")
    for path, reason in sorted(contents.unusable.items()):
        terminal.say(f"{path.relative_to(folder)}: {reason}")
    if options.action == "verify":
        terminal.say(
            f"Damaged files: {len(contents.unusable):,}. The server removes each one when it meets it."
        )
    return 1 if contents.unusable else 0


def _quiet_tokenizers() -> None:
    """Silence transformers' warning about missing PyTorch, which nothing here needs.

    Must run before transformers is imported.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _about_models(options: argparse.Namespace) -> int:
    """Run a command of `model_commands`, whose imports take seconds."""
    _quiet_tokenizers()
    from start_llm.commands.model_commands import COMMANDS  # noqa: PLC0415

    return COMMANDS[options.command](settings_table.load(*_sources(options)), options, sys.stdout)


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "serve": _serve,
    "audit": _audit,
    "doctor": _doctor,
    "cache": _cache,
    "settings": _settings,
    "completion": _completion,
    **dict.fromkeys(command_table.COMMANDS, _about_servers),
    **dict.fromkeys(("models", "search", "pull", "fit", "rm"), _about_models),
}


def _leave_on_signals() -> None:
    """Exit at once on a signal, until the server is ready. An exception would wait for download threads."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        with suppress(OSError):
            # No print: the signal may have interrupted one.
            os.write(sys.stdout.fileno(), b"Interrupted before the server was ready.\n")
        os._exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, on_signal)


def _wait_for_a_signal(abandon: Callable[[], None]) -> None:
    """Return after the first signal. A second signal ends the process at once, with status 130.

    This uses a pipe, because a handler can interrupt another handler that holds the lock of a
    `threading.Event` (lesson 6). The interpreter writes into the pipe in whichever thread receives the signal
    (lesson 9).

    Args:
        abandon: ends what would outlive the process, without waiting.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    asked = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            try:
                abandon()
            finally:
                os._exit(130)
        asked = True

    signal.set_wakeup_fd(writer)
    for number in _SIGNALS:
        signal.signal(number, on_signal)
    os.read(reader, 1)


def _sources(options: argparse.Namespace) -> list[SettingSource]:
    return [SettingSource("command line", variables_of(options)), *_outside()]


def _outside() -> list[SettingSource]:
    in_file = read_env_file(ENV_FILE, [row.name for row in settings_table.all_rows()])
    return [SettingSource("environment", os.environ), SettingSource(settings_table.ENV_SOURCE, in_file)]


def _parser() -> argparse.ArgumentParser:
    parser = SuggestingParser(prog="start_llm", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"start_llm {__version__}")
    commands = parser.add_subparsers(dest="command")
    server = commands.add_parser(
        "serve",
        help="serve a model",
        usage="%(prog)s [options]",
        epilog=_ABOUT_FLAGS,
        allow_abbrev=False,
    )
    add_flags(server)
    add_rank_flags(server)
    audited = commands.add_parser(
        "audit", help="what to expect of a model, without its weights", allow_abbrev=False
    )
    audited.add_argument("folder", metavar="FOLDER", help="with config, tokenizer and chat template")
    add_doctor(commands)
    cache = commands.add_parser("cache", help="look into the disk tier, or empty it", allow_abbrev=False)
    cache.add_argument("action", choices=("status", "verify", "clear"))
    add_flags(cache, "--ssd-cache-dir")
    add_model_commands(commands)
    command_table.add_commands(commands)
    completion = commands.add_parser(
        "completion", help="print the completions of a shell", allow_abbrev=False
    )
    completion.add_argument("shell", choices=SHELLS)
    table = commands.add_parser("settings", help="print every setting with default and meaning")
    table.add_argument("--format", choices=("table", "env", "markdown"), default="table")
    return parser
