"""Many streams over HTTP, beside mlx_lm.server: speed, warm time to the first token, CPU time per token.

    python benchmarks/streams.py [--streams 1 8 32] [--temperatures 0 0.7] [--rounds N] [--tokens N]

Both servers run in processes of their own on the same tiny random model, so what is compared is what a token
costs beside the network. Rounds alternate; the figures are medians of the rounds' ratios. The client is one
thread that empties all sockets every few milliseconds, so it takes next to nothing of the machine. Tokens are
those of `usage`. CPU time is that of the server's whole process, which varies far less than the clock; where
there is no /proc it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import selectors
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402

LOOKS_S = 0.004
"""Between two looks at the sockets: a hundredth of the shortest run."""
PATIENCE_S = 120
PREFIX_WORDS = 400
MARKS = {"ttft": 1.0, "alone": 1.1, "many": 1.0}
"""Ours ÷ theirs: warm time to the first token at most; tokens per second of one stream, of many, at least."""
SAMPLING = {"top_p": 0.95, "top_k": 20, "min_p": 0}
"""Asked of both beside the temperature: each has defaults of its own."""
_SAYS_SOMETHING = re.compile(rb'"(?:content|reasoning|reasoning_content)": ?"[^"]')
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')

type Message = dict[str, str]


class Stream:
    """One reply on a socket of its own. `first_s` is when it first said something, from its start."""

    def __init__(self, port: int, body: bytes) -> None:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.first_s: float | None = None
        self._received: list[bytes] = []
        self._began = time.perf_counter()
        self.connection.sendall(head.encode() + body)

    def read(self) -> bool:
        """Take what has come. False at the end."""
        data = self.connection.recv(262_144)
        self._received.append(data)
        if self.first_s is None and _SAYS_SOMETHING.search(data):
            self.first_s = time.perf_counter() - self._began
        return bool(data)

    @property
    def text(self) -> bytes:
        return b"".join(self._received)

    def tokens(self) -> int:
        """Of the reply, as the server counts them. Raises SystemExit if it is not whole."""
        counts = _USAGE.findall(self.text)
        if not counts or b"[DONE]" not in self.text:
            raise SystemExit(f"A stream was not whole: {self.text[-500:]!r}")
        return int(counts[-1])

    def events(self) -> int:
        """That say something."""
        return len(_SAYS_SOMETHING.findall(self.text))


@dataclass
class Server:
    """One that is measured."""

    name: str
    port: int
    process: int
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    events: dict[str, int] = field(default_factory=dict[str, int])

    def rate(self, bodies: Sequence[bytes], row: str) -> float:
        """Tokens per second of all these replies at once, their short prompts included."""
        spent, began = cpu_seconds(self.process), time.perf_counter()
        streams = [Stream(self.port, body) for body in bodies]
        read_all(streams, LOOKS_S)
        seconds = time.perf_counter() - began
        made = sum(one.tokens() for one in streams)
        self.cpu_s[row] = self.cpu_s.get(row, 0) + cpu_seconds(self.process) - spent
        self.tokens[row] = self.tokens.get(row, 0) + made
        self.events[row] = self.events.get(row, 0) + sum(one.events() for one in streams)
        return made / seconds

    def first_s(self, messages: list[Message], temperature: float) -> float:
        """Seconds to the first token of a reply."""
        stream = Stream(self.port, body_of(messages, 2, temperature))
        read_all([stream], 0)
        if stream.first_s is None:
            raise SystemExit(f"{self.name} said nothing: {stream.text[-500:]!r}")
        return stream.first_s

    def forget(self, row: str) -> None:
        """Forget the counts of the warm-up."""
        for counted in (self.cpu_s, self.tokens, self.events):
            counted.pop(row, None)


def read_all(streams: Sequence[Stream], pause_s: float) -> None:
    """Read all to their ends, with a pause between two looks."""
    with selectors.DefaultSelector() as selector:
        for one in streams:
            selector.register(one.connection, selectors.EVENT_READ, one)
        while selector.get_map():
            ready = selector.select(PATIENCE_S)
            if not ready:
                raise SystemExit(f"Nothing came for {PATIENCE_S} s.")
            for key, _ in ready:
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.connection.close()
            time.sleep(pause_s)


def cpu_seconds(process: int) -> float:
    """CPU time of a process so far; nan where this is not told."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def body_of(messages: list[Message], most: int, temperature: float) -> bytes:
    body = {"model": "default_model", "messages": messages, "max_tokens": most, "temperature": temperature}
    body |= SAMPLING | {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body).encode()


def question(number: int, words: int = 4) -> Message:
    return {"role": "user", "content": " ".join(f"item {number * 7919 + word}," for word in range(words))}


def follow_up(number: int) -> list[Message]:
    """The next turn of the conversation that begins with this question."""
    return [question(number, PREFIX_WORDS), {"role": "assistant", "content": "Yes."}, question(number)]


def compare(row: str, ours: Callable[[int], float], theirs: Callable[[int], float], rounds: int) -> str:
    """A row of the table: rounds in turn, who begins changes."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            second, first = theirs(number), ours(number)
        else:
            first, second = ours(number), theirs(number)
        pairs.append((first, second))
    left, right = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    return f"| {row} | {left:,.4g} | {right:,.4g} | {ratio:.2f}"


def of_streams(count: int, temperature: float, sides: Sequence[Server], options: argparse.Namespace) -> str:
    name = f"{count} streams, temperature {temperature:g}"
    bodies = [body_of([question(number)], options.tokens, temperature) for number in range(count)]
    for server in sides:
        server.rate(bodies, name)
        server.forget(name)
    ours, theirs = sides
    row = compare(
        f"{name}: tokens per second",
        lambda _: ours.rate(bodies, name),
        lambda _: theirs.rate(bodies, name),
        options.rounds,
    )
    mark = MARKS["alone" if count == 1 else "many"]
    costs = [1e6 * one.cpu_s[name] / one.tokens[name] for one in sides]
    events = [one.events[name] / one.tokens[name] for one in sides]
    return (
        f"{row} (≥ {mark}) | {costs[0]:.0f} : {costs[1]:.0f} = {costs[0] / costs[1]:.2f} "
        f"| {events[0]:.2f} : {events[1]:.2f} |"
    )


def of_first_tokens(temperature: float, sides: Sequence[Server], rounds: int) -> str:
    """Each round another conversation, whose first turn both have answered."""

    def warm(server: Server, number: int) -> float:
        server.first_s([question(number, PREFIX_WORDS)], temperature)
        return 1000 * server.first_s(follow_up(number), temperature)

    for server in sides:
        warm(server, -1)
    ours, theirs = (partial(warm, server) for server in sides)
    row = compare(f"warm first token, temperature {temperature:g}: ms", ours, theirs, 3 * rounds)
    return f"{row} (≤ {MARKS['ttft']}) | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.7])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="of each reply")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a clean end: nothing is left running
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = tiny_models.build("qwen3", Path(name), hidden=options.hidden, layers=options.layers)
        most = max(options.streams)
        sides = [
            started(stack, "start_llm", partial(start_llm, folder, most), Path(name)),
            started(stack, "mlx_lm.server", partial(mlx_lm_server, folder, most), Path(name)),
        ]
        report(sides, options)


def start_llm(folder: Path, most: int, port: int) -> list[str]:
    options = ["--no-proxy", "--model", str(folder), "--mlx-port", str(port), "--batch", str(most)]
    return servers.start_llm(*options)


def mlx_lm_server(folder: Path, most: int, port: int) -> list[str]:
    options = ["--model", str(folder), "--port", str(port), "--decode-concurrency", str(most)]
    return [sys.executable, "-m", "mlx_lm", "server", *options, "--log-level", "ERROR"]


def started(stack: ExitStack, name: str, command: Callable[[int], list[str]], folder: Path) -> Server:
    port = servers.free_port()
    probe, log = partial(servers.health_seconds, port), folder / f"{name}.log"
    return Server(name, port, stack.enter_context(servers.running(command(port), probe, log=log)))


def report(sides: Sequence[Server], options: argparse.Namespace) -> None:
    print(f"{servers.machine('mlx', 'mlx-lm')}, Python {platform.python_version()}")
    print(f"python {' '.join(sys.argv)}; medians of {options.rounds} rounds\n")
    print("| | start_llm | mlx_lm.server | ratio (mark) | CPU µs per token | events per token |")
    print("|---|---|---|---|---|---|")
    for temperature in options.temperatures:
        print(of_first_tokens(temperature, sides, options.rounds), flush=True)
        for count in options.streams:
            print(of_streams(count, temperature, sides, options), flush=True)


if __name__ == "__main__":
    run_with_openblas()
    main()
