"""The server behind HTTP: the proxy, 64 streams, fairness, status pages, long prompts."""

import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import servers, serving_fairness
from benchmarks.engine_streams import CONNECTS_S, LOOKS_S, Stream, read_all
from benchmarks.harness import Part, alternate, medians, ratio, row, table
from scripts import tiny_models
from start_llm.models.loader import load as load_model
from tests.ties import Tally, greedy_reference

PACKAGES = ("mlx", "mlx-lm", "litellm", "tokenizers")
CHAT = "/v1/chat/completions"

# ------------------------------------------------------------------------------------------------------ proxy

STREAMED: Mapping[str, Mapping[str, object]] = {
    "/v1/chat/completions": {"stream_options": {"include_usage": True}},
    "/v1/messages": {},
    "/v1/responses": {"store": False},
}
LEAST_KEPT = 0.9


def proxy_streams(
    folder: Path,
    *,
    rounds: int = 20,
    counts: Sequence[int] = (1, 8, 32),
    tokens: int = 160,
    ballast: int = 0,
) -> Iterator[str]:
    """Tokens a second of several streams at once on both ports, by protocol, and when their first text comes.

    One thread reads all of them, so that a client takes next to nothing of the machine. With
    `OPENBLAS_NUM_THREADS=1` the two servers do not wait for each other's spinning threads.

    Args:
        counts: of streams
        tokens: of each reply
        ballast: bytes of a field that the server ignores: only the body grows
    """
    model = tiny_models.build("qwen3", folder, hidden=128, layers=2)
    table(
        f"tokens a second | server | through the proxy | ratio, medians of {rounds} (≥ {LEAST_KEPT:g} from 8 "
        "streams on) | ms to the first text | ratio"
    )
    with servers.served("--model", model, "--batch", max(counts), proxy=True) as server:
        for path, count in itertools.product(STREAMED, counts):
            asks = [
                partial(_rate, port, path, count, tokens, ballast)
                for port in (server.proxy_port, server.port)
            ]
            measured = alternate(rounds, *asks, warm_up=1)
            rates, firsts = ([(side[place], other[place]) for side, other in measured] for place in (0, 1))
            kept, speeds = ratio(rates), (f"{rate:,.4g}" for rate in reversed(medians(rates)))
            first_ms = " : ".join(f"{1000 * first:.1f}" for first in reversed(medians(firsts)))
            row(f"{path}, {count} streams", *speeds, f"{kept:.2f}", first_ms, f"{ratio(firsts):.2f}")
            if count >= 8 and kept < LEAST_KEPT:
                yield f"{path}, {count} streams: the proxy passes on {kept:.0%}"


def _rate(port: int, path: str, count: int, tokens: int, ballast: int, number: int) -> tuple[float, float]:
    """Tokens per second, from the first connection to the last end, and the median seconds to a first text.

    Every prompt is new.
    """
    began, opened = time.perf_counter(), list[Stream]()
    for place in range(count):
        question = f"Item {port} {number * count + place}"
        body: dict[str, object] = {"model": "m", "stream": True, "temperature": 0.7, **STREAMED[path]}
        body |= {"ballast": "x" * ballast} if ballast else {}
        if path == "/v1/responses":
            body |= {"input": question, "max_output_tokens": tokens}
        else:
            body |= {"messages": [{"role": "user", "content": question}], "max_tokens": tokens}
        opened.append(Stream(port, json.dumps(body).encode(), path))
        time.sleep(CONNECTS_S)
    read_all(opened, LOOKS_S)
    seconds = time.perf_counter() - began
    first_s = statistics.median(stream.first_s or seconds for stream in opened)
    return sum(stream.tokens() for stream in opened) / seconds, first_s


# ------------------------------------------------------------------------------------------------------- load

BETWEEN_LOOKS_S = 0.2
VOCABULARY = 1500


@dataclass
class Client:
    """One client of many. `moments` has a time, in seconds from its start, for each token."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list[int])
    moments: list[float] = field(default_factory=list[float])

    def run(self, port: int, length: int) -> None:
        body = {"prompt": list(self.prompt), "max_tokens": length, "temperature": 0, "return_token_ids": True}
        began = time.perf_counter()
        for event in servers.events(port, "/v1/completions", body):
            new = event["choices"][0].get("token_ids") or [] if event.get("choices") else []
            self.tokens += new
            self.moments += [time.perf_counter() - began] * len(new)


def load(folder: Path, *, streams: int = 64, tokens: int = 60, batch: Sequence[int] = (4, 64)) -> None:
    """Many streams at once: is anybody starved, is anybody wrong, does the server still answer?

    Every reply is compared with what mlx_lm says to the same prompt alone: another token ends the program
    unless the two were equally likely up to rounding. Once for each `--batch`. Shown are the least, the
    median and the most of the streams: seconds to the first token and to the end, and how many tokens each
    had at half of the median time.

    Args:
        tokens: of each reply
    """
    tiny_models.build("qwen3", folder, hidden=128, layers=2)
    rng, network = random.Random(1), load_model(folder).network
    prompts = [tuple(rng.choices(range(VOCABULARY), k=rng.randint(20, 400))) for _ in range(streams)]
    references = {prompt: greedy_reference(network, prompt, tokens) for prompt in prompts}
    table(
        "--batch | first token, s | end, s | tokens at half | tokens compared | ties | preemptions | "
        "stall of a step, s: median, worst | `/health`, median ms"
    )
    for most in batch:
        clients, tally = [Client(prompt) for prompt in prompts], Tally()
        with servers.served("--model", folder, "--batch", most) as server:
            health_s = _run_all(clients, server.port, tokens)
            engine = servers.ask(server.port, "/stats")["engine"]
        for client in clients:
            tally.compare(client.tokens, references[client.prompt])
        half_s = statistics.median(client.moments[-1] for client in clients) / 2
        spreads = (
            _spread(client.moments[0] for client in clients),
            _spread(client.moments[-1] for client in clients),
            _spread(sum(moment <= half_s for moment in client.moments) for client in clients),
        )
        stalls = ", ".join(f"{engine['decode_stall'][which]}" for which in ("median_s", "worst_s"))
        health_ms = f"{1000 * statistics.median(health_s):.1f}"
        row(most, *spreads, tally.tokens, tally.ties, engine["preemptions"], stalls, health_ms)


def _run_all(clients: Sequence[Client], port: int, tokens: int) -> list[float]:
    """All at once. Returns the seconds of each `GET /health` meanwhile."""
    health_s: list[float] = []
    with ThreadPoolExecutor(len(clients)) as pool:
        runs = [pool.submit(client.run, port, tokens) for client in clients]
        while not all(run.done() for run in runs):
            health_s.append(servers.health_seconds(port))
            time.sleep(BETWEEN_LOOKS_S)
        for run in runs:
            run.result()
    return health_s


def _spread(figures: Iterable[float]) -> str:
    ordered = sorted(figures)
    return f"{ordered[0]:.3g}, {statistics.median(ordered):.3g}, {ordered[-1]:.3g}"


# ------------------------------------------------------------------------------------------------------ pages

MOST_SHARE = 0.01
CONVERSATIONS, TURNS = 20, 24


class Tab:
    """An open page on a connection of its own, which asks every so many seconds until `done`."""

    def __init__(self, port: int, interval_s: float, knows_records: bool, done: threading.Event) -> None:
        self._connection = servers.send(port, "/health")
        self._connection.getresponse().read()
        self._interval_s, self._knows_records, self._done = interval_s, knows_records, done
        self._version = ""
        self.seconds: list[float] = []
        self.nbytes = 0

    def run(self) -> None:
        while not self._done.wait(self._interval_s):
            began = time.perf_counter()
            self._connection.request("GET", f"/activity?since={self._version}")
            body = self._connection.getresponse().read()
            self.seconds.append(time.perf_counter() - began)
            self.nbytes = len(body)
            if self._knows_records:
                self._version = json.loads(body)["version"]
        self._connection.close()


def pages(folder: Path, *, tabs: int = 10, seconds: float = 30) -> Iterator[str]:
    """What open status pages cost the server: CPU of tabs that ask `/activity`.

    The records are full, and tabs keep their connections open, as browsers do. A visible tab asks every two
    seconds while a request runs and every five seconds otherwise, and says which records it knows. "All
    records" is for comparison: a program that does not say it. The CPU time of the whole process without any
    tab is subtracted; tabs that ask every two seconds may take 1 % of a core.
    """
    with servers.served("--model", tiny_models.build("qwen3", folder)) as server:
        _fill_records(server.port)
        done = threading.Event()
        alone = _share(server, [], seconds, done)
        table("tabs | ask every | for | CPU of a core | answer, median | bytes")
        for interval_s, knows_records in ((5.0, True), (2.0, True), (2.0, False)):
            done = threading.Event()
            opened = [Tab(server.port, interval_s, knows_records, done) for _ in range(tabs)]
            used = _share(server, opened, seconds, done) - alone
            answer_s = statistics.median(request_s for tab in opened for request_s in tab.seconds)
            records, answer_ms = "newer ones" if knows_records else "all records", f"{1000 * answer_s:.2f} ms"
            row(tabs, f"{interval_s:g} s", records, f"{used:.2%}", answer_ms, f"{opened[0].nbytes:,}")
            if interval_s == 2 and knows_records and used >= MOST_SHARE:
                yield f"the tabs take {used:.2%} of a core"
    print(f"\nWithout a tab: {alone:.2%} of a core.")


def _fill_records(port: int) -> None:
    """With conversations, requests, refusals."""
    for turn in range(TURNS):
        for number in range(CONVERSATIONS):
            messages = [
                {"role": "user", "content": f"question {index} of {number}"} for index in range(turn + 1)
            ]
            body = {"messages": messages, "max_tokens": 1, "session_id": f"conversation-{number}"}
            servers.ask(port, CHAT, body)
    for number in range(50):
        servers.ask(port, f"/nothing/{number}")


def _share(server: servers.Served, tabs: Sequence[Tab], seconds: float, done: threading.Event) -> float:
    """Of a core, that the server uses while these tabs are open."""
    threads = [threading.Thread(target=tab.run) for tab in tabs]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    servers.ask(server.port, "/health")
    began, before = time.perf_counter(), server.cpu_s()
    time.sleep(seconds)
    used, passed = server.cpu_s() - before, time.perf_counter() - began
    done.set()
    for thread in threads:
        thread.join()
    return used / passed


PARTS: Mapping[str, Part] = {
    "proxy_streams": proxy_streams,
    "load": load,
    "fairness": serving_fairness.fairness,
    "pages": pages,
}
