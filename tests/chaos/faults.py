"""Faults planted in a running application, and a record of every reply that its engine makes."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx

from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Ending, Event, Failed, Finished, Restored, Text
from start_llm.core.prompt import ModelTokens
from start_llm.engine.cache_probe import CacheProbe
from start_llm.engine.engine import Engine
from start_llm.engine.generation import Generation
from start_llm.engine.resources import EngineResources
from tests.engine.harness import GREEDY, Breakdown

ON_PURPOSE = "broken on purpose"
_ANY_JOB = EngineRequest(prompt=ModelTokens((0, 0)), max_tokens=1, sampling=GREEDY)
_PATIENCE_S = 60

type Shape = tuple[int, ...]

STEPS: dict[str, Callable[[Shape], bool]] = {
    "a chunk": lambda shape: shape[1] > 1,
    "a row": lambda shape: shape == (1, 1),
    "a batch": lambda shape: shape[0] > 1,
}
"""Forward passes by the shape of their tokens, [rows, tokens]."""
PLACES = (*(f"{when} {step}" for step in STEPS for when in ("before", "after")), "in the text")


@dataclass(eq=False)
class Record:
    """One request, as the engine sees it."""

    engine_request: EngineRequest
    tokens: list[int] = field(default_factory=list[int])
    ending: Ending | None = None

    @property
    def is_greedy(self) -> bool:
        return self.engine_request.sampling == GREEDY


class Recorded(Generation):
    """A generation that notes what it receives."""

    def __init__(self, engine_request: EngineRequest) -> None:
        super().__init__(engine_request)
        self.record = Record(engine_request)

    def hold(self, events: Iterable[Event]) -> None:
        held = list(events)
        for event in held:
            match event:
                case Text():
                    self.record.tokens += event.tokens
                case Finished() | Failed():
                    self.record.ending = event
                case _:
                    pass
        super().hold(held)


class Faults:
    """The faults to cause, and their times.

    Args:
        poison: the network raises whenever it is fed this token.
        slowness_s: for which each forward pass sleeps, as a larger one would compute.

    Attributes:
        fired: by place; each of them once.
        poisoned: forward passes that met the poison.
        records: of all requests, in the order of their arrival.
    """

    def __init__(self, poison: int, slowness_s: float) -> None:
        self.fired = Counter[str]()
        self.poisoned = 0
        self.records: list[Record] = []
        self.cache: Any = None
        self.poison = poison
        self._slowness_s = slowness_s
        self._planted: list[str] = []
        self._suspects: list[Recorded] = []
        self._lock = threading.Lock()

    def plant(self, place: str) -> None:
        """Break the next forward pass, or token, of this kind."""
        with self._lock:
            self._planted.append(place)

    def clear(self) -> None:
        with self._lock:
            self._planted.clear()

    def strike(self, place: str) -> None:
        """Raise Breakdown if this place was planted."""
        with self._lock:
            if place not in self._planted:
                return
            self._planted.remove(place)
            self.fired[place] += 1
        raise Breakdown(f"{ON_PURPOSE}: {place}")

    def taste(self, tokens: mx.array) -> None:
        """Raise Breakdown at the poison.

        Steps of a reply are looked at only while the poison is on its way: to read what was sampled is to
        wait for it, which the engine does not.
        """
        time.sleep(self._slowness_s)
        is_checked = tokens.shape[1] > 1 or self._is_on_its_way()
        if is_checked and self.poison in cast("list[int]", tokens.flatten().tolist()):
            self.poisoned += 1
            raise Breakdown(f"{ON_PURPOSE}: poison")

    def _is_on_its_way(self) -> bool:
        self._suspects = [entry for entry in self._suspects if not (entry.cancelled or entry.record.ending)]
        return bool(self._suspects)

    def _note(self, engine_request: EngineRequest) -> Recorded:
        generation = Recorded(engine_request)
        self.records.append(generation.record)
        if self.poison in engine_request.prompt.ids:
            self._suspects = [*self._suspects, generation]
        return generation

    def is_poisoned(self, record: Record) -> bool:
        return self.poison in record.engine_request.prompt.ids

    @contextmanager
    def planted(self) -> Generator[None]:
        """Every application that starts now is breakable."""
        with (
            patch("start_llm.hosting.model_loading.EngineResources", self._resources),
            patch("start_llm.engine.engine.Generation", self._note),
        ):
            yield

    def _resources(self, **parts: Any) -> EngineResources:
        made = EngineResources(**parts)
        self.cache = made.cache

        def token_bytes(token: int) -> bytes:
            self.strike("in the text")
            return made.token_bytes(token)

        return replace(made, network=_Breakable(made.network, self), token_bytes=token_bytes)


class _Breakable:
    def __init__(self, network: Any, faults: Faults) -> None:
        self._network = network
        self._faults = faults

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        steps = [step for step, concerns in STEPS.items() if concerns(tuple(tokens.shape))]
        self._faults.taste(tokens)
        for step in steps:
            self._faults.strike(f"before {step}")
        logits = self._network(tokens, cache=cache)
        for step in steps:
            self._faults.strike(f"after {step}")
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class _Errand(CacheProbe):
    """Something to do on the engine thread, between two steps."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__(_ANY_JOB)
        self._run = run
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def answer(self, restored: Restored | None) -> None:
        try:
            self._done.put(self._run() if restored else AssertionError("the cache does not answer"))
        except AssertionError as error:
            self._done.put(error)

    def result(self) -> Any:
        done = self._done.get(timeout=_PATIENCE_S)
        if isinstance(done, AssertionError):
            raise done
        return done


def on_engine_thread[T](engine: Engine, run: Callable[[], T]) -> T:
    """Return the result of `run` there.

    Raises:
        AssertionError: `run` did.
    """
    errand = _Errand(run)
    engine._inbox.put(errand)
    return errand.result()


def emptied(cache: PromptCache) -> int:
    """Bytes that MLX holds once everything has gone that may go."""
    cache.shrink(2**62)
    mx.clear_cache()
    return mx.get_active_memory()
