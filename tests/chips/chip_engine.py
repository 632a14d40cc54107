"""The real engine on a simulated chip: scheduler, pacer and cache compute nothing, in virtual time.

The network has caches of mlx_lm's own classes, with one small layer for each kind, so that pages, restores
and batches happen as they do on a real one. Each forward pass moves a virtual clock by what the cost model
says. The engine, its cache and whoever submits requests read that clock and no other.

Bytes are scaled: a token takes `TOKEN_BYTES` in the simulated cache, and every budget is reduced alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import ArraysCache, KVCache

from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Ending, Event, Failed, Finished, Idle, Text
from start_llm.core.limits import TimeLimits
from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission
from start_llm.engine.generation import Generation
from start_llm.engine.inbox import Inbox
from start_llm.engine.loop import EngineLoop
from start_llm.engine.pacing import Chunk, ChunkPacer
from start_llm.engine.resources import EngineResources
from start_llm.engine.start_measurements import measure_work
from start_llm.engine.step_plan import PlanClock
from start_llm.telemetry.metrics import CacheMetrics, EngineMetrics
from tests.chips.chip_costs import Cost

TOKEN_BYTES = 8
"""One key and one value of 32 bits."""
PAGE_TOKENS = 256
"""The default of the setting."""
BARE_CHUNK = 2048
"""mlx_lm's own, and its best."""
_VOCABULARY = 4


class VirtualDevice:
    """A queue of work on an accelerator, in virtual seconds.

    Attributes:
        now: the engine thread's time.
        free_at: when all work that it has submitted is done.
        prefill_s: seconds that the device has worked on prompts.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.free_at = 0.0
        self.prefill_s = 0.0
        self._finished: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def clock(self) -> float:
        return self.now

    def compute(self, seconds: float) -> None:
        """Work that is waited for: a chunk of a prompt. What was submitted before is done first."""
        self.free_at = self.now = max(self.now, self.free_at) + seconds
        self.prefill_s += seconds

    def step(self, group: Any, seconds: float) -> None:
        """A decode step, which runs while the engine thread takes the tokens of the group's step before.

        Args:
            group: what stays the same from step to step; the first step of a new one is waited for.
        """
        self.free_at = max(self.now, self.free_at) + seconds
        self.now = max(self.now, self._finished.get(group, self.free_at))
        self._finished[group] = self.free_at

    def wait(self) -> None:
        """Until all work that was submitted is done."""
        self.now = max(self.now, self.free_at)


class SimulatedNetwork:
    """A stand-in for mlx_lm's network: it fills caches, and moves the clock of its device."""

    def __init__(self, cost: Cost, device: VirtualDevice) -> None:
        self._cost = cost
        self._device = device
        self._shapes: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()

    def make_cache(self) -> list[Any]:
        return [KVCache(), *([ArraysCache(1)] if self.state_numbers else [])]

    @property
    def state_numbers(self) -> int:
        """Of 32 bits, in the simulated state of one sequence."""
        model = self._cost.model
        return round(model.state_bytes / model.attention.token_bytes * TOKEN_BYTES / 4)

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Logits [rows, 1, vocabulary], all alike; they depend on what is cached, as real ones do."""
        rows, length = tokens.shape
        keeper = cache[0]
        after = int(getattr(keeper, "_idx", keeper.offset))
        added = mx.zeros((rows, 1, length, 1))
        keys, values = keeper.update_and_fetch(added, added)
        for states in cache[1:]:
            states[0] = mx.zeros((rows, self.state_numbers)) if states[0] is None else states[0]
        seconds = self._cost.forward_s(rows, length, after) + self._copy_s(keeper, rows, after)
        if length > 1:
            self._device.compute(seconds)
        else:
            self._device.step(keeper, seconds)
        return mx.zeros((rows, 1, _VOCABULARY)) + keys[:, 0, -1:, :] + values[:, 0, -1:, :]

    def _copy_s(self, keeper: Any, rows: int, after: int) -> float:
        """Caches that have grown beyond their arrays, were restored, or are another batch, were copied."""
        before, now = self._shapes.get(keeper), tuple(keeper.keys.shape)
        self._shapes[keeper] = now
        if before == now or not after:
            return 0.0
        model = self._cost.model
        is_other_batch = before is None or before[0] != rows
        state_bytes = model.state_bytes if is_other_batch else 0
        return self._cost.copy_s(rows * (after * model.attention.token_bytes + state_bytes))


def bare_prefill_s(cost: Cost, tokens: int, chunk: int = BARE_CHUNK) -> float:
    """Until the first token of a reply, through the network alone, as mlx_lm drives it."""
    device = VirtualDevice()
    network = SimulatedNetwork(cost, device)
    caches = network.make_cache()
    for start in range(0, tokens - 1, chunk):
        network(mx.zeros((1, min(chunk, tokens - 1 - start))), caches)
        mx.eval([cache.state for cache in caches])
    network(mx.zeros((1, 1)), caches)
    return device.free_at


def tried_chunks(cost: Cost) -> tuple[Chunk, ...]:
    """Return the result of `engine.start_measurements.measure_work` at load."""
    device = VirtualDevice()
    network = SimulatedNetwork(cost, device)
    with mx.stream(generation_stream):
        return measure_work(network, Layers(network), device.clock).chunks


@dataclass
class Stream:
    """A request as its client sees it, in virtual seconds."""

    generation: Generation
    submitted_s: float
    token_s: list[float] = field(default_factory=list[float])
    ending: Ending | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.submitted_s

    @property
    def stall_s(self) -> float:
        """The longest time between two tokens."""
        return max(self.gaps(), default=0.0)

    def gaps(self, since: float = 0.0) -> list[float]:
        """Seconds between two tokens, of which the second came after `since`."""
        pairs = zip(self.token_s, self.token_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > since]

    def tokens_between(self, start: float, end: float) -> int:
        return sum(start < moment <= end for moment in self.token_s)

    def look(self, now: float) -> None:
        """Take what has come."""
        events: list[Event] = self.generation.take(0)
        while not isinstance(events[0], Idle):
            for event in events:
                self._note(event, now)
            events = self.generation.take(0)

    def _note(self, event: Event, now: float) -> None:
        match event:
            case Text():
                self.token_s += [now] * len(event.tokens)
            case Finished() | Failed():
                self.ending = event
            case _:
                pass


@dataclass(frozen=True)
class Pacing:
    """How prompts and replies share the engine: in the server's own way, but for comparisons.

    Attributes:
        pacer: chooses the length of chunks.
    """

    time_limits: TimeLimits = field(default_factory=TimeLimits)
    pacer: Callable[[float], ChunkPacer] = ChunkPacer


class WholeChunks(ChunkPacer):
    """Chunks of 2,048 tokens, whoever waits."""

    def length(self, *_: object, **__: object) -> int:
        return BARE_CHUNK


OURS = Pacing()
BARE = Pacing(TimeLimits(decode_share=1e-6), WholeChunks)
"""Whole chunks, and one decode step after each."""


class SimulatedEngine:
    """An EngineLoop and a prompt cache on one simulated chip, stepped by whoever holds it."""

    def __init__(self, cost: Cost, *, max_sequences: int, pacing: Pacing = OURS) -> None:
        self.cost = cost
        self.device = VirtualDevice()
        self.metrics = EngineMetrics()
        self._inbox = Inbox()
        self._streams: list[Stream] = []
        resources = self._resources(SimulatedNetwork(cost, self.device), max_sequences, pacing.time_limits)
        with mx.stream(generation_stream):
            self._loop = EngineLoop(resources, self._inbox, self.metrics)
        # Nothing else in the server has to reach these two.
        if pacing.pacer is not ChunkPacer:
            self._loop.time._pacer = pacing.pacer(pacing.time_limits.chunk_s)  # pyright: ignore[reportPrivateUsage]
        self._loop.executor.wait_for_steps = self.device.wait  # pyright: ignore[reportPrivateUsage]

    def _resources(
        self, network: SimulatedNetwork, max_sequences: int, time_limits: TimeLimits
    ) -> EngineResources:
        scale = TOKEN_BYTES / self.cost.model.attention.token_bytes
        room = int(self.cost.free_bytes * scale)
        clock = PlanClock(self.device.clock)
        cache = PromptCache(
            Layers(network),
            limits=EvictionLimits(budget_bytes=room),
            page_size=PAGE_TOKENS,
            metrics=CacheMetrics(),
            clock=clock,
        )
        return EngineResources(
            network=network,
            token_bytes=lambda _: b"a",
            eos_token_ids=frozenset(),
            max_sequences=max_sequences,
            batches=True,
            cache=cache,
            clock=clock,
            time_limits=time_limits,
            measured=tried_chunks(self.cost),
            admission=Admission(room, SequenceCost(TOKEN_BYTES, state_bytes=4 * network.state_numbers)),
        )

    @property
    def is_busy(self) -> bool:
        return any(stream.ending is None for stream in self._streams)

    def submit(self, prompt: Iterable[int], max_tokens: int, boundaries: tuple[int, ...] = ()) -> Stream:
        engine_request = EngineRequest(
            prompt=ModelTokens(tuple(prompt)),
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0),
            boundaries=boundaries,
        )
        stream = Stream(Generation(engine_request), self.device.now)
        self._streams.append(stream)
        self._inbox.put(stream.generation)
        return stream

    def step(self) -> None:
        """One step of the loop. An idle loop has nothing to do."""
        with mx.stream(generation_stream):
            self._loop.step()
        for stream in self._streams:
            stream.look(self.device.now)
        self._streams = [stream for stream in self._streams if stream.ending is None]

    def run_until(self, condition: Callable[[], object], patience_s: float = float("inf")) -> bool:
        """Step until it holds. False if that takes more than so many virtual seconds."""
        latest = self.device.now + patience_s
        while not condition():
            if self.device.now > latest:
                return False
            self.step()
        return True
