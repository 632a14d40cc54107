"""Scenes for a simulated chip: a prompt alone, a prompt beside eight replies, agents at work.

Each scenario gives a row of its table, with what it demands and whether that holds; None where the chip has
no memory for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from start_llm.core.events import Finished
from start_llm.core.limits import DECODE_SHARE, STALL_S
from start_llm.engine.pacing import PACED_EFFICIENCY
from tests.chips.chip_costs import TILE, Cost
from tests.chips.chip_engine import BARE, BARE_CHUNK, OURS, Pacing, SimulatedEngine, Stream, bare_prefill_s

ALONE_TOKENS = (2_000, 20_000, 100_000)
LEAST_OF_BARE = 0.95
PATIENCE = 4
"""A prompt that takes so many times as long as bare is given up: it has no speed."""

REPLIES = 8
CONTEXTS = tuple(4_000 + 16_000 * place // (REPLIES - 1) for place in range(REPLIES))
PROMPT_TOKENS = 20_000
SCALES = (1.0, 0.5, 0.25)
"""By which contexts and prompt are shortened where they do not fit."""
PLANNED_REPLY = 1024
"""Tokens of a reply that the engine wants memory for before it begins."""
SETTLING_STEPS = 64
LEAST_EFFICIENCY = PACED_EFFICIENCY
"""Of a chunk beside replies, in parts of the speed of one of 2,048: no shorter one makes sense."""
SHORTEST_CHUNK = BARE_CHUNK // 16
"""Nor is it shorter than this: too few tokens tell nothing of how long others take."""
TOLERANCE = 1.1
"""For what no plan knows: a chunk's time is predicted, and a window begins within a step."""

AGENTS = (1, 4, 16)
MAX_ROWS = 16
SHARED_TOKENS, NEW_TOKENS, REPLY_TOKENS, TURNS = 12_000, 500, 200, 3
TOOL_S, STAGGER_S = 2.0, 0.5
"""An agent's tools take so long, and agents begin so long one after the other."""


@dataclass(frozen=True)
class Outcome:
    """A row of a table.

    Attributes:
        cells: what was measured, as it is printed.
        failed: demands that did not hold.
    """

    cells: tuple[str, ...]
    failed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """One thing to play.

    Attributes:
        columns: of the table whose rows it gives.
        play: None if the chip has no memory for it.
    """

    name: str
    columns: tuple[str, ...]
    play: Callable[[Cost], Outcome | None]


def fits(cost: Cost, lengths: Sequence[int]) -> bool:
    """True if sequences of these lengths, in tokens, have room side by side."""
    return sum(cost.model.sequence_bytes(length) for length in lengths) <= cost.free_bytes


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


# ------------------------------------------------------------------------------------------------------ alone


def alone(cost: Cost, tokens: int, pacing: Pacing = OURS) -> Outcome | None:
    """The first prompt that an engine gets, with nobody else there, and another one like it."""
    if not fits(cost, [tokens + PLANNED_REPLY]):
        return None
    bare_s = bare_prefill_s(cost, tokens)
    engine = SimulatedEngine(cost, max_sequences=MAX_ROWS, pacing=pacing)
    first_s, next_s = (_ttft_s(engine, owner, tokens, PATIENCE * bare_s) for owner in range(2))
    failed = [
        f"{which} prompt at {bare_s / served_s:.3f} of bare speed"
        for which, served_s in (("first", first_s), ("next", next_s))
        if bare_s / served_s < LEAST_OF_BARE
    ]
    cells = (
        f"{tokens:,}",
        _seconds(bare_s),
        f"{tokens / bare_s:,.0f}",
        _seconds(first_s),
        f"{bare_s / first_s:.3f}",
        f"{bare_s / next_s:.3f}",
    )
    return Outcome(cells, tuple(failed))


def _ttft_s(engine: SimulatedEngine, owner: int, tokens: int, patience_s: float) -> float:
    """Until the reply to a prompt of so many tokens begins; infinite if that takes too long."""
    stream = engine.submit(_own_tokens(owner, tokens), 2)
    return stream.ttft_s if engine.run_until(lambda: stream.ending, patience_s) else float("inf")


# ------------------------------------------------------------------------------------ a prompt beside replies


@dataclass(frozen=True)
class Beside:
    """The effect of eight replies and a prompt that joins them on each other, in virtual seconds.

    Attributes:
        step_s: between two tokens of a reply before the prompt came.
        kept: the least share of its speed that a reply kept while the prompt was computed.
        stall_s: the longest time between two tokens of a reply meanwhile.
        ttft_s: of the prompt.
    """

    step_s: float
    kept: float
    stall_s: float
    ttft_s: float


def running(cost: Cost, pacing: Pacing = OURS) -> Outcome | None:
    """Eight replies are running; a prompt comes."""
    scale = next((scale for scale in SCALES if fits(cost, _lengths(scale))), None)
    if scale is None:
        return None
    *contexts, prompt = (length - PLANNED_REPLY for length in _lengths(scale))
    seen = beside(cost, contexts, prompt, pacing)
    floor = shortest_chunk(cost, prompt)
    floor_s = cost.forward_s(1, floor, prompt - floor)
    limit_s = max(STALL_S, floor_s) + seen.step_s
    bare_s = bare_prefill_s(cost, prompt)
    latest_s = bare_s / LEAST_EFFICIENCY / (1 - DECODE_SHARE)
    failed = [
        *([f"a reply kept {seen.kept:.2f}"] if seen.kept * TOLERANCE < DECODE_SHARE else []),
        *([f"a stall of {_seconds(seen.stall_s)}"] if seen.stall_s > limit_s * TOLERANCE else []),
        *([f"the prompt took {_seconds(seen.ttft_s)}"] if seen.ttft_s > latest_s * TOLERANCE else []),
    ]
    sizes = f"{min(contexts):,} to {max(contexts):,} + {prompt:,}"
    cells = (
        sizes,
        f"{1000 * seen.step_s:.0f} ms",
        f"{seen.kept:.2f}",
        f"{seen.stall_s:.2f} s",
        f"{limit_s:.2f} s",
        f"{floor}: {floor_s:.2f} s",
        _seconds(seen.ttft_s),
        _seconds(latest_s),
        f"{seen.ttft_s / bare_s:.2f}",
    )
    return Outcome(cells, tuple(failed))


def shortest_chunk(cost: Cost, before: int) -> int:
    """Tokens of the shortest chunk that makes sense beside replies, after so many tokens."""
    slowest_s = cost.forward_s(1, BARE_CHUNK, before) / BARE_CHUNK / LEAST_EFFICIENCY
    lengths = range(SHORTEST_CHUNK, BARE_CHUNK + 1, TILE)
    return next(length for length in lengths if cost.forward_s(1, length, before) / length <= slowest_s)


def _lengths(scale: float) -> list[int]:
    return [round(length * scale) + PLANNED_REPLY for length in (*CONTEXTS, PROMPT_TOKENS)]


def beside(cost: Cost, contexts: Sequence[int], prompt: int, pacing: Pacing = OURS) -> Beside:
    engine = SimulatedEngine(cost, max_sequences=MAX_ROWS, pacing=pacing)
    replies = _replies(engine, contexts)
    began_s = engine.device.now
    engine.run_until(lambda: _are_on(replies, began_s, SETTLING_STEPS))
    step_s = (engine.device.now - began_s) / max(row.tokens_between(began_s, float("inf")) for row in replies)
    came_s = engine.device.now
    stream = engine.submit(_own_tokens(len(contexts), prompt), 2)
    engine.run_until(lambda: stream.token_s)
    window_s = engine.device.now - came_s
    tokens = min(reply.tokens_between(came_s, engine.device.now) for reply in replies)
    stall_s = max(gap for reply in replies for gap in reply.gaps(since=came_s))
    return Beside(step_s, tokens * step_s / window_s, stall_s, stream.ttft_s)


def _replies(engine: SimulatedEngine, contexts: Sequence[int]) -> list[Stream]:
    """Replies that begin at once: their prompts are in the cache already."""
    for place, length in enumerate(contexts):
        known = engine.submit(_own_tokens(place, length), 1)
        engine.run_until(lambda known=known: known.ending)
    endless = 100 * SETTLING_STEPS * PLANNED_REPLY
    replies = [engine.submit(_own_tokens(place, length), endless) for place, length in enumerate(contexts)]
    engine.run_until(lambda: all(len(reply.token_s) > 1 for reply in replies))
    return replies


def _are_on(replies: Sequence[Stream], since_s: float, tokens: int) -> bool:
    return all(reply.tokens_between(since_s, float("inf")) >= tokens for reply in replies)


def _own_tokens(owner: int, length: int) -> range:
    """Token ids that nobody else's prompt has."""
    return range((owner + 1) * 10**6, (owner + 1) * 10**6 + length)


# ----------------------------------------------------------------------------------------------------- agents


@dataclass
class Agent:
    """A client that asks, runs a tool on the answer, and asks again with both."""

    number: int
    next_s: float
    prompt: list[int] = field(default_factory=lambda: list(range(SHARED_TOKENS)))
    ends: list[int] = field(default_factory=lambda: [SHARED_TOKENS])
    turns: list[Stream] = field(default_factory=list[Stream])

    @property
    def is_done(self) -> bool:
        return len(self.turns) == TURNS and self.turns[-1].ending is not None

    @property
    def is_waiting(self) -> bool:
        return bool(self.turns) and self.turns[-1].ending is None

    def act(self, engine: SimulatedEngine) -> None:
        """Ask, if it is time to."""
        if not (self.is_done or self.is_waiting) and engine.device.now >= self.next_s:
            first = (self.number + 1) * 10**6 + len(self.prompt)
            self.prompt += range(first, first + NEW_TOKENS)
            self.ends.append(len(self.prompt))
            self.turns.append(engine.submit(self.prompt, REPLY_TOKENS, tuple(self.ends)))

    def take_in(self, now: float) -> None:
        """The reply, which says token 0 all the way; then the tool."""
        self.prompt += [0] * REPLY_TOKENS
        self.ends.append(len(self.prompt))
        self.next_s = now + TOOL_S


@dataclass(frozen=True)
class Work:
    """The work that an engine did for agents.

    Attributes:
        unanswered: turns that failed or never came to an end.
        tokens_s: of replies, in a second.
        efficiency: seconds of the same prompts, alone and in chunks of 2,048, for one that was spent on them.
    """

    ttft_s: list[float]
    stall_s: float
    tokens_s: float
    efficiency: float
    unanswered: int

    @property
    def cells(self) -> tuple[str, ...]:
        median, longest = statistics.median(self.ttft_s), max(self.ttft_s)
        return (
            f"{_seconds(median)} / {_seconds(longest)}",
            _seconds(self.stall_s),
            f"{self.tokens_s:.1f}",
            f"{self.efficiency:.2f}",
        )


def agents(cost: Cost, count: int, pacing: Pacing = OURS) -> Outcome | None:
    """So many agents begin one after the other; beside it, the same in chunks of 2,048."""
    if not fits(cost, [SHARED_TOKENS + TURNS * (NEW_TOKENS + REPLY_TOKENS) + PLANNED_REPLY]):
        return None
    served, bare = work(cost, count, pacing), work(cost, count, BARE)
    is_slow = count == 1 and served.efficiency < LEAST_OF_BARE
    failed = [
        *([f"{served.unanswered} turns without an answer"] if served.unanswered else []),
        *([f"{served.efficiency:.2f} of bare speed"] if is_slow else []),
    ]
    return Outcome((str(count), *served.cells, *bare.cells), tuple(failed))


def work(cost: Cost, count: int, pacing: Pacing) -> Work:
    engine = SimulatedEngine(cost, max_sequences=MAX_ROWS, pacing=pacing)
    party = [Agent(number, number * STAGGER_S) for number in range(count)]
    while not all(agent.is_done for agent in party):
        _wait_for_somebody(engine, party)
        asking = [agent for agent in party if agent.is_waiting]
        engine.step()
        for agent in asking:
            if agent.turns[-1].ending:
                agent.take_in(engine.device.now)
    turns = [stream for agent in party for stream in agent.turns]
    answered = [stream for stream in turns if isinstance(stream.ending, Finished)]
    return Work(
        ttft_s=[stream.ttft_s for stream in answered] or [float("inf")],
        stall_s=max((stream.stall_s for stream in answered), default=float("inf")),
        tokens_s=sum(len(stream.token_s) for stream in turns) / engine.device.now,
        efficiency=sum(_ideal_s(cost, stream) for stream in answered) / engine.device.prefill_s,
        unanswered=len(turns) - len(answered),
    )


def _wait_for_somebody(engine: SimulatedEngine, party: Sequence[Agent]) -> None:
    """Everybody acts whose time has come; if nobody's has, it comes."""
    if not engine.is_busy:
        engine.device.now = max(engine.device.now, min(agent.next_s for agent in party if not agent.is_done))
    for agent in party:
        agent.act(engine)


def _ideal_s(cost: Cost, stream: Stream) -> float:
    """The time of a prompt's own tokens in chunks of 2,048."""
    if not isinstance(stream.ending, Finished):
        return 0.0
    usage = stream.ending.usage
    cuts = [*range(usage.cached, usage.prompt - 1, BARE_CHUNK), usage.prompt - 1]
    return sum(cost.forward_s(1, end - start, start) for start, end in pairwise(cuts))


# -------------------------------------------------------------------------------------------------------- all


ALONE = (
    "chip",
    "model",
    "prompt",
    "bare",
    "tok/s",
    "first token",
    "bare / first prompt",
    "bare / next prompt",
)
RUNNING = (
    *("chip", "model", "contexts + prompt, tokens", "a step alone", "kept", "stall", "allowed"),
    *("shortest chunk", "prompt's first token", "allowed", "times bare"),
)
AGENT = (
    *("chip", "model", "agents", "TTFT median / max", "stall", "tok/s", "prefill efficiency"),
    *("in chunks of 2,048: TTFT median / max", "stall", "tok/s", "prefill efficiency"),
)


def scenarios() -> Iterator[Scenario]:
    """All of them, table by table."""
    for tokens in ALONE_TOKENS:
        yield Scenario(f"alone-{tokens // 1000}k", ALONE, lambda cost, tokens=tokens: alone(cost, tokens))
    yield Scenario("running", RUNNING, running)
    for count in AGENTS:
        yield Scenario(f"agents-{count}", AGENT, lambda cost, count=count: agents(cost, count))
