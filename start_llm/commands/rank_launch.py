"""`start_llm serve --hosts a,b`: write the file of hosts, and let `mlx.launch` start a rank on each."""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from start_llm.config.paths import IS_CHECKOUT, ROOT
from start_llm.core.errors import SettingsError
from start_llm.core.named_paths import expanded

BACKENDS = ("ring", "jaccl", "jaccl-ring", "nccl")
_RDMA = ("jaccl", "jaccl-ring")
_HERE = "127.0.0.1"
"""What `mlx.launch` starts without ssh."""
_FIRST_PORT = 32323
_CANNOT_START, _FAILED = 2, 75
_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between an end and the next start."""
_LAST_S = 20.0
"""Seconds that the other ranks have to end when one has failed."""
_STEADY_S = 120.0
"""Seconds after which a service counts as one that works: the pauses begin anew."""
_EXITED = re.compile(r"Node with rank \d+ exited with code (-?\d+)")
"""What `mlx.launch` says of a rank. Its own status is always 0."""


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags with which one model is served by several machines."""
    parser.add_argument(
        "--hosts",
        metavar="A,B",
        help="serve one model on several machines, this one first: names or addresses with commas between, "
        "or a file that mlx.distributed_config has written (docs/scale.md)",
    )
    parser.add_argument("--backend", choices=BACKENDS, help="what connects --hosts; ring if it is not given")
    parser.add_argument("--restart", action="store_true", help="start --hosts again when one of them is gone")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLaunch:
    """A launch of several ranks.

    Attributes:
        hosts: for `mlx.launch`: of each the name for ssh and the addresses.
        backend: how the ranks are connected.
        variables: settings that flags have set.
    """

    hosts: Sequence[Mapping[str, Any]]
    backend: str
    variables: Mapping[str, str]

    def words(self, hostfile: Path) -> list[str]:
        """Return the command.

        Args:
            hostfile: has `hosts` in it.
        """
        words = [str(Path(sys.executable).with_name("mlx.launch")), "--hostfile", str(hostfile)]
        words += ["--backend", self.backend]
        if self.backend in _RDMA:
            words += [
                "--env",
                "MLX_METAL_FAST_SYNCH=1",
            ]  # as MLX advises: the links are faster than a kernel's end
        if IS_CHECKOUT:
            words += ["--cwd", str(ROOT)]
        if all(host["ssh"] == _HERE for host in self.hosts):
            words += ["--starting-port", str(_free_ports(len(self.hosts)))]
        for name, value in self.variables.items():
            words += ["--env", f"{name}={value}"]
        return [*words, "--", sys.executable, "-m", "start_llm", "serve"]


def launch_of(options: argparse.Namespace, variables: Mapping[str, str]) -> RankLaunch | None:
    """Return the launch that a command line asks for; None if this machine serves alone.

    Args:
        variables: settings that flags have set.

    Raises:
        SettingsError: the hosts cannot serve, or there are flags for hosts and no hosts.
    """
    if options.hosts is not None:
        backend = options.backend or BACKENDS[0]
        return RankLaunch(hosts=hosts_of(options.hosts), backend=backend, variables=variables)
    if options.backend or options.restart:
        raise SettingsError("--backend and --restart are for --hosts.")
    return None


def hosts_of(text: str) -> list[dict[str, Any]]:
    """Return the hosts of `--hosts`: names or addresses with commas between, or a file of hosts.

    Raises:
        SettingsError: there are fewer than two, one has no address, or the first is not this machine.
    """
    path = expanded(text)
    hosts = _hosts_in(path) if path.is_file() else [_host(name) for name in text.split(",")]
    if len(hosts) < 2:
        raise SettingsError(f"--hosts {text}: name two machines or more, this one first.")
    if not _is_here(hosts[0]):
        raise SettingsError(f"--hosts {text}: the first machine serves, so it has to be this one.")
    return [{**hosts[0], "ssh": _HERE}, *hosts[1:]]


def _hosts_in(path: Path) -> list[dict[str, Any]]:
    """Return the hosts of a file such as mlx.distributed_config writes."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        hosts = content["hosts"] if isinstance(content, dict) else content
        return [{**host, "ssh": str(host["ssh"]), "ips": list(host["ips"])} for host in hosts]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"--hosts {path}: this is no file of hosts ({error}).") from error


def _host(name: str) -> dict[str, Any]:
    name = name.strip()
    try:
        return {"ssh": name, "ips": [str(ipaddress.ip_address(name))]}
    except ValueError:
        pass
    try:
        return {"ssh": name, "ips": [socket.gethostbyname(name)]}
    except OSError as error:
        raise SettingsError(f"--hosts: {name!r} has no address: {error}.") from error


def _is_here(host: Mapping[str, Any]) -> bool:
    """Return whether an address of a host is one of this machine's: whether one can listen there."""
    for address in host["ips"]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind((address, 0))
            return True
    return False


def _free_ports(count: int) -> int:
    """Return the first of so many free ports in a row, for ranks that are all on this machine."""
    for first in range(_FIRST_PORT, 2**16 - count, count):
        if all(_is_free(first + place) for place in range(count)):
            return first
    raise SettingsError(f"There are no {count} free ports in a row.")


def _is_free(port: int) -> bool:
    with suppress(OSError), socket.socket() as tried:
        tried.bind((_HERE, port))
        return True
    return False


def serve_on_hosts(launch: RankLaunch, say: Callable[[str], None], *, restarts: bool) -> int:
    """Serve one model on several machines until a signal arrives, and return the exit status.

    Args:
        restarts: start it again when it has failed.
    """
    return _Supervisor(launch, say).run(restarts=restarts)


class _Supervisor:
    """Runs `mlx.launch`, again and again if that is wanted, and asks its ranks to stop on a signal."""

    def __init__(self, launch: RankLaunch, say: Callable[[str], None]) -> None:
        self._launch = launch
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()

    def run(self, *, restarts: bool) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        failures = 0
        while True:
            began = time.monotonic()
            status = self._run_once()
            if self._is_stopping.is_set() or not restarts or status in (0, _CANNOT_START):
                return status
            failures = 0 if time.monotonic() - began > _STEADY_S else failures + 1
            pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
            self._say(f"The service has failed. It starts again in {pause_s:g} s.")
            if self._is_stopping.wait(pause_s):
                return status

    def _run_once(self) -> int:
        """Return 0 if all ranks have ended well, 2 if one could not start, and else 75: also where
        `mlx.launch` has ended without telling what became of them.
        """
        try:
            # A new one each time: the system removes temporary folders that nobody has used for days.
            folder = tempfile.TemporaryDirectory(prefix="start_llm-", ignore_cleanup_errors=True)
            self._process = process = self._started(Path(folder.name) / "hosts.json")
        except OSError as error:
            self._say(f"The service cannot be started: {error}.")
            return _FAILED
        with folder:
            return self._status_of(process)

    def _started(self, hostfile: Path) -> subprocess.Popen[bytes]:
        hostfile.write_text(json.dumps(self._launch.hosts), encoding="utf-8")
        # A group of its own: Ctrl-C in a terminal is for this process, which passes it on to rank 0 alone.
        return subprocess.Popen(
            self._launch.words(hostfile),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _status_of(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a launch, and return the status that it makes."""
        if self._is_stopping.is_set():
            self._ask_to_stop()
        statuses: list[int] = []
        for line in process.stderr or ():
            text = line.decode(errors="replace")
            sys.stderr.write(text)
            if (ended := _EXITED.findall(text)) and not statuses:
                self._kill_later(process)
            statuses += map(int, ended)
        if process.wait() and not statuses:
            return _FAILED
        if not statuses:
            return 0
        return _CANNOT_START if _CANNOT_START in statuses else _FAILED

    def _kill_later(self, process: subprocess.Popen[bytes]) -> None:
        """Kill what is left of a launch of which a rank has failed: one that is stuck would never end."""

        def kill() -> None:
            if process.poll() is None:
                self._say(f"A rank has not ended {_LAST_S:g} s after another one. It is killed.")
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(_LAST_S, kill)
        timer.daemon = True
        timer.start()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_stopping.set()
        self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        """Write a line: `mlx.launch` passes it on, and rank 0 takes it for a signal."""
        if self._process and self._process.stdin:
            with suppress(OSError):
                self._process.stdin.write(b"stop\n")
                self._process.stdin.flush()
