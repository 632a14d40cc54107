"""Time from a fresh clone to a served demo, and the same after installations that were interrupted.

    python benchmarks/install.py [--interruptions 5] [--seed N]
    python benchmarks/install.py --package
    python benchmarks/install.py --beside 53e9ee4 [--rounds 3]

Copies what git tracks into a folder of its own, whose installer sees no Python 3.12 and no uv on PATH and has
empty caches of pip and uv. It installs and serves the demo model there until both ports answer. Then, in
another copy, it is ended by Ctrl-C at random moments of the installation, each start going on with what the
one before has left, and is started once more. What must not be is printed, and the status is then 1.

With `--package` it installs the copy as a package instead (`uv tool install`, with empty caches and a home of
its own), and serves the demo model until both ports answer.

With `--beside` it times a clone of HEAD and one of this commit, in turns: seconds from the command to the
first reply on the server's port and until the proxy replies too, and how many lines were printed. All need a
package index.
"""

from __future__ import annotations

import argparse
import http.client
import io
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above

PATIENCE_S = 600
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


class Served(NamedTuple):
    """A start: seconds until the server replied, until the proxy replied too, and the lines printed."""

    reply_s: float
    proxy_s: float
    lines: list[str]


class Copy:
    """A fresh clone, with caches of its own.

    Args:
        commit: what it has; None: what git tracks, as it is now.
    """

    def __init__(self, folder: Path, commit: str | None = None) -> None:
        self.root = folder / "clone"
        if commit is None:
            self._copy_tracked()
        else:
            archive = tarfile.open(fileobj=io.BytesIO(git("archive", commit)))  # noqa: SIM115 - in memory
            archive.extractall(self.root, filter="data")
        (self.root / ".env").unlink(missing_ok=True)
        self.port, self.proxy_port = servers.free_port(), servers.free_port()
        caches = {"UV_CACHE_DIR": str(folder / "uv"), "PIP_CACHE_DIR": str(folder / "pip")}
        self.environment = {**os.environ, "PATH": "/usr/bin:/bin", **caches}
        self.command = [shutil.which("python3") or sys.executable, "install_and_run.py"]

    def _copy_tracked(self) -> None:
        for name in filter(None, git("ls-files", "-z").decode().split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def start(self) -> subprocess.Popen[str]:
        """The one command, with the Python of the system."""
        ports = ["--mlx-port", str(self.port), "--proxy-port", str(self.proxy_port)]
        return subprocess.Popen(
            [*self.command, "--demo", *ports],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def serve(self) -> Served:
        """Start, have both ports reply, and end it."""
        began, process = time.perf_counter(), self.start()
        took: list[float] = []
        try:
            for port in (self.port, self.proxy_port):
                self._wait_for(port, process)
                servers.ask(port, "/v1/chat/completions", HELLO)["choices"]
                took.append(time.perf_counter() - began)
        finally:
            end(process)
        reply_s, proxy_s = took
        return Served(reply_s, proxy_s, process.communicate()[0].splitlines())

    def _wait_for(self, port: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"It ended with {process.returncode}:\n{process.communicate()[0]}")
            try:
                servers.ask(port, "/v1/models")
            except (OSError, http.client.HTTPException, ValueError):
                time.sleep(0.1)
            else:
                return
        raise SystemExit(f"Nothing answers on port {port}.")

    def interrupt(self, after_s: float) -> tuple[int, str]:
        """Start, and press Ctrl-C. Returns the status, and what was printed."""
        process = self.start()
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        printed = process.communicate(timeout=60)[0]
        return process.returncode, printed


class Package(Copy):
    """A fresh clone that is installed as a package."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tools, self.home = folder / "tools", folder / "home"
        self.home.mkdir()
        places = {"UV_TOOL_DIR": self.tools, "UV_TOOL_BIN_DIR": folder / "bin", "HOME": self.home}
        self.environment |= {name: str(place) for name, place in places.items()}
        self.command = [str(folder / "bin" / "start_llm"), "serve"]

    def install(self) -> float:
        """Return the seconds that it takes."""
        uv, began = shutil.which("uv") or ROOT / ".venv" / "bin" / "uv", time.perf_counter()
        python = ["--python", str(Path(sys.executable).resolve())]
        subprocess.run(
            [uv, "tool", "install", ".", *python, "--constraints", "constraints.txt"],
            cwd=self.root,
            env=self.environment,
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - began

    @property
    def megabytes(self) -> float:
        return sum(path.lstat().st_size for path in self.tools.rglob("*")) / 1e6


def measure_package() -> None:
    """Print how long the installation as a package takes, and the start after it."""
    with tempfile.TemporaryDirectory() as folder:
        package = Package(Path(folder))
        install_s = package.install()
        first_s, second_s = (package.serve().proxy_s for _ in range(2))
        print(f"uv tool install: {install_s:.1f} s, {package.megabytes:,.0f} MB")
    print(f"from there to both ports: {first_s:.1f} s; the second start: {second_s:.1f} s")


def git(*words: str) -> bytes:
    """Return what git prints here."""
    return subprocess.run(
        [shutil.which("git") or "git", *words], cwd=ROOT, capture_output=True, check=True
    ).stdout


def measure_beside(commit: str, rounds: int) -> None:
    """Print the first start of clones of HEAD and of another commit, which take turns at going first."""
    commits = {name: git("rev-parse", "--short", name).decode().strip() for name in ("HEAD", commit)}
    starts: dict[str, list[Served]] = {name: [] for name in commits.values()}
    for number in range(rounds):
        for name in [*starts] if number % 2 == 0 else reversed([*starts]):
            with tempfile.TemporaryDirectory() as folder:
                served = Copy(Path(folder), name).serve()
            starts[name].append(served)
            print(f"{name}: {told(served.reply_s, served.proxy_s, len(served.lines))}", flush=True)
    for name, measured in starts.items():
        medians = (
            statistics.median(column)
            for column in zip(*((one.reply_s, one.proxy_s, len(one.lines)) for one in measured), strict=True)
        )
        print(f"{name}, median of {rounds}: {told(*medians)}")


def told(reply_s: float, proxy_s: float, lines: float) -> str:
    return f"first reply after {reply_s:.1f} s, through the proxy after {proxy_s:.1f} s, {lines:.0f} lines"


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interruptions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", action="store_true", help="install a package instead")
    parser.add_argument("--beside", metavar="COMMIT", help="HEAD and this commit in turns instead")
    parser.add_argument("--rounds", type=int, default=3, help="of --beside")
    wanted = parser.parse_args()
    print(servers.machine("mlx", "mlx-lm"))
    if wanted.package:
        measure_package()
        return 0
    if wanted.beside:
        measure_beside(wanted.beside, wanted.rounds)
        return 0
    return measure_clone(random.Random(wanted.seed), wanted.interruptions)


def measure_clone(rng: random.Random, interruptions: int) -> int:
    """Print how long a fresh clone takes, also after interruptions. Return 1 if something was wrong."""
    problems = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        _, first_s, lines = copy.serve()
        print("\n".join(lines[:5]))
        second_s = copy.serve().proxy_s
    print(f"from a fresh clone to both ports: {first_s:.1f} s; the second start: {second_s:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for _ in range(interruptions):
            after_s = rng.uniform(0.3, 0.4 * first_s)  # the rest is the start of server and proxy
            status, printed = copy.interrupt(after_s)
            print(f"Ctrl-C after {after_s:.1f} s: status {status}")
            if status not in (0, 130) or "Traceback" in printed:
                problems.append(f"status {status} after {after_s:.1f} s:\n{printed}")
        last_s = copy.serve().proxy_s
    print(f"from there to both ports: {last_s:.1f} s")
    print("\n".join(problems) or "Nothing is wrong.")
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
