"""How long the engine stands still while a long conversation changes its place: a part of `cache.py`.

The arrays are tiny: this is overhead alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from benchmarks.cache_engine import PAGE, Row
from start_llm.cache.layers import Layers
from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import SequenceCache
from tests.cache.integrity import check_store

LAYERS = 64
_STALL_S = 0.23


class _Deep:
    """A network that only has caches."""

    layers = (None,) * LAYERS


def cut(tokens: int) -> Iterator[Row]:
    """A sequence cache becomes a run, which is cut leaf by leaf, and caches are put together from it."""
    store = PageStore(Layers(_Deep()), PAGE)
    seq_cache = _resting(store, tokens)
    path = list(seq_cache.path)
    calls = {"a sequence cache becomes a run": [_timed(lambda: store.split_into_pages(seq_cache))]}
    leaves = calls["one leaf of it is cut"] = list[float]()
    while store.tree.untrimmed_runs:
        leaves.append(_timed(lambda: store.tidy(lambda: True)))
    copy = SequenceCache([], seq_cache.root, list(range(path[-1].end)), path)
    store.admit(copy)
    calls["caches are put together from it"] = [
        _timed(lambda: store.assemble(copy, None, None, path[-1].end, tokens))
    ]
    check_store(store)
    told = f"{tokens:,} tokens, {LAYERS} layers"
    for what, seconds in calls.items():
        measured = f"{max(seconds):.3f} s, {sum(seconds):.3f} s of {len(seconds)} calls"
        yield Row(f"longest call: {what}", "any", told, measured, f"< {_STALL_S} s")


def _resting(store: PageStore, tokens: int) -> SequenceCache:
    caches = store.layers.fresh(tokens)
    values = mx.zeros((1, 1, tokens, 2))
    for leaf in caches:
        leaf.update_and_fetch(values, values)
    mx.eval([leaf.state for leaf in caches])
    seq_cache = SequenceCache(caches, store.tree.root(b""))
    store.admit(seq_cache)
    seq_cache.tokens = list(range(tokens))
    store.extend(seq_cache)
    store.make_idle(seq_cache)
    return seq_cache


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
