"""Shared by the parts of `cache.py`: tiny models, an engine with a cache, rows of the table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from benchmarks.harness import row, table
from benchmarks.networks import FAMILIES, resources_of
from scripts import tiny_models
from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.events import Finished
from start_llm.engine.pacing import LONGEST_CHUNK
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from start_llm.telemetry.metrics import CacheMetrics
from tests.engine.harness import Stepper, Watched, engine_request

PAGE = 256
"""Tokens of a page: the default of the setting."""
PLENTY = 10**12
CHUNK = 512
REPLY_TOKENS = 8
TAIL_TOKENS = 4
"""Tokens after the last message: they open the reply."""
VOCABULARY = 1500
MAX_STEPS = 100_000


USUAL_FAMILIES = ("dense", "hybrid", "sliding")
type Families = Annotated[Sequence[str], FAMILIES]


@dataclass(frozen=True)
class Size:
    """The size of a tiny model, beside its family."""

    hidden: int
    layers: int
    config: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        settings = "".join(f", {key} {value}" for key, value in self.config.items())
        return f"hidden {self.hidden}, {self.layers} layers{settings}"


SMALL, FOUR_LAYERS, USUAL = Size(64, 2), Size(64, 4), Size(256, 4)


@dataclass(frozen=True)
class Model:
    """A tiny model in this process. Its replies are as long as they are asked to be."""

    family: str
    size: Size
    resources: EngineResources
    layers: Layers

    @property
    def network(self) -> Any:
        return self.resources.network

    def compute(self, ids: Sequence[int], caches: list[Any], chunk: int = CHUNK) -> None:
        """Prefill without an engine."""
        for start in range(0, len(ids), chunk):
            self.network(mx.array([ids[start : start + chunk]]), cache=caches)
            mx.eval([cache.state for cache in caches])
            mx.clear_cache()

    def bytes_of(self) -> Bytes:
        caches = self.layers.fresh()
        self.compute(prompt(PAGE), caches)
        return Bytes(
            self.layers.view(caches, 0, PAGE).nbytes // PAGE if self.layers.has_trimmable else 0,
            self.layers.state(caches).nbytes,
        )


@dataclass(frozen=True)
class Bytes:
    """The memory of a model's caches: for each token, and once (windows that are full, recurrent layers)."""

    token: int
    state: int

    def of(self, tokens: int) -> int:
        return self.token * tokens + self.state


def models(folder: Path, families: Sequence[str], size: Size) -> Iterator[Model]:
    """A model of each family, one after the other."""
    return (build(folder / f"{family} {size}", FAMILIES[family], size) for family in families)


def build(folder: Path, family: str, size: Size) -> Model:
    tiny_models.build(family, folder, hidden=size.hidden, layers=size.layers, **size.config)
    loaded = load(folder)
    return Model(family, size, resources_of(loaded), Layers(loaded.network))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids that are the same in every run."""
    chosen = random.Random(seed)
    return tuple(chosen.randrange(VOCABULARY) for _ in range(length))


class CachedEngine(Stepper):
    """An engine loop with a prompt cache, on this thread. `after_step` is called after every step."""

    def __init__(
        self,
        model: Model,
        budget: int = PLENTY,
        *,
        page_size: int = PAGE,
        network: Any = None,
        batches: bool = True,
        longest_chunk: int = LONGEST_CHUNK,
        **changes: Any,
    ) -> None:
        self.layers = model.layers
        self.cached = CacheMetrics()
        self.cache = PromptCache(
            model.layers, limits=EvictionLimits(budget_bytes=budget), page_size=page_size, metrics=self.cached
        )
        self.after_step: Callable[[], None] = lambda: None
        resources = replace(model.resources, cache=self.cache, batches=batches)
        super().__init__(resources, longest_chunk=longest_chunk, network=network or model.network, **changes)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            super().step()
            self.after_step()

    def live_bytes(self) -> int:
        """Caches of running rows, and of batches with their padding."""
        live = self.cache._store.active_usage  # pyright: ignore[reportPrivateUsage]
        return live.nbytes + self.cache.batched_bytes


class Conversation:
    """A growing prompt with its messages."""

    def __init__(self, engine: CachedEngine, system: Sequence[int] = ()) -> None:
        self.engine = engine
        self.ids = tuple(system)
        self._ends = [len(system)] if system else []

    def submit(self, new: Sequence[int]) -> Watched:
        """Ask with these tokens more; the last of them open the reply."""
        self.ids += tuple(new)
        self._ends.append(len(self.ids) - TAIL_TOKENS)
        return self.engine.submit(engine_request(self.ids, REPLY_TOKENS, boundaries=tuple(self._ends)))

    def finish(self, watched: Watched) -> int:
        """Take the reply in. Returns how many tokens of the prompt were computed."""
        self.engine.finish(watched, max_steps=MAX_STEPS)
        if not isinstance(watched.ending, Finished):
            raise SystemExit(f"The engine failed: {watched.ending}")
        self.ids += tuple(watched.tokens)
        return watched.ending.usage.prompt - watched.ending.usage.cached

    def ask(self, new: Sequence[int]) -> int:
        return self.finish(self.submit(new))


def marks[**Options](part: Callable[Options, None]) -> Callable[Options, None]:
    """A part that prints rows of the table of marks, and computes where the engine does."""

    @wraps(part)
    def run(*arguments: Options.args, **options: Options.kwargs) -> None:
        table("mark | family | size | measured | limit")
        with mx.stream(generation_stream):
            part(*arguments, **options)

    return run


def mark(name: str, model: Model | str, case: str, measured: str, limit: str = "") -> None:
    """Print a row."""
    family, size = (model, case) if isinstance(model, str) else (model.family, f"{case}; {model.size}")
    row(name, family, size, measured, limit)
