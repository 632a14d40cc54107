"""Measure what the proxy adds: time to the first token, time for each chunk, and the price of long bodies.

    python benchmarks/proxy.py [--rounds N]

Starts the real server with its proxy on the demo model and sends the same requests to both ports in turn. The
figures are medians of the rounds; the model answers at once, so what is seen is the proxy.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from start_llm.core.openblas import run_with_openblas  # noqa: E402

REPLY_TOKENS = 48


class Timing(NamedTuple):
    """Milliseconds: until the first text, between two events, until the end."""

    first: float
    event: float
    total: float


@contextmanager
def server() -> Generator[dict[str, int]]:
    """The server and its proxy; ports by name."""
    ports = {"server": servers.free_port(), "proxy": servers.free_port()}
    options = ["--demo", "--mlx-port", str(ports["server"]), "--proxy-port", str(ports["proxy"])]
    probes = [partial(ask, port, padding=0, stream=False) for port in ports.values()]
    with servers.running(servers.start_llm(*options), *probes, patience_s=120):
        yield ports


def ask(port: int, *, padding: int, stream: bool) -> Timing:
    """One chat. `padding` bytes go into a field that the server ignores: only the body grows."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": REPLY_TOKENS,
        "stream": stream,
        "ballast": "x" * padding,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise OSError(reply.status)
    moments = [time.perf_counter() for line in reply if line.startswith((b"data: {", b"{"))]
    connection.close()
    gaps = (moments[-1] - moments[0]) / max(1, len(moments) - 1)
    return Timing(1000 * (moments[0] - began), 1000 * gaps, 1000 * (moments[-1] - began))


def row(name: str, direct: list[float], proxied: list[float]) -> str:
    bare, through = statistics.median(direct), statistics.median(proxied)
    return f"| {name} | {bare:.2f} ms | {through:.2f} ms | {through - bare:+.2f} ms | x{through / bare:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print(f"{servers.machine('litellm')}; medians of {rounds} rounds\n")
    with server() as ports:
        print("| | server | through the proxy | added | ratio |\n|---|---|---|---|---|")
        cases = [("small body", 0), ("100 KB body", 100_000), ("1 MB body", 1_000_000)]
        for name, padding in cases:
            for stream in (True, False):
                pairs = [
                    (
                        ask(ports["server"], padding=padding, stream=stream),
                        ask(ports["proxy"], padding=padding, stream=stream),
                    )
                    for _ in range(rounds)
                ]
                direct, proxied = zip(*pairs, strict=True)
                if stream:
                    print(row(f"{name}: first event", [t.first for t in direct], [t.first for t in proxied]))
                    print(row(f"{name}: each event", [t.event for t in direct], [t.event for t in proxied]))
                else:
                    print(row(f"{name}: whole reply", [t.total for t in direct], [t.total for t in proxied]))


if __name__ == "__main__":
    run_with_openblas()
    main()
