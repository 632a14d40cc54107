"""Prompts whose pages were quantised: what a network says behind them, beside what it says behind exact ones.

Shared by `tests/cache/test_kv_bits.py` and `benchmarks/kv_bits.py`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from start_llm.cache.kv_format import KVFormat
from start_llm.cache.pages import PageRun
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import Cached


def packed_runs(engine: Cached) -> list[PageRun]:
    """All runs, once everything that is loose is tidied."""
    engine.cache.tidy(60)
    return engine.cache._store.tree.runs


def interrupted(engine: Cached, prompt: tuple[int, ...], **more: Any) -> None:
    """Fill the cache with a prompt whose pages end up in a run: another one that begins like it went on."""
    engine.say(prompt, boundaries=(len(prompt) - 1,), **more)
    for one in list(engine.cache._store.seq_caches):
        engine.cache._store.split_into_pages(one)
    engine.cache.check_integrity()


def log_probabilities(engine: Cached, ids: tuple[int, ...], known: int) -> mx.array:
    """Those of every token after the restored part of a prompt, [tokens, vocabulary]."""
    network = engine._resources.network
    with mx.stream(generation_stream):
        opened = engine.cache.open(ids, b"", ())
        assert len(opened.seq_cache.tokens) >= known, "nothing was restored"
        del opened.seq_cache.tokens[known:]
        logits = network(mx.array([ids[len(opened.seq_cache.tokens) :]]), cache=opened.seq_cache.caches)[0]
        engine.cache.discard(opened.seq_cache)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def divergence(truth: mx.array, found: mx.array) -> float:
    """Mean KL divergence of log-probabilities [tokens, vocabulary], in nats."""
    return float((mx.exp(truth) * (truth - found)).sum(axis=-1).mean())


def behind(resources: EngineResources, ids: tuple[int, ...], known: int, kv: KVFormat | None) -> mx.array:
    """Those of the tokens behind the first `known`, which are restored from pages in this format."""
    engine = Cached(resources, kv=kv)
    interrupted(engine, ids[:known])
    assert packed_runs(engine), "there are no pages"
    restored = engine.cache.peek(ids, b"", ()).tokens
    assert restored >= 0.9 * known
    return log_probabilities(engine, ids, restored)
