"""`start_llm upgrade`: bring a checkout up to date with what it requires, or leave it as it was.

A package is upgraded by the tool that installed it, from where it came.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import unquote, urlsplit

from start_llm.core.errors import CommandError

_WHAT_IS_INSTALLED = (
    "requirements.txt",
    "requirements-dev.txt",
    "constraints.txt",
    "hashes.txt",
    "install_and_run.py",
)
_WHAT_PAGES_DEPEND_ON = ("requirements.txt", "constraints.txt")
_OLDER_PAGES = (
    "What the prompt cache keeps on the disk may be of use to the older version only. If so, the server says "
    "it at its next start, and those pages go first when there is need for room."
)
_MOST_FILES = 10
_MOST_LINES = 10
_END_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

type Say = Callable[[str], None]


class _Interrupted(Exception):
    """The user has ended the upgrade."""


class Checkout:
    """A checkout of the repository, with its environment.

    Args:
        root: the repository's folder.
        say: prints a line.
    """

    def __init__(self, root: Path, say: Say) -> None:
        self._root = root
        self._say = say
        self._environment = (root / ".venv").resolve()
        self._backup = self._environment.with_name(f"{self._environment.name}.before-upgrade")
        self._part = self._environment.with_name(f"{self._environment.name}.part")

    def upgrade(self) -> None:
        """Fast-forward to the newest commit, and install what it requires.

        Raises:
            CommandError: the checkout cannot be forwarded, or something failed. Then everything is as it was.
        """
        self._refuse_changes()
        old, new = self._git("rev-parse", "HEAD"), self._newest()
        if old == new:
            self._say(f"{self._version()} is the newest.")
            return
        before = self._version()
        with _signals_held():
            try:
                after = self._forward(old, new)
            except (CommandError, _Interrupted, OSError) as error:
                self._restore(old)
                why = "Interrupted." if isinstance(error, _Interrupted) else f"{error}"
                raise CommandError(f"{why}\nEverything is as it was before ({old[:9]}).") from None
            self._discard_backup()
        self._say(f"{before} ({old[:9]}) is now {after} ({new[:9]}).")
        if self._git("diff", "--name-only", old, new, "--", *_WHAT_PAGES_DEPEND_ON):
            self._say(_OLDER_PAGES)

    def _forward(self, old: str, new: str) -> str:
        """Forward from one commit to another, and return the version after it."""
        self._discard_backup()
        if self._git("diff", "--name-only", old, new, "--", *_WHAT_IS_INSTALLED):
            self._back_up()
        self._git("merge", "--ff-only", "--quiet", new)
        self._install()
        return self._version()

    def _refuse_changes(self) -> None:
        if shutil.which("git") is None:
            raise CommandError("git is not on PATH, and an upgrade of a checkout needs it.")
        if not (self._root / ".git").exists():
            raise CommandError(f"{self._root} is no checkout of git. Download it anew, or clone it with git.")
        changed = self._git("status", "--porcelain", "--untracked-files=no").splitlines()
        if changed:
            names = "".join(f"\n  {line[3:]}" for line in changed[:_MOST_FILES])
            raise CommandError(
                f"{self._root} has changed files. Commit them, or put them aside with git stash:{names}"
            )

    def _newest(self) -> str:
        """Fetch, and return the newest commit.

        Raises:
            CommandError: the branch follows none, cannot be fetched, or has commits of its own.
        """
        branch = self._git("rev-parse", "--abbrev-ref", "HEAD")
        try:
            upstream = self._git("rev-parse", "--abbrev-ref", "--symbolic-full-name", "@{upstream}")
        except CommandError:
            raise CommandError(
                f"The branch {branch} follows no other one, so there is nothing to upgrade to. "
                "Choose one that does: git switch BRANCH"
            ) from None
        self._git("fetch", "--quiet")
        old, new = self._git("rev-parse", "HEAD", upstream).split()
        if self._git("merge-base", old, new) != old:
            raise CommandError(f"The branch {branch} has commits that {upstream} lacks. Rebase or merge it.")
        return new

    def _install(self) -> None:
        parts = ["--dev"] if (self._environment / ".installed-dev").exists() else []
        self._run("install_and_run.py", "--setup-only", *parts)

    def _version(self) -> str:
        """Return what the checkout says that it is. This also shows that it runs."""
        return self._run("-m", "start_llm", "--version").strip()

    def _back_up(self) -> None:
        self._say("Keeping a copy of the environment ...")
        shutil.copytree(self._environment, self._part, symlinks=True, copy_function=self._keep)
        self._part.rename(self._backup)

    def _keep(self, source: str, target: str) -> None:
        """Keep a file as a second link to it: installers replace files, and do not write into them.

        The installer of this checkout does, into the files at the top.
        """
        if Path(source).parent != self._environment:
            with suppress(OSError):
                os.link(source, target)
                return
        shutil.copy2(source, target)

    def _restore(self, old: str) -> None:
        if self._backup.exists():
            self._environment.rename(self._part)
            self._backup.rename(self._environment)
        self._git("reset", "--quiet", "--keep", old)
        self._discard_backup()

    def _discard_backup(self) -> None:
        """Remove the copy, also one that a killed upgrade has left."""
        for folder in (self._backup, self._part):
            shutil.rmtree(folder, ignore_errors=True)

    def _git(self, *words: str) -> str:
        return _git_output(["git", "-C", str(self._root), *words]).rstrip()

    def _run(self, *words: str) -> str:
        return _program_output([str(self._root / ".venv" / "bin" / "python"), *words], self._root)


@contextmanager
def _signals_held() -> Generator[None]:
    """Hold signals back, but for where they are heard. There the first one is an exception."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        raise _Interrupted

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # this drops one that was held back
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_heard() -> Generator[None]:
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _git_output(command: list[str]) -> str:
    """Return what git prints. It is not interrupted while signals are held.

    Raises:
        CommandError: it failed.
    """
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return _checked(command, done.returncode, done.stdout, done.stderr)


def _program_output(command: list[str], folder: Path) -> str:
    """Return what a program prints. If a signal interrupts it, nothing that it has started is left.

    Raises:
        CommandError: it failed, or cannot be run.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandError(f"{command[0]} cannot be run: {error.strerror}.") from None
    try:
        with _signals_heard():
            printed, complaint = process.communicate()
    except _Interrupted:
        _end_group(process)
        raise
    return _checked(command, process.returncode, printed, complaint)


def _checked(command: list[str], status: int, printed: str, complaint: str) -> str:
    if status != 0:
        message = "\n".join((complaint or printed).strip().splitlines()[-_MOST_LINES:])
        raise CommandError(f"`{' '.join(command)}` failed with status {status}:\n{message}")
    return printed


def _end_group(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _END_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.02)


def origin_of_package() -> Mapping[str, Any]:
    """Return where the package came from, as pip and uv record it; empty for an index."""
    return json.loads(distribution("start_llm").read_text("direct_url.json") or "{}")


def lines_for(origin: Mapping[str, Any], prefix: Path, python: str) -> list[str]:
    """Return the commands for a package that came from `origin`, or a sentence if there are none.

    Args:
        prefix: the folder of the environment.
        python: its interpreter.
    """
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        folder = Path(unquote(urlsplit(url).path))
        pull = [f"git -C {shlex.quote(str(folder))} pull --ff-only"] if (folder / ".git").exists() else []
        constraints = folder / "constraints.txt"
        held = str(constraints) if constraints.exists() else None
        return [*pull, _install(str(folder), held, prefix, python)]
    if vcs := origin.get("vcs_info"):
        return [_install(f"{vcs['vcs']}+{url}", None, prefix, python)]
    return [f"It came from {url or 'a package index'}: install a newer one from there, as you did before."]


def _install(source: str, constraints: str | None, prefix: Path, python: str) -> str:
    if (prefix / "uv-receipt.toml").exists():
        held = ["--constraints", constraints] if constraints else []
        return shlex.join(["uv", "tool", "install", "--force", "--python", "3.12", source, *held])
    if (prefix / "pipx_metadata.json").exists():
        held = ["--pip-args", f"--constraint {shlex.quote(constraints)}"] if constraints else []
        return shlex.join(["pipx", "install", "--force", "--python", "python3.12", source, *held])
    held = ["--constraint", constraints] if constraints else []
    return shlex.join([python, "-m", "pip", "install", "--upgrade", source, *held])
