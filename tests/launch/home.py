"""A place to launch clients from, and servers that say what a test wants. Shared by tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from start_llm.config.settings import all_rows

ROOT = Path(__file__).resolve().parents[2]

# Writes down what it was given, then does what its first argument says.
FAKE = f"""#!{sys.executable}
import json, os, signal, sys, time
folder = os.environ["FAKE_FOLDER"]
received = {{
    "environment": dict(os.environ),
    "arguments": sys.argv[1:],
    "cwd": os.getcwd(),
    "pid": os.getpid(),
    "files": {{
        os.path.join(where, name): open(os.path.join(where, name)).read()
        for where, _, names in os.walk(folder) for name in names
    }},
}}
with open(os.environ["FAKE_RECEIVED"] + ".part", "w") as file:
    json.dump(received, file)
os.rename(os.environ["FAKE_RECEIVED"] + ".part", os.environ["FAKE_RECEIVED"])
if sys.argv[1:2] == ["exit"]:
    sys.exit(int(sys.argv[2]))
if sys.argv[1:2] == ["catch"]:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(100 + number))
if sys.argv[1:2] in (["wait"], ["catch"]):
    print("waiting", flush=True)
    time.sleep(60)
if sys.argv[1:2] == ["echo"]:
    sys.stdout.write(sys.stdin.read())
"""


class ClientStart(NamedTuple):
    """The arguments and environment of the fake client."""

    environment: dict[str, str]
    arguments: list[str]
    cwd: str
    pid: int
    files: dict[str, str]


class Home(NamedTuple):
    """A place to launch from: programs, state, and where the fake client tells."""

    folder: Path

    @property
    def programs(self) -> Path:
        return self.folder / "bin"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def environment(self, name: str, **more: str) -> dict[str, str]:
        ours = {row.name for row in all_rows()}
        inherited = {key: value for key, value in os.environ.items() if key not in ours | {"LD_PRELOAD"}}
        return inherited | {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "STATE_ROOT": str(self.state),
            "FAKE_FOLDER": str(self.state / "clients" / name),
            "FAKE_RECEIVED": str(self.folder / "received.json"),
            **more,
        }

    def client_start(self) -> ClientStart:
        path = self.folder / "received.json"
        client_start = ClientStart(**json.loads(path.read_text()))
        path.unlink()
        return client_start

    def run(self, *words: str, name: str = "pi", **more: Any) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"env": self.environment(name), "cwd": ROOT} | more
        command = [sys.executable, "-m", "start_llm", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


@contextmanager
def answering(*replies: bytes) -> Generator[str]:
    """A server that says this, one reply to each connection; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(65536)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(20)


def page(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
