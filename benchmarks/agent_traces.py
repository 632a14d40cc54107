"""Recorded sessions of a coding agent, scaled down, against the real server: a part of `agents.py`."""

import gzip
import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx

from benchmarks.agent_servers import HttpServer
from benchmarks.harness import FOLDER, row, table
from benchmarks.networks import FAMILIES
from scripts import tiny_models
from scripts.agent_sessions import reduced
from start_llm.cache.layers import Layers
from start_llm.models.loader import load
from tests.agents.agent_account import Charge, Ledger, Message, Rendering, Request, user
from tests.agents.agent_shapes import Reply, ServerFailed
from tests.serving import Server, serving

PAGE = 16
"""Tokens of a page: as small beside the prompts as pages are beside those that were recorded."""
BLOCK = 64
"""Recorded tokens up to which it is known how much prompts share."""
LEAST_EFFICIENCY = 0.97
_LEAST = 4
"""Tokens of the shortest message."""


@dataclass
class _Asked:
    """A request that was sent.

    Attributes:
        ends: of its messages, in tokens of the recording.
    """

    messages: list[Message]
    ends: list[int]
    reply: Message


@dataclass
class Session:
    """A recorded session as a client plays it: its own texts, of the recorded lengths, and the server's own
    replies, which it sends again.

    Args:
        scale: recorded tokens for each token.
    """

    number: int
    recorded: Mapping[str, Any]
    scale: int
    ledger: Ledger
    rendering: Rendering
    asked: list[_Asked] = field(default_factory=list[_Asked])

    def ask(self, send: Callable[[Request], Message]) -> Request:
        """Send the next request, and return it.

        It begins as an earlier one, up to the last message that they share as a whole.

        Args:
            send: returns the server's reply.
        """
        _, parent, shared, prompt, reply = self.recorded["requests"][len(self.asked)]
        messages, ends = self._beginning(parent, shared)
        if not messages:
            first = min(self.recorded["instructions"], prompt // 2)
            messages, ends = [{"role": "system", "content": self._prose("system", first)}], [first]
        name = f"{self.number}.{len(self.asked)}"
        if messages[-1]["role"] == "user":
            messages.append({"role": "assistant", "content": f"({name})"})
            ends.append(ends[-1])
        messages.append(user(self._prose(name, prompt - ends[-1])))
        ends.append(prompt)
        most = max(reply // self.scale, 1)
        request = Request(messages=messages, meant=messages, read=messages, tools=(), max_tokens=most)
        self.asked.append(_Asked(messages, ends, send(request)))
        return request

    def _beginning(self, parent: int, shared: int) -> tuple[list[Message], list[int]]:
        if parent < 0:
            return [], []
        before = self.asked[parent]
        if shared >= before.ends[-1] - self.recorded["block"]:
            reply_tokens = self.recorded["requests"][parent][4]
            return [*before.messages, before.reply], [*before.ends, before.ends[-1] + reply_tokens]
        kept = sum(end <= shared for end in before.ends)
        return before.messages[:kept], before.ends[:kept]

    def _prose(self, name: str, recorded_tokens: int) -> str:
        return self.rendering.prose(f"{self.number}-{name}", max(recorded_tokens // self.scale, _LEAST))


@dataclass
class Played:
    """What the requests cost, in tokens."""

    requests: int = 0
    prompt: int = 0
    unavoidable: int = 0
    computed: int = 0

    def add(self, reply: Reply, charge: Charge) -> None:
        """Raises ServerFailed: the server does not say how long the prompt was."""
        if reply.prompt_tokens is None:
            raise ServerFailed("no usage came with the reply")
        self.requests += 1
        self.prompt += reply.prompt_tokens
        self.unavoidable += charge.unavoidable
        self.computed += reply.prompt_tokens - reply.cached_tokens

    @property
    def efficiency(self) -> float:
        return self.unavoidable / self.computed


def in_time(sessions: Sequence[Mapping[str, Any]], at_once: int) -> Iterator[tuple[float, int]]:
    """Yield the sessions whose requests are next, in the order of their times in seconds, which come first:
    so many sessions run at once, and when one ends the next begins.
    """
    waiting = list(range(len(sessions)))
    running = [(0.0, number, 0) for number in waiting[:at_once]]
    del waiting[:at_once]
    heapq.heapify(running)
    while running:
        at, number, place = heapq.heappop(running)
        yield at, number
        requests = sessions[number]["requests"]
        if place + 1 < len(requests):
            heapq.heappush(running, (at + requests[place + 1][0], number, place + 1))
        elif waiting:
            heapq.heappush(running, (at, waiting.pop(0), 0))


def play(
    server: Server, rendering: Rendering, recorded: Sequence[Mapping[str, Any]], at_once: int, scale: int
) -> Played:
    """Send all requests, one after the other."""
    http, played = HttpServer(f"{server.url}/v1", "default_model"), Played()
    sessions = [
        Session(number, figures, scale, Ledger(rendering), rendering)
        for number, figures in enumerate(recorded)
    ]

    def send(request: Request) -> Message:
        charge, reply = session.ledger.charge(request), http.ask(request)
        session.ledger.heard(request, reply.message)
        played.add(reply, charge)
        return reply.message

    for _, number in in_time(recorded, at_once):
        session = sessions[number]
        session.ask(send)
    return played


def recorded_sessions(
    file: Path | None, count: int, most_requests: int, every: int = 1
) -> list[Mapping[str, Any]]:
    """Return recorded sessions: of every so many of a file, the first ones."""
    if file is None:
        sessions = json.loads((FOLDER / "agent_sessions.json").read_text(encoding="utf-8"))[::every][:count]
    else:
        with gzip.open(file, "rt", encoding="utf-8") as traces:
            sessions = [reduced(trace, most_requests) for trace in json.load(traces)[::every][:count]]
    return [
        {**figures, "block": BLOCK, "requests": figures["requests"][:most_requests]} for figures in sessions
    ]


def _token_bytes(folder: Path) -> int:
    network = load(folder).network
    layers = Layers(network)
    caches = layers.fresh()
    network(mx.zeros((1, 64), dtype=mx.uint32), cache=caches)
    return layers.nbytes(caches) // 64


def traces(
    folder: Path,
    *,
    family: Annotated[Sequence[str], FAMILIES] = tuple(FAMILIES),
    sessions: int = 40,
    requests: int = 120,
    at_once: int = 4,
    scale: int = 64,
    kept: Sequence[int] = (0, 2_000_000, 200_000),
    disk: Sequence[str] = ("off", "on"),
    disk_kept: int = 0,
    every: int = 1,
    file: Path | None = None,
) -> Iterator[str]:
    """Recorded sessions of Claude Code against what no server can avoid to compute, several at once.

    Lengths, common beginnings and the order of requests are recorded, texts are made up, and replies are the
    server's own. Every message is shorter by `scale`, and so is what the prompt cache may keep. Requests are
    sent one after the other, in the order of their recorded times.

    Args:
        sessions: how many
        requests: most of each
        at_once: sessions that run at the same time
        scale: recorded tokens for each token
        kept: recorded tokens that the prompt cache may keep; 0: as many as fit into this machine
        disk: off, on: without a disk tier, with it
        disk_kept: recorded tokens that the disk tier may keep; 0: all
        every: of so many sessions one is played
        file: recorded sessions in their first form, all of them, in place of the 40 that are at hand
    """
    recorded = recorded_sessions(file, sessions, requests, every)
    table(
        "family | kept | disk | requests | prompt tokens | unavoidable | computed | efficiency | "
        "evictions | written"
    )
    for name in family:
        model = tiny_models.build(FAMILIES[name], folder / name, hidden=64, layers=4)
        rendering, token_bytes = Rendering(model), _token_bytes(model)
        for tokens in kept:
            for tier in disk:
                place = folder / f"{name}-{tokens}-{tier}"
                limits: dict[str, Any] = {
                    "state_root": str(place),
                    "cache_max_bytes": 0.5,
                    "block_size": PAGE,
                }
                if tokens:
                    limits["cache_max_bytes"] = tokens // scale * token_bytes
                if tier == "on":
                    limits |= {"ssd_folder": str(place / "ssd"), "write_after_s": 0.2}
                    limits |= {"ssd_max_size": disk_kept // scale * token_bytes} if disk_kept else {}
                with serving(model, **limits) as server:
                    played = play(server, rendering, recorded, at_once, scale)
                    stats = server.get("/stats")
                row(
                    name,
                    f"{tokens:,}" if tokens else "all",
                    tier,
                    f"{played.requests:,}",
                    f"{played.prompt:,}",
                    f"{played.unavoidable:,}",
                    f"{played.computed:,}",
                    f"{played.efficiency:.3f}",
                    stats["prompt_cache"]["evictions"],
                    f"{stats['ssd'].get('written_bytes', 0) / 1e6:,.1f} MB",
                )
                if not tokens and played.efficiency < LEAST_EFFICIENCY:
                    yield f"{name}, disk {tier}: efficiency {played.efficiency:.3f}"
