"""The server behind HTTP: the proxy, 64 streams, fairness, status pages, long prompts."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import engine_streams, servers, serving_fairness
from benchmarks.harness import Part, alternate, medians, ratio, row, table
from scripts import tiny_models
from start_llm.models.loader import load as load_model
from tests.ties import Tally, greedy_reference

PACKAGES = ("mlx", "mlx-lm", "litellm", "tokenizers")
CHAT = "/v1/chat/completions"

# ------------------------------------------------------------------------------------------------------ proxy

REPLY_TOKENS = 48
BODIES = {"small body": 0, "100 KB body": 100_000, "1 MB body": 1_000_000}


class Timing(NamedTuple):
    """Milliseconds: until the first text, between two events, until the end."""

    first: float
    event: float
    total: float


def proxy(_: Path, *, rounds: int = 20) -> None:
    """What the proxy adds: time to the first token, time for each chunk, and the price of long bodies.

    The demo model is served, and the same requests go to both ports in turn. It answers at once, so what is
    seen is the proxy.
    """
    table(f" | server | through the proxy | added | ratio, medians of {rounds}")
    with servers.served("--demo", proxy=True) as server:
        for name, padding in BODIES.items():
            for streamed, places in ((True, ("first event", "each event")), (False, ("whole reply",))):
                ports = (server.port, server.proxy_port)
                asks = (partial(_timing, port, padding, streamed) for port in ports)
                timings = alternate(rounds, *asks, warm_up=1)
                for place, what in enumerate(places):
                    bare, through = medians([(timing[place], other[place]) for timing, other in timings])
                    added = f"{through - bare:+.2f} ms"
                    row(
                        f"{name}: {what}",
                        f"{bare:.2f} ms",
                        f"{through:.2f} ms",
                        added,
                        f"x{through / bare:.1f}",
                    )


def _timing(port: int, padding: int, streamed: bool, _: int) -> Timing:
    """Of one chat. `padding` bytes go into a field that the server ignores: only the body grows."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": REPLY_TOKENS}
    body |= {"stream": streamed, "ballast": "x" * padding}
    began = time.perf_counter()
    reply = servers.send(port, CHAT, body).getresponse()
    if reply.status != 200:
        raise OSError(reply.status)
    moments = [time.perf_counter() for line in reply if line.startswith((b"data: {", b"{"))]
    gaps = (moments[-1] - moments[0]) / max(1, len(moments) - 1)
    return Timing(1000 * (moments[0] - began), 1000 * gaps, 1000 * (moments[-1] - began))


STREAMED: Mapping[str, Mapping[str, object]] = {
    "/v1/chat/completions": {"stream_options": {"include_usage": True}},
    "/v1/messages": {},
    "/v1/responses": {"store": False},
}
LEAST_KEPT = 0.9


def proxy_streams(
    folder: Path, *, rounds: int = 20, counts: Sequence[int] = (1, 8, 32), tokens: int = 160
) -> Iterator[str]:
    """Tokens a second of several streams at once on both ports, by protocol.

    One thread reads all of them, so that a client takes next to nothing of the machine. With
    `OPENBLAS_NUM_THREADS=1` the two servers do not wait for each other's spinning threads.

    Args:
        counts: of streams
        tokens: of each reply
    """
    model = tiny_models.build("qwen3", folder, hidden=128, layers=2)
    table(f" | server | through the proxy | ratio, medians of {rounds} (≥ {LEAST_KEPT:g} from 8 streams on)")
    with servers.served("--model", model, "--batch", max(counts), proxy=True) as server:
        ports = (server.proxy_port, server.port)
        for path in STREAMED:
            for count in counts:
                rates = alternate(
                    rounds, *(partial(_rate, port, path, count, tokens) for port in ports), warm_up=1
                )
                through, bare = medians(rates)
                kept = ratio(rates)
                row(
                    f"{path}, {count} streams: tokens per second",
                    f"{bare:,.4g}",
                    f"{through:,.4g}",
                    f"{kept:.2f}",
                )
                if count >= 8 and kept < LEAST_KEPT:
                    yield f"{path}, {count} streams: the proxy passes on {kept:.0%}"


def _rate(port: int, path: str, count: int, tokens: int, number: int) -> float:
    """Tokens per second, from the first connection to the last end. Every prompt is new."""
    began, opened = time.perf_counter(), list[engine_streams.Stream]()
    for place in range(count):
        question = f"Item {port} {number * count + place}"
        body: dict[str, object] = {"model": "m", "stream": True, "temperature": 0.7, **STREAMED[path]}
        if path == "/v1/responses":
            body |= {"input": question, "max_output_tokens": tokens}
        else:
            body |= {"messages": [{"role": "user", "content": question}], "max_tokens": tokens}
        opened.append(engine_streams.Stream(port, json.dumps(body).encode(), path))
        time.sleep(engine_streams.CONNECTS_S)
    engine_streams.read_all(opened, engine_streams.LOOKS_S)
    return sum(stream.tokens() for stream in opened) / (time.perf_counter() - began)


# ------------------------------------------------------------------------------------------------------- load

BETWEEN_LOOKS_S = 0.2
VOCABULARY = 1500


@dataclass
class Stream:
    """One client. `moments` has a time, in seconds from its start, for each token."""

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

    Every reply is compared with what mlx_lm says to the same prompt alone: another token counts as wrong
    unless the two were equally likely up to rounding. Once for each `--batch`.

    Args:
        tokens: of each reply
    """
    tiny_models.build("qwen3", folder, hidden=128, layers=2)
    rng, network = random.Random(1), load_model(folder).network
    prompts = [tuple(rng.choices(range(VOCABULARY), k=rng.randint(20, 400))) for _ in range(streams)]
    references = {prompt: greedy_reference(network, prompt, tokens) for prompt in prompts}
    for most in batch:
        clients, tally, health = [Stream(prompt) for prompt in prompts], Tally(), list[float]()
        with (
            servers.served("--model", folder, "--batch", most) as server,
            ThreadPoolExecutor(streams) as pool,
        ):
            runs = [pool.submit(client.run, server.port, tokens) for client in clients]
            while not all(run.done() for run in runs):
                health.append(servers.health_seconds(server.port))
                time.sleep(BETWEEN_LOOKS_S)
            for run in runs:
                run.result()
            engine = servers.ask(server.port, "/stats")["engine"]
        for client in clients:
            tally.compare(client.tokens, references[client.prompt])
        _tell_load(clients, tally, health, f"--batch {most}, preemptions {engine['preemptions']}")
        print(f"  decode stall     {engine['decode_stall']}")


def _tell_load(streams: Sequence[Stream], tally: Tally, health: Sequence[float], how: str) -> None:
    first, whole = (sorted(stream.moments[place] for stream in streams) for place in (0, -1))
    at_half = statistics.median(whole) / 2
    had = sorted(sum(moment <= at_half for moment in stream.moments) for stream in streams)
    print(f"{len(streams)} streams, {how}")
    print(f"  first token      {first[0]:.1f} to {first[-1]:.1f} s, median {statistics.median(first):.1f}")
    print(f"  end              {whole[0]:.1f} to {whole[-1]:.1f} s, max/min {whole[-1] / whole[0]:.2f}")
    print(f"  tokens at half   {had[0]} to {had[-1]}")
    print(f"  replies          {tally.tokens} tokens compared, {tally.ties} ties, none wrong")
    print(f"  /health          median {1000 * statistics.median(health):.1f} ms")


# ------------------------------------------------------------------------------------------------------ pages

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


class Tab:
    """An open page on a connection of its own, which asks every so many seconds until `done`."""

    def __init__(self, port: int, interval_s: float, *, knows_records: bool, done: threading.Event) -> None:
        self._connection = servers.send(port, "/health")
        self._connection.getresponse().read()
        self._interval_s, self._knows_records, self._done = interval_s, knows_records, done
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
            opened = [
                Tab(server.port, interval_s, knows_records=knows_records, done=done) for _ in range(tabs)
            ]
            used = _share(server, opened, seconds, done) - alone
            median = (
                f"{1000 * statistics.median(request_s for tab in opened for request_s in tab.seconds):.2f} ms"
            )
            records = "newer ones" if knows_records else "all records"
            row(tabs, f"{interval_s:g} s", records, f"{used:.2%}", median, f"{opened[0].nbytes:,}")
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
    "proxy": proxy,
    "proxy_streams": proxy_streams,
    "load": load,
    "fairness": serving_fairness.fairness,
    "pages": pages,
}
