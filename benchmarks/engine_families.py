"""The engine in this process beside mlx_lm's own loops, family by family: prefill, and decoding behind long prompts.

Served is `Engine.submit` with a prompt cache, as the server has it, and a thread that reads each reply. Bare is
`generate_step` in chunks of 2,048, and `BatchGenerator` for eight rows. Both have the same weights. The models
are small and their vocabulary is large: so long prompts take seconds, and decode steps many milliseconds.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load as bare_load
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

from scripts import tiny_models
from start_llm.cache.eviction import Limits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.events import Ending, Failed, Finished, Text
from start_llm.core.job import Job
from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.engine.engine import Engine, EngineConfig
from start_llm.engine.machinery import Machinery
from start_llm.models.loader import load
from start_llm.telemetry.metrics import CacheMetrics, EngineMetrics

LENGTHS = (2048, 8192)
ROWS = (1, 8)
CHUNK = 2048
REPLY_TOKENS = 48
SKIPPED = 4
"""First tokens of a reply, which are not timed: rows gather, and buffers grow behind the prompt."""
BUDGET = 2**30
PATIENCE_S = 600.0
LEAST_PREFILL, LEAST_DECODE = 0.97, 0.98

_HIDDEN, _LAYERS, _VOCABULARY = 256, 2, 32_768
_PLAIN = {"vocab_size": _VOCABULARY, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 256}
_LATENT = {"head_dim": None, "moe_intermediate_size": 64, "n_routed_experts": 4, "kv_lora_rank": 32}
_LATENT |= {"q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4},
    "glm4_moe_lite": _LATENT,
    "deepseek_v3": _LATENT,
    "qwen3_5": {},
    "gemma3_text": {},
}


@dataclass(frozen=True)
class Rates:
    """Tokens per second of alternating rounds."""

    name: str
    least: float
    bare: list[float]
    served: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(served / bare for bare, served in zip(self.bare, self.served, strict=True))

    @property
    def holds(self) -> bool:
        return self.ratio >= self.least

    def cells(self) -> tuple[str, ...]:
        bare, served = statistics.median(self.bare), statistics.median(self.served)
        mark = "holds" if self.holds else "**fails**"
        return (self.name, f"{bare:,.0f} tok/s", f"{served:,.0f} tok/s", f"{self.ratio:.3f}", f"{self.least} {mark}")


@dataclass
class BareNetwork:
    """mlx_lm's loops, on this thread."""

    network: Any
    _filled: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]])

    def prefill(self, tokens: Sequence[int]) -> float:
        """Prompt tokens per second, until the first token is known."""
        began = time.perf_counter()
        next(generate_step(mx.array(tokens), self.network, max_tokens=1, prefill_step_size=CHUNK))
        return len(tokens) / (time.perf_counter() - began)

    def decode(self, tokens: Sequence[int], rows: int) -> float:
        """Tokens per second of so many rows behind this prompt, which is computed once."""
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

    def _one(self, last: int, caches: list[Any]) -> float:
        steps = generate_step(
            mx.array([last]), self.network, max_tokens=REPLY_TOKENS, prompt_cache=caches
        )
        return _rate([[time.perf_counter() for _ in steps]])

    def _several(self, last: int, caches: list[list[Any]]) -> float:
        generator = BatchGenerator(self.network, max_tokens=REPLY_TOKENS, completion_batch_size=len(caches))
        uids = generator.insert([[last]] * len(caches), caches=caches)
        times: dict[int, list[float]] = {uid: [] for uid in uids}
        while any(len(one) < REPLY_TOKENS for one in times.values()):
            for response in generator.next_generated():
                times[response.uid].append(time.perf_counter())
        generator.close()
        return _rate(list(times.values()))


class ServedNetwork:
    """The engine, on a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prefill(self, tokens: Sequence[int]) -> float:
        began = time.perf_counter()
        return len(tokens) / (self._times(tokens, 1)[0] - began)

    def decode(self, tokens: Sequence[int], rows: int) -> float:
        """The prompts differ in their last token, so all but that are in the cache after the first time."""
        prompts = [[*tokens[:-1], tokens[-1] + row] for row in range(rows)]
        with ThreadPoolExecutor(rows) as pool:
            return _rate(list(pool.map(lambda prompt: self._times(prompt, REPLY_TOKENS), prompts)))

    def _times(self, tokens: Sequence[int], most: int) -> list[float]:
        """When each token of a reply came."""
        generation = self._engine.submit(
            Job(prompt=ModelTokens(tuple(tokens)), max_tokens=most, sampling=Sampling(temperature=0))
        )
        times: list[float] = []
        ending: Ending | None = None
        while ending is None:
            for event in generation.take(PATIENCE_S):
                match event:
                    case Text():
                        times += [time.perf_counter()] * len(event.tokens)
                    case Finished() | Failed():
                        ending = event
                    case _:
                        pass
        if isinstance(ending, Failed):
            raise SystemExit(f"The engine failed: {ending}")
        return times


def _rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second of all replies together, while all of them run."""
    start, end = max(one[SKIPPED] for one in times), min(one[-1] for one in times)
    return sum(start < moment <= end for one in times for moment in one) / (end - start)


def _assembled(folder: Path) -> Machinery:
    """As the server does it, but that each token is a letter: so each one is an event."""
    model = load(folder)
    cache = PromptCache(
        Layers(model.network), limits=Limits(budget_bytes=BUDGET), page_size=256, metrics=CacheMetrics()
    )
    return Machinery(
        network=model.network,
        token_bytes=lambda _: b"a",
        end_tokens=frozenset(),
        most_rows=max(ROWS),
        batches=True,
        cache=cache,
    )


@contextmanager
def _networks(family: str) -> Generator[tuple[BareNetwork, ServedNetwork]]:
    """Both sides of a family, with the same weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_models.build(family, folder, hidden=_HIDDEN, layers=_LAYERS, **(_PLAIN | FAMILIES[family]))
        engine = Engine(EngineConfig(max(ROWS)), lambda: _assembled(folder), EngineMetrics())
        engine.start()
        try:
            yield BareNetwork(bare_load(name)[0]), ServedNetwork(engine)
        finally:
            engine.stop(PATIENCE_S)


def _prompt(length: int, seed: int) -> list[int]:
    """Token ids that are the same in every run, and that no other seed begins with."""
    return [(7919 * (index + 1) * (seed + 3) + seed) % 1500 + 100 for index in range(length)]


def _alternating(bare: Callable[[int], float], served: Callable[[int], float], rounds: int) -> list[list[float]]:
    """Both in turn, each first every other time; one round more, which does not count, warms both up."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        if number % 2:
            second = served(number)
            pairs.append((bare(number), second))
        else:
            pairs.append((bare(number), served(number)))
    return [list(side) for side in zip(*pairs[1:], strict=True)]


def measure(family: str, lengths: Sequence[int], rounds: int) -> Iterator[Rates]:
    """Prefill of each length, and decoding behind it."""
    with _networks(family) as (bare, served):
        seeds = itertools.count(1)
        for length in lengths:
            prompts = {number: _prompt(length, next(seeds)) for number in range(rounds + 1)}
            sides = _alternating(
                lambda number: bare.prefill(prompts[number]), lambda number: served.prefill(prompts[number]), rounds
            )
            yield Rates(f"{family} | {length:,} | prefill", LEAST_PREFILL, *sides)
            for rows in ROWS:
                prompt = prompts[rounds]
                sides = _alternating(
                    lambda _: bare.decode(prompt, rows), lambda _: served.decode(prompt, rows), rounds
                )
                yield Rates(f"{family} | {length:,} | decode, {rows}", LEAST_DECODE, *sides)


def report(families: Sequence[str], lengths: Sequence[int], rounds: int) -> bool:
    """Print a row for each family, length and kind of work. Returns whether all of them hold."""
    print("\n| family | prompt | work | bare mlx_lm | served | served / bare | at least |\n" + "|---" * 7 + "|")
    all_hold = True
    for family in families:
        for rates in measure(family, lengths, rounds):
            print(f"| {' | '.join(rates.cells())} |", flush=True)
            all_hold = all_hold and rates.holds
    return all_hold
