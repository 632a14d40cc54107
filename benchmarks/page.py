"""Measure what open status pages cost the server: CPU of ten tabs that ask `/activity`.

    python benchmarks/page.py [--tabs 10] [--seconds 30]

Starts the server with a tiny random model in a process of its own, fills its records up to their limits, and
plays tabs that each keep a connection open, as browsers do. A visible tab asks every two seconds while a
request runs and every five seconds otherwise, and says which records it knows. *all records* is for
comparison: a program that does not say it. The CPU time of the whole process without any tab is subtracted.
The exit status is 1 if the tabs that ask every two seconds take 1 % of a core.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402

MOST_SHARE = 0.01
CONVERSATIONS, TURNS = 20, 24
BROWSER = {
    "User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/150.0.0.0",
    "Accept": "*/*",
    "Accept-Language": "en-US,en;q=0.9",
    "Accept-Encoding": "gzip, deflate, br, zstd",
    "Cache-Control": "no-cache",
    "Pragma": "no-cache",
    "Referer": "http://127.0.0.1/",
    "Sec-Fetch-Dest": "empty",
    "Sec-Fetch-Mode": "cors",
    "Sec-Fetch-Site": "same-origin",
}


def fill(port: int) -> None:
    """Fill the records: conversations, requests, refusals."""
    for turn in range(TURNS):
        for number in range(CONVERSATIONS):
            messages = [{"role": "user", "content": f"question {one} of {number}"} for one in range(turn + 1)]
            body = {"messages": messages, "max_tokens": 1, "session_id": f"conversation-{number}"}
            servers.ask(port, "/v1/chat/completions", body)
    for number in range(50):
        servers.ask(port, f"/nothing/{number}")


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used so far. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Tab:
    """An open page, which asks every so many seconds until `done`."""

    def __init__(self, port: int, interval_s: float, *, knows_records: bool, done: threading.Event) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._interval_s = interval_s
        self._knows_records = knows_records
        self._done = done
        self._version = ""
        self.seconds: list[float] = []
        self.nbytes = 0

    def run(self) -> None:
        while not self._done.wait(self._interval_s):
            began = time.perf_counter()
            self._connection.request("GET", f"/activity?since={self._version}", headers=BROWSER)
            body = self._connection.getresponse().read()
            self.seconds.append(time.perf_counter() - began)
            self.nbytes = len(body)
            if self._knows_records:
                self._version = json.loads(body)["version"]
        self._connection.close()


def share(port: int, pid: int, tabs: list[Tab], seconds: float, done: threading.Event) -> float:
    """Return the share of a core that the server uses while these tabs are open."""
    threads = [threading.Thread(target=tab.run) for tab in tabs]
    for number, thread in enumerate(threads):
        thread.start()
        time.sleep(0.1 * (number < len(threads)))
    servers.ask(port, "/health")
    began, before = time.perf_counter(), cpu_s(pid)
    time.sleep(seconds)
    used, passed = cpu_s(pid) - before, time.perf_counter() - began
    done.set()
    for thread in threads:
        thread.join()
    return used / passed


def measure(port: int, pid: int, options: argparse.Namespace) -> float:
    """Print a table, and return the share of tabs that ask every two seconds."""
    alone = share(port, pid, [], options.seconds, threading.Event())
    print("\n| tabs | ask every | for | CPU of a core | answer, median | bytes |\n|---|---|---|---|---|---|")
    shares: list[float] = []
    for interval_s, knows_records in ((5.0, True), (2.0, True), (2.0, False)):
        done = threading.Event()
        tabs = [Tab(port, interval_s, knows_records=knows_records, done=done) for _ in range(options.tabs)]
        used = share(port, pid, tabs, options.seconds, done) - alone
        median_ms = 1000 * statistics.median(one for tab in tabs for one in tab.seconds)
        records = "newer ones" if knows_records else "all records"
        print(
            f"| {options.tabs} | {interval_s:g} s | {records} | {used:.2%} | {median_ms:.2f} ms "
            f"| {tabs[0].nbytes:,} |"
        )
        shares.append(used)
    print(f"\nWithout a tab: {alone:.2%} of a core.")
    return shares[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tabs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    print(servers.machine("mlx", "mlx-lm"))
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.build("qwen3", Path(folder) / "model")
        port = servers.free_port()
        command = servers.start_llm("--no-proxy", "--model", str(model), "--mlx-port", str(port))
        with servers.running(command, lambda: servers.health_seconds(port)) as pid:
            fill(port)
            used = measure(port, pid, options)
    return 0 if used < MOST_SHARE else 1


if __name__ == "__main__":
    run_with_openblas()
    sys.exit(main())
