"""The engine in this process beside mlx_lm's own loops, family by family: a part of `engine.py`.

Served is `Engine.submit` with a prompt cache, as the server has it, and a thread that reads each reply. Bare
is `generate_step` in chunks of 2,048, and `BatchGenerator` for eight rows. Both have the same weights. The
models are small and their vocabulary is large: so long prompts take seconds, and decode steps milliseconds.

Speeds are told by the clock, which decides, and by the processor time of all threads of this process, which
says more where others share the machine. Ratios are those of each side's fastest round.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import mlx.core as mx
from mlx_lm import load as bare_load
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.harness import alternate, row, table
from scripts import tiny_models
from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Ending, Failed, Finished, Text
from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.engine.engine import Engine
from start_llm.engine.resources import EngineResources
from start_llm.engine.start_measurements import measure_work
from start_llm.models.loader import load
from start_llm.telemetry.metrics import CacheMetrics, EngineMetrics

ROWS = (1, 8)
CHUNK = 2048
REPLY_TOKENS = 48
SKIPPED = 4
"""First tokens of a reply, which are not timed: rows gather, and buffers grow after the prompt."""
BUDGET = 2**30
PATIENCE_S = 600.0
LEAST_PREFILL, LEAST_DECODE = 0.97, 0.98

_HIDDEN, _LAYERS, _VOCABULARY = 256, 2, 32_768
_PLAIN = {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 256}
_LATENT = {"head_dim": None, "moe_intermediate_size": 64, "n_routed_experts": 4, "kv_lora_rank": 32}
_RANKS = {"q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4},
    "glm4_moe_lite": _LATENT | _RANKS,
    "deepseek_v3": _LATENT | _RANKS,
    "qwen3_5": {},
    "gemma3_text": {},
}


class Stamp(NamedTuple):
    """A moment, in seconds: by the clock, and of processor time."""

    wall: float
    cpu: float


class Speed(NamedTuple):
    """Tokens per second, by the clock and of processor time."""

    wall: float
    cpu: float


def _now() -> Stamp:
    return Stamp(time.perf_counter(), time.process_time())


def _speed(tokens: int, start: Stamp, end: Stamp) -> Speed:
    return Speed(tokens / (end.wall - start.wall), tokens / (end.cpu - start.cpu))


@dataclass(frozen=True)
class Rates:
    """Alternating rounds: the bare speed and ours of each."""

    name: str
    least: float
    rounds: Sequence[tuple[Speed, ...]]

    @property
    def fastest(self) -> list[Speed]:
        """Of both sides: what else the machine does only ever slows a side down."""
        return [Speed(*map(max, zip(*side, strict=True))) for side in zip(*self.rounds, strict=True)]

    @property
    def ratio(self) -> float:
        bare, served = self.fastest
        return served.wall / bare.wall

    @property
    def cpu_ratio(self) -> float:
        bare, served = self.fastest
        return served.cpu / bare.cpu

    @property
    def holds(self) -> bool:
        return self.ratio >= self.least

    def cells(self) -> tuple[str, ...]:
        speeds = (f"{reading.wall:,.0f} tok/s" for reading in self.fastest)
        mark = "holds" if self.holds else "**fails**"
        return self.name, *speeds, f"{self.ratio:.3f}", f"{self.cpu_ratio:.3f}", f"{self.least} {mark}"


@dataclass
class BareNetwork:
    """mlx_lm's loops, on this thread."""

    network: Any
    _filled: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]])

    def prefill(self, prompts: Sequence[Sequence[int]], number: int) -> Speed:
        """Of a prompt, until the first token is known."""
        tokens, began = prompts[number], _now()
        next(generate_step(mx.array(list(tokens)), self.network, max_tokens=1, prefill_step_size=CHUNK))
        return _speed(len(tokens), began, _now())

    def decode(self, tokens: Sequence[int], rows: int, _: int) -> Speed:
        """Of so many rows together after this prompt, which is computed once."""
        caches = [copy.deepcopy(self._caches(tokens)) for _ in range(rows)]
        return self._one(tokens[-1], caches[0]) if rows == 1 else self._several(tokens[-1], caches)

    def _caches(self, tokens: Sequence[int]) -> list[Any]:
        """Of all tokens but the last one."""
        if len(tokens) not in self._filled:
            caches: list[Any] = make_prompt_cache(self.network)
            for start in range(0, len(tokens) - 1, CHUNK):
                self.network(mx.array([tokens[start : min(start + CHUNK, len(tokens) - 1)]]), cache=caches)
                mx.eval([cache.state for cache in caches])
            self._filled[len(tokens)] = caches
        return self._filled[len(tokens)]

    def _one(self, last: int, caches: list[Any]) -> Speed:
        steps = generate_step(mx.array([last]), self.network, max_tokens=REPLY_TOKENS, prompt_cache=caches)
        return _rate([[_now() for _ in steps]])

    def _several(self, last: int, caches: list[list[Any]]) -> Speed:
        generator = BatchGenerator(self.network, max_tokens=REPLY_TOKENS, completion_batch_size=len(caches))
        uids = generator.insert([[last]] * len(caches), caches=caches)
        times: dict[int, list[Stamp]] = {uid: [] for uid in uids}
        while any(len(moments) < REPLY_TOKENS for moments in times.values()):
            for response in generator.next_generated():
                times[response.uid].append(_now())
        generator.close()
        return _rate(list(times.values()))


class ServedNetwork:
    """The engine, on a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prefill(self, prompts: Sequence[Sequence[int]], number: int) -> Speed:
        tokens, began = prompts[number], _now()
        return _speed(len(tokens), began, self._times(tokens, 1)[0])

    def decode(self, tokens: Sequence[int], rows: int, _: int) -> Speed:
        """The prompts differ in their last token, so all but that are in the cache after the first time."""
        prompts = [[*tokens[:-1], tokens[-1] + row] for row in range(rows)]
        with ThreadPoolExecutor(rows) as pool:
            return _rate(list(pool.map(lambda prompt: self._times(prompt, REPLY_TOKENS), prompts)))

    def _times(self, tokens: Sequence[int], most: int) -> list[Stamp]:
        """When each token of a reply came. State is kept before the last token of the prompt."""
        generation = self._engine.submit(
            EngineRequest(
                prompt=ModelTokens(tuple(tokens)),
                boundaries=(len(tokens) - 1,),
                max_tokens=most,
                sampling=Sampling(temperature=0),
            )
        )
        times: list[Stamp] = []
        ending: Ending | None = None
        while ending is None:
            for event in generation.take(PATIENCE_S):
                match event:
                    case Text():
                        times += [_now()] * len(event.tokens)
                    case Finished() | Failed():
                        ending = event
                    case _:
                        pass
        if isinstance(ending, Failed):
            raise SystemExit(f"The engine failed: {ending}")
        return times


def _rate(times: Sequence[Sequence[Stamp]]) -> Speed:
    """Of all replies together, while all of them run."""
    start, end = max(moments[SKIPPED] for moments in times), min(moments[-1] for moments in times)
    if end <= start:
        raise SystemExit("Some replies had ended before the last one began.")
    return _speed(sum(start < moment <= end for moments in times for moment in moments), start, end)


def _assembled(folder: Path) -> EngineResources:
    """As the server does it, but that each token is a letter: so each one is an event."""
    model = load(folder)
    layers = Layers(model.network)
    cache = PromptCache(
        layers, limits=EvictionLimits(budget_bytes=BUDGET), page_size=256, metrics=CacheMetrics()
    )
    return EngineResources(
        network=model.network,
        token_bytes=lambda _: b"a",
        eos_token_ids=frozenset(),
        max_sequences=max(ROWS),
        batches=True,
        cache=cache,
        measured=measure_work(model.network, layers).chunks,
    )


@contextmanager
def _networks(family: str, vocabulary: int) -> Generator[tuple[BareNetwork, ServedNetwork]]:
    """Both sides of a family, with the same weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config: dict[str, Any] = _PLAIN | FAMILIES[family] | {"vocab_size": vocabulary}
        tiny_models.build(family, folder, hidden=_HIDDEN, layers=_LAYERS, **config)
        engine = Engine(lambda: _assembled(folder), EngineMetrics(), max_waiting=max(ROWS))
        engine.start()
        try:
            yield BareNetwork(bare_load(name)[0]), ServedNetwork(engine)
        finally:
            engine.stop(PATIENCE_S)


def _prompt(length: int, seed: int) -> list[int]:
    """Token ids that are the same in every run, and that no other seed begins with."""
    return [(7919 * (index + 1) * (seed + 3) + seed) % 1500 + 100 for index in range(length)]


def measure(
    family: str, lengths: Sequence[int], rounds: int, vocabulary: int = _VOCABULARY
) -> Iterator[Rates]:
    """Prefill of each length, and decoding after it."""
    with _networks(family, vocabulary) as (bare, served):
        for length in lengths:
            prompts = [_prompt(length, length + number) for number in range(rounds + 1)]
            name = f"{family} | {length:,}"
            reading = (partial(side.prefill, prompts) for side in (bare, served))
            yield Rates(f"{name} | prefill", LEAST_PREFILL, alternate(rounds, *reading, warm_up=1))
            for rows in ROWS:
                writing = (partial(side.decode, prompts[-1], rows) for side in (bare, served))
                yield Rates(f"{name} | decode, {rows}", LEAST_DECODE, alternate(rounds, *writing, warm_up=1))


def families(
    _: Path,
    *,
    families: Annotated[Sequence[str], FAMILIES] = tuple(FAMILIES),
    lengths: Sequence[int] = (2048, 8192),
    rounds: int = 9,
) -> Iterator[str]:
    """Prefill and decoding of each family after prompts of each length, without HTTP.

    0.97 of the bare speed of prefill and 0.98 of decoding, at one row and at eight, are demanded. With 9
    rounds a family after 2,048 tokens takes about a minute on two idle cores, and the time grows with the
    square of the length.
    """
    table("family | prompt | work | bare mlx_lm | served | served / bare | by CPU time | at least")
    for family in families:
        for rates in measure(family, lengths, rounds):
            row(*rates.cells())
            if not rates.holds:
                yield f"{rates.name}: {rates.ratio:.3f}, and not {rates.least}"
