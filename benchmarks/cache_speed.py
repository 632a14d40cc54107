"""The speed of the prompt cache: parts of `cache.py`."""

import ctypes
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from benchmarks.cache_engine import (
    PAGE,
    PLENTY,
    REPLY_TOKENS,
    SMALL,
    USUAL,
    USUAL_FAMILIES,
    CachedEngine,
    Conversation,
    Families,
    Model,
    mark,
    marks,
    models,
    prompt,
)
from benchmarks.harness import medians, ratio
from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.opening import OpenedSequence
from start_llm.cache.plan import plan_restore
from start_llm.cache.prompt_cache import PromptCache
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.fakes import FakeLayers
from tests.engine.harness import Wrapped

NEW_TOKENS = 200
FORKS = 11
LOOKUP_CHUNK = 512
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
STATES = {"attention": (False, 0), "with state": (True, 1000), "one early state": (True, 1)}
"""True if the caches have state; and at how many stops of a prefill it was kept and is still there."""


# ------------------------------------------------------------------------------------------------------- ttft


@marks
def ttft(
    folder: Path,
    *,
    family: Families = USUAL_FAMILIES,
    lengths: Sequence[int] = (8192, 32_768),
    rounds: int = 10,
) -> None:
    """A conversation grows: the time to its first token, beside mlx_lm on a cache that is ready.

    Through the engine loop, and through mlx_lm in chunks as long as the engine's longest one. Both take
    turns; the median of their ratios.

    Args:
        lengths: of prompts, in tokens
    """
    for model in models(folder, family, USUAL):
        for length in lengths:
            _warm_turns(model, length, rounds)


def _warm_turns(model: Model, length: int, rounds: int) -> None:
    chunks: list[int] = []
    engine = CachedEngine(model, network=Wrapped(model.network, lambda shape: chunks.append(shape[-1])))
    conversation, caches = Conversation(engine), model.layers.fresh()
    conversation.ask(prompt(length))
    model.compute(prompt(length + REPLY_TOKENS), caches)
    pairs: list[tuple[float, float]] = []
    for seed in range(rounds + 1):
        chunks.clear()
        new = prompt(NEW_TOKENS, seed)
        ours = _served(conversation, new)
        pairs.append((ours, _bare(model, caches, new, max(chunks))))
    ours, bare = (1000 * seconds for seconds in medians(pairs[1:]))
    size = f"{length:,} + {NEW_TOKENS} a turn, median of {rounds}"
    measured = f"{ratio(pairs[1:]):.3f} ({ours:.1f} ms beside {bare:.1f} ms)"
    mark("warm TTFT / bare mlx_lm", model, size, measured, "<= 1.15")


def _served(conversation: Conversation, new: Sequence[int]) -> float:
    """Seconds to the first token; then the rest of the reply."""
    began = time.perf_counter()
    watched = conversation.submit(new)
    conversation.engine.step_until(lambda: watched.tokens)
    seconds = time.perf_counter() - began
    if (computed := conversation.finish(watched)) != len(new):
        raise SystemExit(f"The engine computed {computed} tokens of a turn with {len(new)} new ones.")
    return seconds


def _bare(model: Model, caches: list[Any], new: Sequence[int], chunk: int) -> float:
    """The same through mlx_lm's own loop, in chunks of the same length."""
    began = time.perf_counter()
    steps = generate_step(
        mx.array(list(new)),
        model.network,
        max_tokens=REPLY_TOKENS,
        prompt_cache=caches,
        prefill_step_size=chunk,
    )
    next(steps)
    seconds = time.perf_counter() - began
    list(steps)
    return seconds


# ---------------------------------------------------------------------------------------------------- restore


@marks
def restore(
    folder: Path,
    *,
    family: Families = USUAL_FAMILIES,
    lengths: Sequence[int] = (4096, 8192, 16_384, 32_768),
) -> None:
    """Another conversation copies tokens out of pages, beside computing them; the next turn is handed caches.

    Copies go to memory that this process had before: what new pages cost is the system's affair, and on a
    virtual machine that is ten times the copy, or nothing.
    """
    for model in models(folder, family, SMALL):
        for length in lengths:
            with _freed_memory_kept():
                computed_s, copied_s, handed_over_s = _restored(model, length)
            size = f"{length:,} tokens, median of {FORKS}"
            copied = f"{copied_s / computed_s:.2%} ({1000 * copied_s:.2f} ms of {computed_s:.2f} s)"
            mark("copied / computed", model, size, copied, "<= 2 %" if length >= 32_768 else "")
            mark("copied, for each token", model, size, f"{1e6 * copied_s / length:.3f} µs", "flat")
            mark("handed over", model, size, f"{1000 * handed_over_s:.2f} ms")


def _new_cache(layers: Layers) -> PromptCache:
    limits = EvictionLimits(budget_bytes=PLENTY)
    return PromptCache(layers, limits=limits, page_size=PAGE, metrics=CacheMetrics())


def _restored(model: Model, length: int) -> tuple[float, float, float]:
    """Seconds that so many tokens take: to compute, to copy out of pages, to be handed over."""
    kept, shared = _new_cache(model.layers), prompt(length)
    _compute(model, kept, (*shared[:PAGE], *prompt(PAGE, 1)), (PAGE, 2 * PAGE - 1))
    began = time.perf_counter()
    _compute(model, kept, (*shared, 1, 2, 3), (PAGE, length))
    computed = time.perf_counter() - began
    _cut_into_pages(kept)
    copied = [_copied(kept, (*shared, 4, seed, 5), length) for seed in range(FORKS + 1)]
    caches = kept.opener.open((*shared, 4, FORKS + 1, 5), b"", ()).seq_cache.caches
    return computed, statistics.median(copied[1:]), _handed_over(model.layers, caches, shared)


def _cut_into_pages(kept: PromptCache) -> None:
    # What happens to a conversation that rests when a longer one shares its beginning, or memory is short.
    store = kept._store  # pyright: ignore[reportPrivateUsage]
    for seq_cache in store.seq_caches:
        store.split_into_pages(seq_cache)


def _compute(model: Model, kept: PromptCache, ids: tuple[int, ...], boundaries: tuple[int, ...]) -> None:
    """A row's life without an engine: it stops where state is kept, and leaves its caches to the cache."""
    opened = kept.opener.open(ids, b"", boundaries)
    _take_in(kept, opened, ids, lambda new: model.compute(new, opened.seq_cache.caches))


def _take_in(
    kept: PromptCache,
    opened: OpenedSequence,
    ids: tuple[int, ...],
    compute: Callable[[tuple[int, ...]], object],
    stops: Iterable[int] = (),
    states: int | None = None,
) -> list[float]:
    """Compute a prompt as a prefill does, and leave its caches to the cache.

    Args:
        stops: ends of chunks, beside those at which state is kept.
        states: at how many of these it is kept.

    Returns:
        The seconds for which the cache took each chunk in.
    """
    seq_cache, seconds = opened.seq_cache, list[float]()
    with_state = opened.checkpoint_positions[:states]
    for end in sorted({*opened.checkpoint_positions, *stops, len(ids)}):
        new = ids[len(seq_cache.tokens) : end]
        compute(new)
        began = time.perf_counter()
        kept.record_chunk(seq_cache, new, keep_state=end in with_state)
        seconds.append(time.perf_counter() - began)
    kept.close(seq_cache, seq_cache.caches, ids)
    return seconds


def _copied(kept: PromptCache, ids: tuple[int, ...], length: int) -> float:
    """Seconds until another conversation has caches of `length` tokens; they become pages again."""
    began = time.perf_counter()
    seq_cache = kept.opener.open(ids, b"", ()).seq_cache
    seconds = time.perf_counter() - began
    if len(seq_cache.tokens) != length:
        raise SystemExit(f"{len(seq_cache.tokens)} tokens were restored, and not {length}.")
    kept.close(seq_cache, seq_cache.caches, ids[:length])
    _cut_into_pages(kept)
    return seconds


@contextmanager
def _freed_memory_kept() -> Generator[None]:
    """Have glibc map no array alone and give nothing back; afterwards both as late as by itself.

    Elsewhere MLX has an allocator of its own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    mallopt(M_MMAP_THRESHOLD, 2**31 - 1)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    yield
    mallopt(M_MMAP_THRESHOLD, 2**25)
    mallopt(M_TRIM_THRESHOLD, 2**26)


def _handed_over(layers: Layers, caches: list[Any], ids: tuple[int, ...]) -> float:
    """Seconds until the next turn has the caches of a conversation that was left with `ids`."""
    kept = _new_cache(layers)
    kept.close(kept.opener.open((*ids, 1), b"", ()).seq_cache, caches, ids)
    seconds: list[float] = []
    for _ in range(FORKS):
        began = time.perf_counter()
        seq_cache = kept.opener.open((*ids, 1, 2), b"", ()).seq_cache
        seconds.append(time.perf_counter() - began)
        if len(seq_cache.tokens) != len(ids):
            raise SystemExit(f"{len(seq_cache.tokens)} tokens were handed over, and not {len(ids)}.")
        kept.close(seq_cache, seq_cache.caches, ids)
    return statistics.median(seconds)


# ----------------------------------------------------------------------------------------------------- lookup


@marks
def lookup(_: Path, *, lengths: Sequence[int] = (100_000,)) -> None:
    """Planning a restore of a long prompt, without copying; and what taking it in costs for each token."""
    for length in lengths:
        _plans(length)


def _plans(length: int) -> None:
    """For prompts of which much is stored, over caches that compute nothing."""
    ids, other = prompt(length), prompt(length, 1)
    half = length // 2
    prompts = {
        "the next turn": (*ids, *other[:NEW_TOKENS]),
        "another end": (*ids[:-NEW_TOKENS], *other[:NEW_TOKENS]),
        "another half": (*ids[:half], *other[half:]),
    }
    for name, (has_state, states) in STATES.items():
        kept = _new_cache(FakeLayers(has_state=has_state))
        opened, ends = kept.opener.open(ids, b"", ()), range(LOOKUP_CHUNK, length, LOOKUP_CHUNK)
        seconds = _take_in(kept, opened, ids, opened.seq_cache.caches[0].feed, ends, states)
        quarter = len(seconds) // 4
        growth = statistics.median(seconds[-quarter:]) / statistics.median(seconds[:quarter])
        measured = f"{1e6 * sum(seconds) / length:.2f} µs for each; last quarter / first {growth:.2f}"
        mark("taking in", name, f"{length:,} tokens, chunks of {LOOKUP_CHUNK}", measured, "linear")
        for what, asked in prompts.items():
            milliseconds = 1000 * statistics.median(_plan_seconds(kept, asked, has_state) for _ in range(9))
            mark("lookup", name, f"{length:,} tokens, {what}", f"{milliseconds:.2f} ms", "< 20 ms")


def _plan_seconds(kept: PromptCache, ids: tuple[int, ...], has_state: bool) -> float:
    # There is no public way to plan without doing it.
    tree, root = kept._store.tree, kept._lookup.root(b"")  # pyright: ignore[reportPrivateUsage]
    began = time.perf_counter()
    plan = plan_restore(root, tree.match(root, ids[:-1]), ids, has_state=has_state)
    seconds = time.perf_counter() - began
    if not plan.length:
        raise SystemExit("Nothing was found of a prompt that is stored.")
    return seconds


# --------------------------------------------------------------------------------------------------- sessions

SYSTEM_TOKENS, QUESTION_TOKENS, HEADER_TOKENS = 600, 60, 8
NEW_SESSIONS = 200


@marks
def sessions(_: Path, *, cached: Sequence[int] = (10, 2000)) -> None:
    """What the cache does for a new session, with so many cached ones of one system text.

    Questions begin with the same header. The caches compute nothing.

    Args:
        cached: sessions
    """
    for name, has_state in (("attention", False), ("with state", True)):
        seconds = [_session_seconds(has_state, count) for count in cached]
        for what, figures in zip(("open", "take in and close"), zip(*seconds, strict=True), strict=True):
            size = f"{what}, {' and '.join(f'{count:,}' for count in cached)} sessions"
            measured = " : ".join(f"{1000 * figure:.3f} ms" for figure in figures)
            mark("a new session", name, size, f"{measured} = {figures[-1] / figures[0]:.2f}", "<= 1.5")


def _session_seconds(has_state: bool, cached: int) -> list[float]:
    """Median seconds to open a session's sequence, and to take in its prompt and reply and close it."""
    kept = _new_cache(FakeLayers(has_state=has_state))
    system = prompt(SYSTEM_TOKENS)
    seconds: list[tuple[float, float]] = []
    for number in range(cached + NEW_SESSIONS):
        ids = (*system, *range(HEADER_TOKENS), *prompt(QUESTION_TOKENS, number + 1))
        began = time.perf_counter()
        opened = kept.opener.open(ids, b"", (SYSTEM_TOKENS, len(ids)))
        is_open = time.perf_counter()
        _take_in(kept, opened, ids, opened.seq_cache.caches[0].feed)
        seconds.append((is_open - began, time.perf_counter() - is_open))
    return medians(seconds[cached:])
