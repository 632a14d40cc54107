"""What drafts leave in replies and caches, read token by token: `tests/mutants` takes these guards away."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.events import Finished
from start_llm.core.limits import TimeLimits
from start_llm.core.sampling import Sampling
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.draft_index import FORCED, MATCHES
from start_llm.engine.pass_times import PASSES, PassTimes
from tests.cache.conversations import Cached
from tests.engine.harness import Watched, engine_request, uncached_resources
from tests.engine.test_guards import VOCABULARY, Counting, check, counting
from tests.engine.test_guards_of_turns import counted

CHEAP: dict[int, float] = dict.fromkeys(PASSES, 1.0)
FREQUENT = Sampling(temperature=0, frequency_penalty=2)


class Bold(DraftGain):
    """Drafts behind every match."""

    def lengths(self) -> tuple[int, ...]:
        return (7,) * FORCED + (15,) + (7,) * len(MATCHES)


def bold(**changes: Any) -> tuple[Cached, Bold]:
    gain = Bold(PassTimes(CHEAP))
    return counting(gain=gain, **changes), gain


def almost(chance: random.Random) -> tuple[int, ...]:
    """Numbers in order, of which some are others."""
    return tuple(
        chance.randrange(VOCABULARY) if chance.random() < 0.15 else number for number in range(VOCABULARY)
    )


def asked(start: int, tokens: int, chance: random.Random, **more: Any) -> Any:
    return engine_request(range(start, start + 9), tokens, draft_texts=(almost(chance),), **more)


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("has_state", [False, True])
def test_a_draft_becomes_the_reply_as_far_as_it_is_right(has_state: bool):
    for seed in range(6):
        engine, gain = bold(has_state=has_state)
        watched = engine.submit(asked(5, 90, random.Random(seed)))
        for _ in range(100):
            engine.step()
            check(engine)
        assert watched.tokens == counted(range(5, 14), 90)
        assert 0 < gain.metrics.accepted_tokens < gain.metrics.drafted_tokens


class Circling(Counting):
    """Says the numbers below seven in order, again and again."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        super().__call__(tokens, cache)
        return 5 * mx.eye(VOCABULARY)[(tokens + 1) % 7]


def test_penalties_see_what_was_accepted():
    network, circles = Circling(has_state=False), (*range(7),) * 20
    plain, (engine, gain) = counting(network=network), bold(network=network)
    replies = [
        run.say(range(5, 14), 60, sampling=FREQUENT, draft_texts=(circles,)).tokens for run in (plain, engine)
    ]
    assert replies[0] == replies[1]
    assert replies[0] != counted(range(5, 14), 60)
    assert gain.metrics.accepted_tokens > 10


@pytest.mark.parametrize("tokens", range(1, 20))
def test_a_draft_goes_no_further_than_the_reply(tokens: int):
    engine, _ = bold()
    watched = engine.say(range(5, 14), tokens, draft_texts=(tuple(range(VOCABULARY)),))
    assert watched.tokens == counted(range(5, 14), tokens)
    assert isinstance(watched.ending, Finished)
    assert watched.ending.usage.completion == tokens


def test_a_token_that_ends_the_reply_is_not_drafted_over():
    gain = Bold(PassTimes(CHEAP))
    resources = uncached_resources(
        Counting(has_state=False), lambda _: b"a", frozenset({27}), 1, batches=False
    )
    engine = Cached(resources, gain=gain)
    watched = engine.say(range(5, 14), 90, draft_texts=(tuple(range(VOCABULARY)),))
    assert watched.tokens == list(range(14, 28))
    check(engine)


@pytest.mark.thorough
@pytest.mark.parametrize("has_state", [False, True])
def test_nothing_is_lost_or_kept_too_much_whatever_comes_between(has_state: bool):
    """Replies that are given up, joined, preempted and gone on from."""
    chance = random.Random(3 + has_state)
    drafted = 0
    for _ in range(12):
        ticks = iter(range(10**6))
        engine, gain = bold(
            has_state=has_state,
            max_sequences=chance.choice([1, 2]),
            clock=lambda ticks=ticks: next(ticks) / 10,
            time_limits=TimeLimits(preempt_after_s=chance.choice([1, 10**6])),
        )
        replies: list[tuple[int, int, Watched]] = []
        for _ in range(5):
            start, tokens = chance.randrange(200), chance.randrange(1, 60)
            replies.append((start, tokens, engine.submit(asked(start, tokens, chance))))
            for _ in range(chance.randrange(12)):
                engine.step()
                check(engine)
            if chance.random() < 0.3:
                chance.choice(replies)[2].generation.cancel()
        for _ in range(400):
            engine.step()
            check(engine)
        assert not engine.is_busy
        assert not engine.metrics.failures
        for start, tokens, watched in replies:
            expected = counted(range(start, start + 9), tokens)
            assert watched.tokens == expected[: len(watched.tokens)]
            assert len(watched.tokens) == tokens or watched.generation.cancelled
        drafted += gain.metrics.accepted_tokens
    assert drafted > 200


@pytest.mark.parametrize("steps", range(2, 9))
@pytest.mark.parametrize("has_state", [False, True])
def test_what_was_drafted_is_there_for_the_next_turn(has_state: bool, steps: int):
    """A reply that was given up in mid-draft: at most what one pass held is computed again."""
    engine, _ = bold(has_state=has_state)
    first = engine.submit(asked(5, 200, random.Random(1)))
    engine.step(steps)
    tokens = first.tokens
    first.generation.cancel()
    engine.step()
    check(engine)
    held = max(len(seq_cache.tokens) for seq_cache in engine.cache._store.seq_caches)
    assert 9 + len(tokens) - 16 - 8 <= held <= 9 + len(tokens)
