"""An engine loop that a test steps itself, and networks that watch or break a forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.cache.layers import Layers
from start_llm.cache.pages import PageTree, SequenceCache
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Ending, Event, Failed, Finished, Idle, Prefilling, Text
from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.engine.decoder import Decoder
from start_llm.engine.generation import Generation
from start_llm.engine.inbox import Inbox
from start_llm.engine.loop import EngineLoop
from start_llm.engine.resources import EngineResources
from start_llm.engine.sequence import Sampled
from start_llm.engine.step_plan import PlanClock
from start_llm.telemetry.metrics import EngineMetrics

GREEDY = Sampling(temperature=0)
CHUNK = 64
"""Tokens. Prompts of tests are short, and many of them look at what happens between two chunks."""


def engine_request(
    prompt: Sequence[int], max_tokens: int = 8, sampling: Sampling = GREEDY, **more: Any
) -> EngineRequest:
    return EngineRequest(prompt=ModelTokens(tuple(prompt)), max_tokens=max_tokens, sampling=sampling, **more)


class Undrafted:
    """A guide's answers on drafts where none of its reply is drafted."""

    def forced(self) -> Sequence[int]:
        return ()

    def count_allowed(self, tokens: Sequence[int]) -> int:
        del tokens
        return 0

    def go_back(self, kept: int) -> None:
        raise AssertionError(f"nothing was drafted of which {kept} tokens are kept")


def standing_still() -> float:
    """A clock under which one step is taken between two chunks, however fast the machine is."""
    return 0.0


def uncached_resources(
    network: Any,
    token_bytes: Callable[[int], bytes],
    eos_token_ids: frozenset[int],
    max_sequences: int,
    batches: bool,
    **more: Any,
) -> EngineResources:
    """Return resources whose cache keeps nothing."""
    cache = PromptCache(Layers(network))
    return EngineResources(network, token_bytes, eos_token_ids, max_sequences, batches, cache, **more)


def seq_cache_of(caches: list[Any]) -> SequenceCache:
    """Return a sequence's cache where nothing is reused."""
    return SequenceCache(caches, PageTree(1).root(b""))


@dataclass
class Watched:
    """A generation and what it has said so far."""

    generation: Generation
    seen: list[Event] = field(default_factory=list)

    def look(self) -> list[Event]:
        events = self.generation.take(0)
        self.seen += [event for event in events if not isinstance(event, Idle)]
        return self.seen

    def wait(self, seconds: float = 30) -> Ending:
        """Its end, made by an engine thread."""
        while self.ending is None:
            events = self.generation.take(seconds)
            assert not isinstance(events[0], Idle), f"nothing for {seconds} seconds"
            self.seen += events
        return self.ending

    @property
    def ending(self) -> Ending | None:
        last = self.seen[-1] if self.seen else None
        return last if isinstance(last, Finished | Failed) else None

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.look() if isinstance(event, Text) for token in event.tokens]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.look() if isinstance(event, Text))

    @property
    def progress(self) -> list[tuple[int, int]]:
        return [(event.done, event.total) for event in self.look() if isinstance(event, Prefilling)]


def join_next(decoder: Decoder) -> None:
    """Let the queued sequences that join one group next start there."""
    joining, partner = decoder.next_to_join()
    decoder.join_next(len(joining), partner)


def stepped(decoder: Decoder) -> list[Sampled]:
    """A step of all sequences, as the loop takes it."""
    while decoder.queued:
        join_next(decoder)
    return [sample for group in decoder.groups for sample in group.step()]


class Stepper:
    """An EngineLoop on the test's own thread: nothing happens between two calls of `step`.

    Args:
        longest_chunk: tokens that are computed at once.
    """

    def __init__(
        self,
        resources: EngineResources,
        clock: Callable[[], float] | PlanClock = standing_still,
        longest_chunk: int = CHUNK,
        **changes: Any,
    ) -> None:
        self.clock = clock
        plan_clock = clock if isinstance(clock, PlanClock) else PlanClock(clock)
        self.metrics = EngineMetrics()
        self._work_event = threading.Event()
        self.inbox = Inbox(self._work_event)
        self._resources = replace(
            resources, longest_chunk=lambda _: longest_chunk, clock=plan_clock, **changes
        )
        if not self._resources.cache.supports_reuse:
            cache = PromptCache(Layers(self._resources.network))  # it makes the caches of this network
            self._resources = replace(self._resources, cache=cache)
        self.start_loop()

    def start_loop(self) -> None:
        """One that does not know the machine's speed. The one before it must have nothing left to do."""
        with mx.stream(generation_stream):
            self.loop = EngineLoop(self._resources, self.inbox, self.metrics)

    @property
    def is_busy(self) -> bool:
        """True if anybody was left after the last step."""
        return bool(self.metrics.waiting or self.metrics.active_sequences or self.metrics.prefill)

    def submit(self, asked: EngineRequest) -> Watched:
        watched = Watched(Generation(asked))
        self.inbox.put(watched.generation)
        return watched

    def step(self, times: int = 1) -> None:
        """Run steps. If there is no work yet, wait first until something comes in, or is due."""
        with mx.stream(generation_stream):
            for _ in range(times):
                self._work_event.clear()
                self._work_event.wait(self.loop.rest_s or 0)
                self.loop.step()

    def finish(self, *all_watched: Watched, max_steps: int = 2000) -> None:
        """Step until every one of these has ended."""
        for _ in range(max_steps):
            if all(watched.look() and watched.ending for watched in all_watched):
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def step_until(self, condition: Callable[[], object], max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"not so after {max_steps} steps")


class Wrapped:
    """A network that shows every forward pass to `before`, which may raise."""

    def __init__(self, network: Any, before: Callable[[tuple[int, ...]], None]) -> None:
        self._network = network
        self._before = before

    def __call__(self, tokens: mx.array, *rest: Any, **more: Any) -> mx.array:
        self._before(tuple(tokens.shape))
        return self._network(tokens, *rest, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class Breakdown(Exception):
    """The error that the tests' networks raise."""


class FailsOnce:
    """Raises at the `nth` forward pass (from 1) for which `concerns` holds of its shape [sequences,
    tokens].
    """

    def __init__(self, concerns: Callable[[tuple[int, ...]], bool], nth: int = 1) -> None:
        self._concerns = concerns
        self._left = nth

    def __call__(self, shape: tuple[int, ...]) -> None:
        if not self._concerns(shape):
            return
        self._left -= 1
        if self._left == 0:
            raise Breakdown("broken on purpose")
