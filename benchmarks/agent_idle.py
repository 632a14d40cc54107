"""What is read while nobody waits, and receipts of random requests: parts of `agents.py`."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from benchmarks.agent_servers import HttpServer
from benchmarks.harness import row, table
from benchmarks.networks import FAMILIES
from scripts import tiny_models
from tests.agents.agent_account import Ledger, Message, Rendering, Request, user
from tests.agents.agent_shapes import Reply
from tests.http.test_receipts import SOURCES, Crowd
from tests.serving import Server, serving

LEAST_NEW = {"carrier": 0.99, "return": 0.97, "first turn": 0.97}
MOST_IN_ALL, LEAST_USED = 1.05, 0.5
_RULES, _QUESTION, _REPLY = 1200, 60, 90
"""Tokens, about: of a system text, of a question, and of a reply at most."""
_CARRIER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nRuns: {}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
_PATIENCE_S, _POLL_S, _SETTLED_S = 30.0, 0.05, 1.5
_CLIENT_WAITS_S = 300.0
"""On a busy machine."""


@dataclass
class Demand:
    """What requests had to compute between their arrival and their first token.

    Attributes:
        new: tokens that their clients added, what opens and closes messages included.
        in_all: prompt tokens that the engine computed, idle work included.
        idle_read, idle_restored, idle_used: as the server counts them.
    """

    requests: int = 0
    prompt: int = 0
    new: int = 0
    computed: int = 0
    in_all: int = 0
    idle_read: int = 0
    idle_restored: int = 0
    idle_used: int = 0

    def add(self, new: int, reply: Reply) -> None:
        prompt = reply.prompt_tokens or 0
        self.requests += 1
        self.prompt += prompt
        self.new += new
        self.computed += prompt - reply.cached_tokens

    def note(self, server: Server) -> None:
        """Add the server's own counts, at its end."""
        stats = server.get("/stats")
        idle = stats["idle_work"]
        self.in_all += stats["engine"]["prefilled_tokens"]
        self.idle_read += idle["read_tokens"]
        self.idle_restored += idle["restored_tokens"]
        self.idle_used += idle["used_tokens"]

    @property
    def used(self) -> float:
        read = self.idle_read + self.idle_restored
        return self.idle_used / read if read else 1.0


class Bots:
    """Agents in turn, each with a conversation of its own. A tool runs until the engine rests."""

    def __init__(self, rendering: Rendering, agents: int) -> None:
        self._rendering = rendering
        self._ledger = Ledger(rendering)
        self._talks: list[list[Message]] = [[self._rules(number)] for number in range(agents)]

    def _rules(self, number: int) -> Message:
        return {"role": "system", "content": self._rendering.prose(f"rules {number}", _RULES)}

    def new_conversations(self) -> None:
        """Let each agent begin anew."""
        self._talks = [[self._rules(number)] for number in range(len(self._talks))]

    def play(self, server: Server, demand: Demand, turns: int, *, carrier: bool) -> None:
        http = HttpServer(f"{server.url}/v1", "default_model")
        for turn in range(turns):
            for number, talk in enumerate(self._talks):
                talk.append(user(self._rendering.prose(f"{turn} {number} {len(talk)} {carrier}", _QUESTION)))
                conversation = tuple(talk)
                sent = (*conversation, user(_CARRIER.format(turn))) if carrier else conversation
                request = Request(
                    messages=sent,
                    meant=conversation,
                    read=conversation,
                    max_tokens=_REPLY,
                    name=f"agent {number} {carrier}",
                )
                new = self._ledger.charge(request).new
                reply = http.ask(request)
                demand.add(new, reply)
                talk.append({"role": "assistant", "content": reply.message.get("content") or ""})
                self._ledger.heard(request, talk[-1])
                rest(server)


def rest(server: Server) -> None:
    """Wait until the engine has had nothing to do for a while."""
    last, quiet_since, end = -1, time.monotonic(), time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        stats = server.get("/stats")
        done = stats["engine"]["prefilled_tokens"] + stats["idle_work"]["restored_tokens"]
        if done != last:
            last, quiet_since = done, time.monotonic()
        elif time.monotonic() - quiet_since > _SETTLED_S:
            return
        time.sleep(_POLL_S)


def _server(folder: Path, disk: Path, idle_work: str) -> AbstractContextManager[Server]:
    return serving(folder, idle_work=idle_work, ssd_folder=str(disk), drain_s=10)


def idle(
    folder: Path,
    *,
    family: Annotated[Sequence[str], FAMILIES] = tuple(FAMILIES),
    agents: int = 2,
    turns: int = 6,
) -> Iterator[str]:
    """Tokens that a request waits for, beside those that its client added, with idle work and without it.

    `carrier`: agents whose requests end with a message that the next one does not have, as OpenClaw's do.
    Then the server is stopped and started again. `return`: each agent goes on with its conversation; `first
    turn`: it begins a new one. The bots wait between turns until the engine rests, as if a tool ran. `new` is
    counted from the texts that the bots add, with what opens and closes messages; `computed` are the prompts'
    tokens without those that usage calls cached; `in all` is the engine's own count of a server's life, idle
    work included; `used` is the share of what idle work read in it that requests then found.

    Args:
        agents: conversations at the same time
        turns: of each
    """
    table("family | part | idle work | requests | new | computed | new / computed | in all | used")
    for name in family:
        built = tiny_models.build(FAMILIES[name], folder / name, hidden=64, layers=4)
        shown: dict[tuple[str, str], Demand] = {}
        for idle_work in ("off", "on"):
            with TemporaryDirectory() as disk:
                played = _played(built, Path(disk), idle_work, agents, turns)
            for part, demand in played.items():
                shown[part, idle_work] = demand
                share = demand.new / demand.computed
                cells = (demand.requests, demand.new, demand.computed, f"{share:.3f}", demand.in_all)
                row(name, part, idle_work, *cells, f"{demand.used:.2f}")
        yield from _problems(name, shown)


def _played(folder: Path, disk: Path, idle_work: str, agents: int, turns: int) -> dict[str, Demand]:
    print(f"{folder.name}: idle work {idle_work}", file=sys.stderr)
    bots = Bots(Rendering(folder), agents)
    played = {part: Demand() for part in LEAST_NEW}
    with _server(folder, disk, idle_work) as server:
        bots.play(server, played["carrier"], turns, carrier=True)
        played["carrier"].note(server)
    with _server(folder, disk, idle_work) as server:
        rest(server)
        bots.play(server, played["return"], 1, carrier=True)
        bots.new_conversations()
        bots.play(server, played["first turn"], 1, carrier=False)
        played["return"].note(server)
        played["first turn"].note(server)
    return played


def _problems(name: str, shown: dict[tuple[str, str], Demand]) -> Iterator[str]:
    for part, least in LEAST_NEW.items():
        on, off = shown[part, "on"], shown[part, "off"]
        if on.new < least * on.computed:
            yield f"{name}, {part}: {on.new / on.computed:.3f} of what was computed is new, not {least}"
        if on.in_all > MOST_IN_ALL * off.in_all:
            yield f"{name}, {part}: {on.in_all} tokens were computed in all, {off.in_all} without idle work"
        if on.used < LEAST_USED:
            yield f"{name}, {part}: {on.used:.2f} of what idle work read was used"


def receipts(
    folder: Path,
    *,
    family: Annotated[Sequence[str], FAMILIES] = ("dense", "hybrid"),
    requests: int = 5000,
) -> Iterator[str]:
    """Receipts of random requests of four clients at once, each of which has to sum up to its prompt.

    All four dialects, whole and streamed, conversations that go on, begin anew or say another time, prewarms
    among them. `tests/http/test_receipts.py` asks for 200.

    Args:
        requests: of each family
    """
    table(f"family | requests | {' | '.join(SOURCES)} | read_ahead | counted by /stats | seconds")
    for name in family:
        built = tiny_models.build(FAMILIES[name], folder / name, hidden=64, layers=2)
        with serving(built, thinking=False, batch=4) as server:
            crowd, began = Crowd(server, seed=2, patience_s=_CLIENT_WAITS_S), time.perf_counter()
            crowd.run(requests)
            seconds, stats = time.perf_counter() - began, server.get("/stats")
        counted = (*SOURCES, "read_ahead")
        sums = {field: sum(receipt[field] for receipt in crowd.receipts) for field in counted}
        cached = stats["requests"]["cached_tokens"]
        row(name, len(crowd.receipts), *sums.values(), cached, f"{seconds:.0f}")
        if cached != sums["from_memory"] + sums["from_disk"] or len(crowd.receipts) != requests:
            yield f"{name}: {len(crowd.receipts)} receipts do not sum to what the server counts"
