"""Short prompts that come together are prefilled in one pass, and nothing else about them changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from scripts import tiny_models
from start_llm.cache.layers import Layers
from start_llm.core.events import Failed, Finished
from start_llm.engine.pacing import Chunk
from start_llm.engine.self_test import check_batching
from start_llm.models.loader import load
from tests.cache.conversations import PLENTY, Cached, says_too
from tests.engine.harness import (
    Breakdown,
    FailsOnce,
    Stepper,
    Watched,
    Wrapped,
    engine_request,
    uncached_resources,
)
from tests.ties import Tally, greedy_reference

pytestmark = [pytest.mark.product, pytest.mark.sample(2)]

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite", "gpt_oss"]
"""Plain; windows of 128; recurrent layers; latent; windows of 128 with sinks."""
LENGTHS = (40, 7, 150, 33, 90, 12, 61, 5)
"""Of prompts, in tokens: all together, padded, are no more than a chunk's time allows, which is 2,048."""
REPLY = 12


def prompts(seed: int, lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    """Prompts that have nothing in common."""
    rng = random.Random(seed)
    return [
        (20 + place, *(rng.randrange(3, 400) for _ in range(length - 1)))
        for place, length in enumerate(lengths)
    ]


def ends(prompt: Sequence[int]) -> tuple[int, ...]:
    """The ends of its two messages, and of the prompt behind them."""
    return (max(len(prompt) // 3, 1), max(len(prompt) - 3, 2))


class Passes(list[tuple[int, ...]]):
    """The shapes of a network's passes, [sequences, tokens]."""

    @property
    def shared(self) -> list[tuple[int, ...]]:
        """Of several prompts."""
        return [shape for shape in self if shape[0] > 1 and shape[1] > 1]


def sharing(network: Any, before: Any, max_sequences: int = 8, pass_s: float = 0.1, **changes: Any) -> Cached:
    """An engine that holds a pass to take `pass_s`, and a token a hundredth of it."""
    measured = [Chunk(tokens, 0, pass_s * (1 + tokens / 1000)) for tokens in (64, 256, 1024)]
    resources = uncached_resources(
        Wrapped(network, before),
        lambda _: b"a",
        frozenset(),
        max_sequences,
        batches=True,
        batches_prefill=True,
        measured=tuple(measured),
    )
    return Cached(resources, PLENTY, longest_chunk=2048, **changes)


def burst(engine: Stepper, asked: Sequence[tuple[int, ...]], **more: Any) -> list[Watched]:
    return [engine.submit(engine_request(prompt, REPLY, boundaries=ends(prompt), **more)) for prompt in asked]


def assert_as_alone(network: Any, asked: Sequence[tuple[int, ...]], replies: Sequence[Watched]) -> None:
    tally = Tally()
    for prompt, reply in zip(asked, replies, strict=True):
        reference = greedy_reference(network, prompt, REPLY)
        assert len(reply.tokens) == REPLY
        wrong = tally.difference(
            reply.tokens,
            reference,
            lambda place, prompt=prompt, reply=reply: says_too(
                network, (*prompt, *reply.tokens[:place]), reply.tokens[place]
            ),
        )
        assert wrong is None, wrong


@pytest.fixture(scope="module", params=FAMILIES)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(
        tiny_models.build(request.param, tmp_path_factory.mktemp("model"), hidden=128, layers=2)
    ).network


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny_models.build("qwen3", tmp_path_factory.mktemp("plain"), hidden=128, layers=2)).network


@pytest.mark.sample(6)
def test_prompts_of_a_burst_are_computed_together_and_say_what_they_say_alone(network):
    passes = Passes()
    engine, asked = sharing(network, passes.append), prompts(1)
    replies = burst(engine, asked)
    engine.finish(*replies)
    assert_as_alone(network, asked, replies)
    is_recurrent = any(isinstance(cache, ArraysCache) for cache in make_prompt_cache(network))
    assert [rows for rows, _ in passes.shared] == ([8, 8, 8] if is_recurrent else [8])
    assert engine.cached.computed_tokens == sum(LENGTHS)


@pytest.mark.thorough
def test_what_was_computed_together_is_there_for_the_next_turn(network):
    """The state at each prompt's last message is cut out of the batch; one that was alone has the same."""
    asked = prompts(2)
    together, alone = sharing(network, Passes().append), sharing(network, Passes().append)
    together.finish(*burst(together, asked))
    for prompt in asked:
        alone.finish(*burst(alone, [prompt]))
    follow_ups = [(*prompt[: ends(prompt)[1]], 401, 402, 403) for prompt in asked]
    for engine in (together, alone):
        engine.cached.reused_tokens = 0
        replies = [burst(engine, [prompt])[0] for prompt in follow_ups]
        engine.finish(*replies)
        assert_as_alone(network, follow_ups, replies)
    assert together.cached.reused_tokens == alone.cached.reused_tokens > 0
    assert not any(engine.metrics.failures for engine in (together, alone))


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.sample(6)
def test_a_pass_that_goes_on_behind_the_ends_of_messages_leaves_their_state(network, count: int):
    """The windows at its end are taken back to there. A recurrent state cannot be, so that a pass stops."""
    passes, asked = Passes(), prompts(12)[-count:]
    engine = sharing(network, passes.append)
    engine.finish(*burst(engine, asked))
    for prompt in asked:
        for end in ends(prompt)[-2:]:
            reply = engine.submit(engine_request((*prompt[:end], 401, 402, 403), REPLY))
            engine.finish(reply)
            assert_as_alone(network, [(*prompt[:end], 401, 402, 403)], [reply])
            assert isinstance(reply.ending, Finished)
            assert reply.ending.usage.cached == end


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_the_next_turns_of_a_burst_share_passes_too(network):
    passes = Passes()
    engine, asked = sharing(network, passes.append), prompts(3)
    replies = burst(engine, asked)
    engine.finish(*replies)
    before = len(passes.shared)
    further = [
        (*prompt, *reply.tokens, 401, 402, 403, 404 + place)
        for place, (prompt, reply) in enumerate(zip(asked, replies, strict=True))
    ]
    next_replies = burst(engine, further)
    engine.finish(*next_replies)
    assert_as_alone(network, further, next_replies)
    assert len(passes.shared) > before
    assert engine.cached.computed_tokens < sum(map(len, further)) + sum(LENGTHS) - sum(LENGTHS) // 2


@pytest.mark.thorough
def test_a_burst_waits_for_one_step_of_the_running_replies_behind_each_of_its_passes(plain):
    """And not until they have had a third of the time: the more of them decode, the more a step gives."""
    shapes: list[tuple[int, ...]] = []
    now = 0.0

    def compute(shape: tuple[int, ...]) -> None:
        nonlocal now
        shapes.append(shape)
        now += 0.2 if shape[1] > 1 else 0.01

    engine = sharing(plain, compute, max_sequences=32, clock=lambda: now)
    first = engine.submit(engine_request(prompts(14)[0], 60))
    engine.step_until(lambda: first.tokens)
    shapes.clear()
    engine.finish(*burst(engine, [*prompts(15), *prompts(16, [9] * 16)]))
    places = [place for place, shape in enumerate(shapes) if shape[0] > 1 and shape[1] > 1]
    assert len(places) >= 3
    assert [later - earlier for earlier, later in pairwise(places)] == [2] * (len(places) - 1)


def test_what_two_prompts_share_is_computed_once(plain):
    passes = Passes()
    engine, rng = sharing(plain, passes.append), random.Random(4)
    rules = tuple(rng.randrange(3, 400) for _ in range(100))
    asked = [(*rules, 401 + place, 5, 6) for place in range(4)]
    engine.finish(*burst(engine, asked))
    assert engine.cached.computed_tokens == 103 + 3 * 3


@pytest.mark.parametrize("shorter", [0, 1, 5])
@pytest.mark.sample(6)
def test_equal_prompts_that_come_together_are_computed_once(network, shorter: int):
    """Or one is the beginning of another."""
    engine, (prompt,) = sharing(network, Passes().append), prompts(11, [90])
    asked = [prompt, prompt[: len(prompt) - shorter], prompt]
    replies = [engine.submit(engine_request(tokens, REPLY)) for tokens in asked]
    engine.finish(*replies)
    assert_as_alone(network, asked, replies)
    assert engine.metrics.failures == 0
    assert engine.cached.computed_tokens <= len(prompt) + 2 + shorter


def test_prompts_of_two_tenants_share_a_pass_whatever_they_have_in_common(plain):
    """Neither could restore what the other one has computed."""
    passes = Passes()
    engine, (prompt,) = sharing(plain, passes.append), prompts(5, [60])
    replies = [burst(engine, [prompt], salt=bytes([place]))[0] for place in range(3)]
    engine.finish(*replies)
    assert passes.shared[0][0] == 3
    assert engine.cached.computed_tokens == 180
    assert_as_alone(plain, [prompt] * 3, replies)


@pytest.mark.thorough
@pytest.mark.parametrize("lengths", [(600, 30, 20), (30, 600, 20)])
def test_a_long_prompt_is_computed_alone(plain, lengths):
    passes = Passes()
    engine, asked = sharing(plain, passes.append), prompts(6, lengths)
    replies = burst(engine, asked)
    engine.finish(*replies)
    assert all(tokens < 100 for _, tokens in passes.shared)
    assert_as_alone(plain, asked, replies)


@pytest.mark.thorough
def test_no_pass_has_more_than_eight_prompts_or_tokens_than_a_chunk(plain):
    passes = Passes()
    engine = sharing(plain, passes.append, max_sequences=20)
    replies = burst(engine, prompts(7, [500] * 6 + [10] * 12))
    engine.finish(*replies)
    assert passes.shared
    assert all(rows <= 8 and rows * tokens <= 2048 for rows, tokens in passes.shared)


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_a_pass_that_fails_costs_nobody_a_reply(network):
    """Each is computed alone then."""
    fails = FailsOnce(lambda shape: shape[0] > 1 and shape[1] > 1)
    engine, asked = sharing(network, fails), prompts(8)
    replies = burst(engine, asked)
    engine.finish(*replies)
    assert_as_alone(network, asked, replies)


@pytest.mark.thorough
def test_a_prompt_that_always_fails_fails_alone(plain):
    """It is the only one of its length."""

    def breaks(shape: tuple[int, ...]) -> None:
        if shape[1] == 149 or (shape[0] > 1 and shape[1] > 1):
            raise Breakdown("broken on purpose")

    engine, asked = sharing(plain, breaks), prompts(9)
    replies = [engine.submit(engine_request(prompt, REPLY)) for prompt in asked]
    engine.finish(*replies)
    failed = [isinstance(reply.ending, Failed) for reply in replies]
    assert failed == [length == 150 for length in LENGTHS]


@pytest.mark.thorough
def test_who_leaves_a_shared_prefill_takes_nothing_from_the_others(plain):
    """Between two passes, of which the first goes up to the checkpoints."""
    gone: list[Watched] = []

    def leave(shape: tuple[int, ...]) -> None:
        if shape[0] > 1 and shape[1] > 1 and not gone:
            gone.append(replies[2])
            replies[2].generation.cancel()

    engine, asked = sharing(plain, leave), prompts(10)
    replies = burst(engine, asked)
    kept = [place for place in range(len(asked)) if place != 2]
    engine.finish(*(replies[place] for place in kept))
    assert gone and not engine.is_busy
    assert_as_alone(plain, [asked[place] for place in kept], [replies[place] for place in kept])


class Summing:
    """Adds up its tokens. It does not look at the lengths of what it is given, so it adds padding too."""

    def __init__(self, *, heeds_lengths: bool) -> None:
        mx.random.seed(1)
        self._table = mx.random.normal((128, 32))
        self._heeds_lengths = heeds_lengths

    def make_cache(self) -> list[Any]:
        return [ArraysCache(1)]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        given, mask = self._table[tokens], cache[0].make_mask(tokens.shape[1])
        if mask is not None and self._heeds_lengths:
            given = mx.where(mask[..., None], given, 0)
        before = 0 if cache[0][0] is None else cache[0][0][:, None]
        sums = before + mx.cumsum(given, axis=1)
        cache[0][0] = sums[:, -1]
        return sums @ self._table.T


@pytest.mark.parametrize("heeds_lengths", [True, False])
def test_prompts_of_a_network_that_reads_padding_are_computed_one_by_one(heeds_lengths):
    network = Summing(heeds_lengths=heeds_lengths)
    verdict = check_batching(network, network.make_cache, 4)
    assert (verdict.batches, verdict.prefills) == (True, heeds_lengths)


@pytest.mark.sample(6)
def test_families_that_heed_lengths_pass_the_trial(network):
    assert check_batching(network, Layers(network).fresh, 8).prefills


def test_an_eviction_that_fails_behind_a_shared_pass_fails_no_prompt(network, monkeypatch):
    engine = sharing(network, lambda _: None)
    running, asked = engine.loop.executor.running, prompts(9)
    shrink, is_over = engine.cache._evictor.shrink, list[bool]()

    def failing(*coming: int, **options: Any) -> None:
        if len(running.prefills) > 1 and not (coming or is_over):
            is_over.append(True)
            raise Breakdown("broken on purpose")
        shrink(*coming, **options)

    monkeypatch.setattr(engine.cache._evictor, "shrink", failing)
    replies = burst(engine, asked)
    engine.step_until(lambda: running.sequences)
    sequences = running.sequences
    engine.finish(*replies)
    assert engine.metrics.failures == len(is_over)
    assert not any(sequence.excluded_from_batches for sequence in sequences)
    assert_as_alone(network, asked, replies)
