"""A fleet of servers in virtual time: which prompt tokens they compute, and how long agents wait for them.

A conversation is a tree of segments: each request adds one behind a prefix of an earlier request's path. A
server keeps the segments that it has computed, the least recently used ones go when its memory is full, and
of those the deepest first. It reads one prompt at a time, in order of arrival, while its replies are written
beside. Sessions come from `agent_sessions.json`; `scripts/agent_sessions.py` says what its figures are.
"""

import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from start_llm.proxy.routing_names import RoutedConversations

SESSIONS = Path(__file__).with_name("agent_sessions.json")
NOTHING = -1
START_WITHIN_S = 600.0
"""Agents begin at random moments of this time."""

type Segment = tuple[int, int]
"""Owner and number. Owners below 0 are instructions, which agents with the same session share."""
type PromptPath = tuple[tuple[Segment, int], ...]
"""The segments of a prompt, each with how many of its tokens are part of it."""


@dataclass(frozen=True)
class Turn:
    """A request of a session: what `scripts.agent_sessions.reduced` returns of it."""

    wait_s: float
    parent: int
    shared: int
    prompt: int
    reply: int


@dataclass(frozen=True)
class Session:
    """A recorded session.

    Attributes:
        number: among all sessions.
        instructions: tokens of tools and system text.
    """

    number: int
    instructions: int
    turns: tuple[Turn, ...]

    def paths(self, agent: int) -> list[PromptPath]:
        """Return the path of each request, if this agent plays the session."""
        paths: list[PromptPath] = []
        for number, turn in enumerate(self.turns):
            if turn.parent == NOTHING:
                common = min(self.instructions, turn.prompt)
                shared: PromptPath = (((-1 - self.number, 0), common),)
            else:
                common = turn.shared
                shared = _cut(paths[turn.parent], common)
            own = turn.prompt - common
            paths.append((*shared, ((agent, number), own)) if own else shared)
        return paths


def recorded_sessions(file: Path = SESSIONS) -> list[Session]:
    recorded = json.loads(file.read_text(encoding="utf-8"))
    return [
        Session(number, session["instructions"], tuple(Turn(*turn) for turn in session["requests"]))
        for number, session in enumerate(recorded)
    ]


def _cut(path: PromptPath, tokens: int) -> PromptPath:
    """Return the beginning of a path that has so many tokens."""
    kept: list[tuple[Segment, int]] = []
    for segment, length in path:
        if tokens <= 0:
            break
        kept.append((segment, min(length, tokens)))
        tokens -= length
    return tuple(kept)


class SegmentCache:
    """What one server keeps, within `budget` tokens; None: without a limit."""

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._lengths: OrderedDict[Segment, int] = OrderedDict()
        self.tokens = 0

    def read(self, path: PromptPath) -> int:
        """Compute a prompt. Returns how many of its tokens were there already."""
        cached, is_known = 0, True
        for segment, length in path:
            if not is_known:
                break
            had = min(self._lengths.get(segment, 0), length)
            cached += had
            is_known = had == length
        for segment, length in reversed(path):
            self._keep(segment, length)
        self._evict()
        return cached

    def _keep(self, segment: Segment, length: int) -> None:
        had = self._lengths.get(segment, 0)
        self._lengths[segment] = max(had, length)
        self._lengths.move_to_end(segment)
        self.tokens += max(length - had, 0)

    def _evict(self) -> None:
        while self._budget is not None and self.tokens > self._budget and len(self._lengths) > 1:
            _, length = self._lengths.popitem(last=False)
            self.tokens -= length


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One server.

    Attributes:
        budget: tokens of KV that it keeps.
        prefill, decode: tokens a second; `decode` is that of each reply.
    """

    budget: int
    prefill: float
    decode: float


@dataclass
class SimulatedServer:
    """A server at some moment of virtual time."""

    machine: Machine
    name: str
    newest: int = 0
    free_at: float = 0.0
    ends: list[float] = field(default_factory=list[float])

    @cached_property
    def cache(self) -> SegmentCache:
        return SegmentCache(self.machine.budget)

    def busy(self, now: float) -> int:
        """Return how many requests it answers."""
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return len(self.ends)

    def answer(self, now: float, computed: int, reply: int) -> tuple[float, float]:
        """Return when the first token of a reply comes, and when the last one does."""
        self.free_at = max(now, self.free_at) + computed / self.machine.prefill
        end = self.free_at + reply / self.machine.decode
        heapq.heappush(self.ends, end)
        return self.free_at, end


@dataclass(frozen=True)
class Asked:
    """A request, as a router sees it."""

    now: float
    agent: int
    path: PromptPath


type Router = Callable[[Asked, Sequence[SimulatedServer]], SimulatedServer]


def at_random(seed: int = 0) -> Router:
    """Return a router that takes any server each time; equal seeds take the same ones."""
    source = random.Random(seed)
    return lambda _, servers: source.choice(servers)


def by_session() -> Router:
    """Return a router that keeps a session, with its sub-agents, at the server that it got first."""
    return _remembering(lambda asked: [str(asked.agent).encode()])


def by_prefix() -> Router:
    """Return a router that goes by the longest known prefix, as the proxy does where no id is sent."""
    return _remembering(
        lambda asked: [repr(segment).encode() for segment, _ in reversed(asked.path) if segment[0] >= 0]
    )


def _remembering(names_of: Callable[[Asked], list[bytes]]) -> Router:
    """Return a router that goes where a name went last, else to the least busy server."""
    conversations = RoutedConversations(10**7)
    given = 0

    def route(asked: Asked, servers: Sequence[SimulatedServer]) -> SimulatedServer:
        nonlocal given
        by_name = {server.name: server for server in servers}
        names = names_of(asked)
        name = conversations.find(names, by_name.__contains__)
        if name is None:
            given += 1
            least = min(servers, key=lambda server: (server.busy(asked.now), server.newest))
            least.newest, name = given, least.name
        conversations.note(names, name)
        return by_name[name]

    return route


ROUTERS: dict[str, Callable[[], Router]] = {
    "session": by_session,
    "prefix": by_prefix,
    "random": at_random,
}


@dataclass
class Outcome:
    """What a fleet did.

    Attributes:
        unavoidable: prompt tokens that no server of the fleet had computed before.
        waits_s: of each request, the time to its first token.
    """

    prompt: int = 0
    unavoidable: int = 0
    computed: int = 0
    waits_s: list[float] = field(default_factory=list[float])

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed / self.prompt

    @property
    def efficiency(self) -> float:
        return self.unavoidable / self.computed

    def wait_s(self, share: float) -> float:
        """Return the time to the first token that this share of all requests does not exceed."""
        return sorted(self.waits_s)[min(int(share * len(self.waits_s)), len(self.waits_s) - 1)]


def play(
    sessions: Sequence[Session], agents: int, servers: int, machine: Machine, router: Router, seed: int = 0
) -> Outcome:
    """Let each agent play a session of its own to the end. Sessions are given out in turn."""
    source = random.Random(seed)
    fleet = [SimulatedServer(machine, f"{number}") for number in range(servers)]
    ever, outcome = SegmentCache(), Outcome()
    plays = [sessions[number % len(sessions)] for number in range(agents)]
    paths = [session.paths(number) for number, session in enumerate(plays)]
    due = [(source.uniform(0, START_WITHIN_S), number, 0) for number in range(agents)]
    heapq.heapify(due)
    while due:
        now, agent, at = heapq.heappop(due)
        turn, path = plays[agent].turns[at], paths[agent][at]
        server = router(Asked(now, agent, path), fleet)
        computed = max(turn.prompt - server.cache.read(path), 1)
        outcome.prompt += turn.prompt
        outcome.computed += computed
        outcome.unavoidable += max(turn.prompt - ever.read(path), 1)
        first, end = server.answer(now, computed, turn.reply)
        outcome.waits_s.append(first - now)
        if at + 1 < len(plays[agent].turns):
            heapq.heappush(due, (end + plays[agent].turns[at + 1].wait_s, agent, at + 1))
    return outcome
