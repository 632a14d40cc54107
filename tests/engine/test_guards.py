"""Prompt caches as an engine leaves them, read token by token: `tests/mutants` takes these guards away.

The network here keeps each token itself as its KV, and the sum of all of them as its state, so that whatever
is kept can be compared with the tokens that it is kept for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from start_llm.cache.arrays import StateSnapshot
from start_llm.cache.pages import PageRun
from start_llm.core.events import Failed, Finished
from start_llm.engine.batch import BatchGroup
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import Cached
from tests.engine.harness import Breakdown, FailsOnce, Watched, Wrapped, engine_request, uncached_resources
from tests.mlx_memory import active_bytes

VOCABULARY = 400
PROMPTS = [tuple(range(75)), tuple(range(100, 140)), tuple(range(200, 290))]


class Counting:
    """Says the number that follows the last token."""

    def __init__(self, *, has_state: bool) -> None:
        self.has_state = has_state

    def make_cache(self) -> list[Any]:
        return [KVCache(), ArraysCache(1)] if self.has_state else [KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        kept = mx.broadcast_to(tokens[:, None, :, None].astype(mx.float32), (*tokens[:, None].shape, 32))
        cache[0].update_and_fetch(kept, kept)
        if self.has_state:
            before = 0 if cache[1][0] is None else cache[1][0]
            cache[1][0] = before + tokens.sum(axis=1)[:, None, None].astype(mx.int32)
        return 100 * mx.eye(VOCABULARY)[(tokens + 1) % VOCABULARY]


def counting(
    *, has_state: bool = False, network: Any = None, max_sequences: int = 4, **changes: Any
) -> Cached:
    return Cached(
        uncached_resources(
            network or Counting(has_state=has_state),
            lambda token: b"a",
            frozenset(),
            max_sequences=max_sequences,
            batches=not has_state,
        ),
        **changes,
    )


def at_once(**changes: Any) -> Cached:
    """No time passes: one step of the replies stands between two chunks, however slow the machine is."""
    return counting(clock=lambda: 0.0, **changes)


def plain(keys: mx.array) -> list[int]:
    return np.array(keys)[0, 0, :, 0].astype(int).tolist()


def check(engine: Cached) -> None:
    """Everything that is kept is what these tokens give."""
    store = engine.cache._store
    for seq_cache in store.seq_caches:
        first = seq_cache.readable()[0] if seq_cache.tokens else None
        held = plain(first.keys[..., : first.offset, :]) if first else []
        assert held[: len(seq_cache.tokens)] == seq_cache.tokens
        assert seq_cache.is_active or len(held) == len(seq_cache.tokens)
    for page in store.tree.pages():
        if isinstance(page.holder, PageRun):
            ((keys, _),) = page.holder.stored.part(page.start, page.end).take(0)
            assert plain(keys) == list(page.tokens)
    for checkpoint in store.checkpoints:
        tokens, page = list(checkpoint.tail), checkpoint.page
        while page.parent is not None:
            tokens, page = [*page.tokens, *tokens], page.parent
        assert isinstance(checkpoint.state, StateSnapshot)
        assert checkpoint.state.leaves[0][0][0].item() == sum(tokens)


def cached(watched: Watched) -> int:
    assert isinstance(watched.ending, Finished)
    return watched.ending.usage.cached


def started(engine: Cached, prompt: Sequence[int]) -> Watched:
    """In the step in which its prompt was complete."""
    watched = engine.submit(engine_request(prompt, 30))
    engine.step()
    engine.step_until(lambda: not (engine.metrics.prefill or engine.metrics.waiting))
    return watched


def known(engine: Cached, tokens: Sequence[int]) -> int:
    """How many of these are known, if something else follows them."""
    return cached(engine.say((*tokens, 399, 399), 1))


# -------------------------------------------------------------------------------------- the end of a sequence


@pytest.mark.sample(6)
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_whenever_a_sequence_leaves_its_own_tokens_are_kept_for_it(leaving, steps):
    """Alone, at rest on the way into a batch, and in one."""
    engine = counting()
    sequences = [started(engine, prompt) for prompt in PROMPTS]
    engine.step(steps)
    sequences[leaving].generation.cancel()
    engine.step()
    check(engine)
    engine.finish(*(sequence for sequence in sequences if sequence is not sequences[leaving]))
    check(engine)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.tokens == list(range(prompt[-1] + 1, prompt[-1] + 1 + len(sequence.tokens)))
        assert known(engine, (*prompt, *sequence.tokens)) >= len(prompt) - 1 + len(sequence.tokens)


def test_a_lone_sequence_that_was_joined_and_leaves_is_kept_for_its_own_tokens():
    """The newcomer has not been fed yet."""
    engine = counting()
    first = started(engine, PROMPTS[0])
    engine.step(3)
    second = started(engine, PROMPTS[1])
    assert first.tokens
    assert not second.tokens
    first.generation.cancel()
    engine.step()
    check(engine)
    engine.finish(second)
    assert known(engine, (*PROMPTS[0], *first.tokens)) == len(PROMPTS[0]) + len(first.tokens)


def test_a_lone_sequence_is_kept_with_all_that_it_has_said():
    engine = counting()
    reply = engine.say(PROMPTS[0], 5)
    check(engine)
    assert known(engine, (*PROMPTS[0], *reply.tokens)) == len(PROMPTS[0]) + 5


def test_sequences_of_one_batch_are_not_mixed_up():
    engine = counting()
    sequences = [
        engine.submit(engine_request(prompt, length))
        for prompt, length in zip(PROMPTS, (9, 6, 12), strict=True)
    ]
    engine.finish(*sequences)
    check(engine)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert known(engine, (*prompt, *sequence.tokens)) == len(prompt) + len(sequence.tokens)


def test_a_prompt_that_was_given_up_is_kept_as_far_as_it_was_computed():
    engine, prompt = counting(), tuple(range(300))
    gone = engine.submit(engine_request(prompt, 5))
    engine.step_until(lambda: gone.progress)
    computed = gone.progress[-1][0]
    assert computed < len(prompt) - 1
    gone.generation.cancel()
    engine.step()
    check(engine)
    assert cached(engine.say(prompt, 5)) == computed
    check(engine)


def test_of_a_step_that_failed_nothing_is_kept():
    engine = counting(network=Wrapped(Counting(has_state=False), FailsOnce(lambda shape: shape == (1, 1), 4)))
    sequence = engine.submit(engine_request(PROMPTS[0], 30))
    engine.finish(sequence)
    assert isinstance(sequence.ending, Failed)
    check(engine)
    assert known(engine, PROMPTS[0]) == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("nth", range(1, 6))
def test_of_a_step_of_a_batch_that_failed_nothing_is_kept_and_its_sequences_go_on(nth):
    breaks = FailsOnce(lambda shape: shape == (3, 1), nth)
    engine = counting(network=Wrapped(Counting(has_state=False), breaks))
    sequences = [engine.submit(engine_request(prompt, 30)) for prompt in PROMPTS]
    for _ in range(60):
        engine.step()
        check(engine)
        if not engine.is_busy:
            break
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.tokens == list(range(prompt[-1] + 1, prompt[-1] + 31))
        assert known(engine, (*prompt, *sequence.tokens)) >= len(prompt) + 29


def test_of_a_chunk_that_failed_nothing_is_kept():
    engine = counting(network=Wrapped(Counting(has_state=False), FailsOnce(lambda shape: True, nth=2)))
    failing = engine.submit(engine_request(range(300), 5))
    engine.finish(failing)
    assert isinstance(failing.ending, Failed)
    check(engine)
    assert engine.cache._store.seq_caches == []
    assert known(engine, range(300)) == 0


def test_a_reply_that_cannot_be_reported_leaves_no_sequence_in_the_cache():
    def breaks(token: int) -> bytes:
        raise Breakdown("broken on purpose")

    engine = counting()
    engine._resources = EngineResources(
        Counting(has_state=False), breaks, frozenset(), max_sequences=4, batches=True, cache=engine.cache
    )
    engine.start_loop()
    failing = engine.submit(engine_request(PROMPTS[0], 5))
    engine.finish(failing)
    assert isinstance(failing.ending, Failed)
    assert [seq_cache for seq_cache in engine.cache._store.seq_caches if seq_cache.is_active] == []


# ------------------------------------------------------------------------------------------------------ state


def test_state_is_kept_at_the_ends_of_messages_and_is_that_of_its_tokens():
    engine = counting(has_state=True)
    engine.say(PROMPTS[0], 5, boundaries=(11, 50, 70))
    check(engine)
    assert known(engine, PROMPTS[0][:72]) == 70
    check(engine)
    assert known(engine, PROMPTS[0][:40]) == 11
    check(engine)


def test_state_is_not_that_of_a_prompt_that_went_on():
    """Two restores from one state, of which the first one goes on."""
    engine = counting(has_state=True)
    engine.say(PROMPTS[0], 5, boundaries=(11, 70))
    for last in (300, 310, 320):
        assert cached(engine.say((*PROMPTS[0][:70], last, last), 5, boundaries=(11, 70))) == 70
        check(engine)


# ----------------------------------------------------------------------------------------------------- memory


def test_the_cache_knows_what_a_batch_holds():
    engine = counting()
    sequences = [engine.submit(engine_request(prompt, 30)) for prompt in PROMPTS]
    engine.step_until(lambda: all(len(sequence.tokens) > 3 for sequence in sequences))
    in_seq_caches = engine.cache._store.active_usage.nbytes
    assert engine.cached.live_bytes - in_seq_caches >= sum(2 * 32 * 4 * len(prompt) for prompt in PROMPTS)
    engine.finish(*sequences)
    engine.say((1, 2, 3))
    assert engine.cached.live_bytes == 0


@pytest.mark.thorough
def test_when_a_long_sequence_leaves_a_batch_the_padding_of_the_others_leaves_memory():
    """mlx_lm takes it away by a view of the wider arrays, which would keep them until the next step."""
    engine = at_once()
    engine.say(PROMPTS[0])
    before, kept = active_bytes(), engine.cached.stored_bytes
    long = engine.submit(engine_request(tuple(index % VOCABULARY for index in range(900)), 5))
    others = [engine.submit(engine_request(prompt, 300)) for prompt in PROMPTS[1:]]
    engine.step_until(lambda: long.look() and long.ending)
    grown = engine.cached.stored_bytes - kept + engine.cached.live_bytes
    assert active_bytes() - before < grown + 100_000
    engine.finish(*others)


class Slow(Counting):
    """Has much else to compute before it comes to its caches. That takes one array, over and over."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits, work = super().__call__(tokens, cache), mx.ones((200, 200))
        for _ in range(200 if len(tokens) > 1 else 0):
            work = mx.sin(work)
        return 0 * work.sum() + logits + 0 * cache[0].keys.sum()


@pytest.mark.thorough
def test_what_sequences_were_copied_from_is_gone_when_they_share_a_batch():
    engine = at_once(network=Slow(has_state=False))
    engine.say(PROMPTS[0])
    before, kept = active_bytes(), engine.cached.stored_bytes
    sequences = [engine.submit(engine_request([start, *range(1, 399)] * 4, 400)) for start in (300, 310, 320)]
    engine.step_until(lambda: engine.cache.batched_bytes)
    engine.loop.executor.wait_for_steps()
    grown = engine.cached.stored_bytes - kept + engine.cached.live_bytes
    assert mx.get_active_memory() - before < grown + 400_000
    for sequence in sequences:
        sequence.generation.cancel()
    engine.step()


def test_nobody_waits_for_a_step_while_no_prompt_can_be_computed(monkeypatch: pytest.MonkeyPatch):
    """Else the device has nothing to do while a token is handed out; also while others wait for a place."""
    waits = list[int]()
    usual = BatchGroup.wait
    monkeypatch.setattr(BatchGroup, "wait", lambda self: waits.append(len(self.sequences)) or usual(self))
    engine = counting(max_sequences=1)
    running = engine.submit(engine_request(PROMPTS[0], 40))
    engine.step_until(lambda: running.tokens)
    waiting = engine.submit(engine_request(PROMPTS[0], 4))
    waits.clear()
    engine.step(10)
    assert engine.metrics.waiting == 1
    assert waits == []
    engine.finish(running, waiting)


def test_a_prompt_is_reported_while_its_first_chunk_is_computed():
    reports = list[tuple[int, tuple[int, int] | None]]()
    engine = counting(network=Wrapped(Counting(has_state=False), lambda _: reports.append(reported_now())))

    def reported_now() -> tuple[int, tuple[int, int] | None]:
        return engine.metrics.waiting, engine.metrics.prefill

    asked = engine.submit(engine_request(PROMPTS[0], 1))
    engine.finish(asked)
    assert reports[0] == (0, (0, len(PROMPTS[0])))
