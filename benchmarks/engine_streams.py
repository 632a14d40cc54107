"""Many streams over HTTP, beside mlx_lm.server: parts of `engine.py`.

Both servers run in processes of their own on the same tiny random model, so what is compared is what a token
costs beside the network. The client is one thread that empties all sockets every few milliseconds, so it
takes next to nothing of the machine. Tokens are those of `usage`. CPU time is that of the server's whole
process, which varies far less than the clock.
"""

import itertools
import json
import re
import selectors
import statistics
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks import servers
from benchmarks.harness import alternate, medians, ratio, row, table
from scripts import tiny_models
from start_llm.core.sampling import Sampling

LOOKS_S = 0.004
"""Between two looks at the sockets: a hundredth of the shortest run."""
CONNECTS_S = 0.005
"""Between the connections of two streams: nobody's queue of them overflows."""
PATIENCE_S = 120
FAMILIES = ("qwen3", "qwen3_5", "gemma3_text", "glm4_moe_lite")
"""Dense attention, recurrent layers between, sliding windows, and latent attention with experts."""
OURS = Sampling()
SAMPLING: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0},
    "defaults": {option: getattr(OURS, option) for option in ("temperature", "top_p", "top_k", "min_p")},
}
"""Asked of both: each has defaults of its own."""
_SAYS_SOMETHING = re.compile(rb'"(?:content|reasoning|reasoning_content|text|delta)": ?"[^"]')
_USAGE = re.compile(rb'"(?:completion|output)_tokens": ?(\d+)')
_ENDS = (b"[DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")


class Stream:
    """One reply on a socket of its own. `first_s` is when it first said something, from its start."""

    def __init__(self, port: int, body: bytes, path: str = "/v1/chat/completions") -> None:
        self._began = time.perf_counter()
        self.connection = servers.bare_socket(port, path, body)
        self.first_s: float | None = None
        self._received: list[bytes] = []

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
        if not counts or not any(end in self.text for end in _ENDS):
            raise SystemExit(f"A stream was not whole: {self.text[-500:]!r}")
        return int(counts[-1])

    def events(self) -> int:
        """That say something."""
        return len(_SAYS_SOMETHING.findall(self.text))


@dataclass
class Server:
    """One that is measured, and what its streams took together."""

    name: str
    port: int
    process: int
    cpu_s: float = 0
    tokens: int = 0
    events: int = 0

    asked: Iterator[int] = field(default_factory=itertools.count)
    firsts_s: list[float] = field(default_factory=list)

    def rate(self, count: int, tokens: int, sampling: str) -> float:
        """Tokens per second of so many replies at once, their short prompts included, which are all new."""
        bodies = [body_of(next(self.asked), tokens, sampling) for _ in range(count)]
        spent, began = servers.cpu_s(self.process), time.perf_counter()
        streams: list[Stream] = []
        for body in bodies:
            streams.append(Stream(self.port, body))
            time.sleep(CONNECTS_S)
        read_all(streams, LOOKS_S)
        seconds = time.perf_counter() - began
        made = sum(stream.tokens() for stream in streams)
        self.cpu_s += servers.cpu_s(self.process) - spent
        self.tokens += made
        self.events += sum(stream.events() for stream in streams)
        self.firsts_s.append(statistics.median(stream.first_s or seconds for stream in streams))
        return made / seconds


def read_all(streams: Sequence[Stream], pause_s: float) -> None:
    """Read all to their ends, with a pause between two looks."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.connection, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(PATIENCE_S)
            if not ready:
                raise SystemExit(f"Nothing came for {PATIENCE_S} s.")
            for key, _ in ready:
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.connection.close()
            time.sleep(pause_s)


def body_of(number: int, most: int, sampling: str) -> bytes:
    question = " ".join(f"item {number * 7919 + word}," for word in range(4))
    body = {"model": "default_model", "messages": [{"role": "user", "content": question}], "max_tokens": most}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**body, **streamed, **SAMPLING[sampling]}).encode()


@contextmanager
def both(folder: Path, most: int, hidden: int, family: str) -> Generator[tuple[Server, Server]]:
    """start_llm and mlx_lm.server on the same model, for so many streams at once."""
    model = tiny_models.build(family, folder, hidden=hidden)
    options = ("--decode-concurrency", str(most), "--log-level", "ERROR")
    with (
        servers.served("--model", model, "--batch", most, log=folder / "ours.log") as ours,
        servers.served_by_mlx_lm(model, *options, log=folder / "theirs.log") as theirs,
    ):
        yield Server("start_llm", ours.port, ours.pid), Server("mlx_lm.server", theirs.port, theirs.pid)


def streams(
    folder: Path,
    *,
    families: Sequence[str] = FAMILIES,
    streams: Sequence[int] = (1, 4, 8, 16, 32),
    samplings: Sequence[str] = tuple(SAMPLING),
    rounds: int = 5,
    lengths: Sequence[int] = (64, 160),
    hidden: int = 128,
) -> None:
    """Tokens per second of several streams beside mlx_lm.server, and their median time to the first token.

    Args:
        samplings: greedy, defaults
        lengths: of each reply, in tokens
        hidden: width of the model
    """
    table(
        "streams of tokens: tokens per second | start_llm | mlx_lm.server | ratio (≥ 1.0) | "
        "ms to the first token | ratio (≤ 1.1) | CPU µs per token | events per token"
    )
    for family in families:
        (folder / family).mkdir()
        with both(folder / family, max(streams), hidden, family) as sides:
            for sampling, length, count in itertools.product(samplings, lengths, streams):
                measured = [replace(side, firsts_s=[]) for side in sides]
                rate = [partial(_rate, side, count, length, sampling) for side in measured]
                rates = alternate(rounds, *rate, warm_up=1)
                _tell(f"{family}, {sampling}: {count} of {length}", measured, rates)


def _rate(side: Server, count: int, tokens: int, sampling: str, _: int) -> float:
    return side.rate(count, tokens, sampling)


def _tell(name: str, sides: Sequence[Server], rates: Sequence[tuple[float, ...]]) -> None:
    ours, theirs = medians(rates)
    firsts = list(zip(*(side.firsts_s[1:] for side in sides), strict=True))
    cpu = [1e6 * side.cpu_s / side.tokens for side in sides]
    row(
        name,
        f"{ours:,.4g}",
        f"{theirs:,.4g}",
        f"{ratio(rates):.2f}",
        " : ".join(f"{1000 * seconds:.0f}" for seconds in medians(firsts)),
        f"{ratio(firsts):.2f}",
        f"{cpu[0]:.0f} : {cpu[1]:.0f} = {cpu[0] / cpu[1]:.2f}",
        " : ".join(f"{side.events / side.tokens:.2f}" for side in sides),
    )
