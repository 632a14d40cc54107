"""Guards of sequences that share a forward pass: memory, each other's replies, and the device's time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import KVCache, make_prompt_cache

from start_llm.core.engine_request import Guide
from start_llm.core.sampling import Sampling
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine import merging
from start_llm.engine.admission import Admission
from start_llm.engine.batch import BatchGroup
from start_llm.engine.decoder import Decoder
from start_llm.engine.generation import Generation
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.engine.resources import EngineResources
from start_llm.engine.sequence import EngineSequence
from tests.engine.harness import Stepper, Undrafted, engine_request, seq_cache_of, stepped, uncached_resources

LAYERS, WIDTH, VOCABULARY = 24, 64, 50
LEAF = 2 * WIDTH * 4
"""Bytes of a token in one layer."""


class Deep:
    """Many layers that keep their tokens, and logits that are the same for every token."""

    def __init__(self) -> None:
        mx.random.seed(2)
        self.logits = mx.random.normal((1, 1, VOCABULARY))

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in range(LAYERS)]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        kept = mx.broadcast_to(tokens[:, None, :, None].astype(mx.float32), (*tokens[:, None].shape, WIDTH))
        for layer in cache:
            layer.update_and_fetch(kept, kept)
        return mx.broadcast_to(self.logits, (tokens.shape[0], 1, VOCABULARY))


@pytest.fixture(autouse=True)
def one_stream() -> Iterator[None]:
    with mx.stream(generation_stream):
        yield


def resting(network: Any, length: int, most: int = 1000, **options: Any) -> EngineSequence:
    generation = Generation(engine_request(range(length), most, **options))
    cache = make_prompt_cache(network)
    if length > 1:
        network(mx.array([list(range(length - 1))]), cache=cache)
        mx.eval([layer.state for layer in cache])
    reply = ReplyWriter(generation.request, lambda _: b"a", frozenset())
    return EngineSequence(generation, reply, seq_cache_of(cache))


def together(network: Any, **changes: Any) -> EngineResources:
    """The resources of sequences that may share its passes."""
    return uncached_resources(network, lambda _: b"a", frozenset(), max_sequences=9, batches=True, **changes)


def peak_of(action: Callable[[], Any]) -> int:
    """Bytes at the highest moment of an action, beyond what was there before."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    return mx.get_peak_memory() - before


# ---------------------------------------------------------------------------------------- memory in motion


@pytest.mark.parametrize("beside", [1, 3])
@pytest.mark.sample(2)
def test_while_a_sequence_joins_others_little_is_there_twice(beside: int):
    network, length = Deep(), 2000
    group = BatchGroup(together(network), resting(network, length))
    for _ in range(beside - 1):
        group.join(resting(network, length))
    group.wait()
    newcomer = resting(network, length)
    whole = (beside + 1) * length * LEAF * LAYERS
    assert peak_of(lambda: group.join(newcomer)) < whole / 4
    assert group.nbytes == whole


@pytest.mark.thorough
def test_while_a_sequence_leaves_others_little_is_there_twice():
    network, length = Deep(), 2000
    sequences = [resting(network, length) for _ in range(3)]
    group = BatchGroup(together(network), sequences[0])
    for sequence in sequences[1:]:
        group.join(sequence)
    group.wait()
    assert peak_of(lambda: group.remove(sequences[1])) < 3 * length * LEAF * LAYERS / 4
    assert peak_of(lambda: group.remove(sequences[2])) < 2 * length * LEAF * LAYERS / 4
    assert group.nbytes == 0, "the last one has caches of its own"


def test_sequences_whose_padding_has_no_memory_do_not_share_a_batch():
    network = Deep()
    decoder = Decoder(together(network, admission=Admission(3000, SequenceCost(token_bytes=1))))
    for length in (200, 200, 10):
        decoder.add(resting(network, length))
    stepped(decoder)
    assert [len(group.sequences) for group in decoder.groups] == [2, 1]


def test_a_batch_has_no_room_for_more_than_its_sequences_may_write():
    network, length, most = Deep(), 300, 40
    sequences = [resting(network, length, most) for _ in range(3)]
    group = BatchGroup(together(network), sequences[0])
    for sequence in sequences[1:]:
        group.join(sequence)
    for _ in range(5):
        group.step()
    assert group.nbytes <= 3 * (length + most) * LEAF * LAYERS
    assert [sequence.width for sequence in sequences] == [length + most] * 3


def test_a_sequence_beside_a_batch_needs_the_memory_that_the_batch_leaves():
    network = Deep()
    long, short = resting(network, 600, 40), resting(network, 300, 40)
    admission = Admission(1500, SequenceCost(token_bytes=1))
    assert admission.has_room([long, short], engine_request(range(400), 10), 400)
    group = BatchGroup(together(network), long)
    group.join(short)
    assert not admission.has_room([long, short], engine_request(range(400), 10), 400), (
        "the short one is padded"
    )
    group.remove(long)
    assert admission.has_room([short], engine_request(range(400), 10), 400)
    assert (long.width, short.width) == (0, 0)


def test_sequences_that_start_together_join_by_one_merge(monkeypatch: pytest.MonkeyPatch):
    network, merge, merged = Deep(), merging._merged, list[int]()
    monkeypatch.setattr(
        merging, "_merged", lambda parts, shifts: (merged.append(len(parts)), merge(parts, shifts))[1]
    )
    decoder = Decoder(together(network))
    for joining, expected in ((3, [3] * LAYERS), (2, [2] * LAYERS)):
        merged.clear()
        for _ in range(joining):
            decoder.add(resting(network, 5))
        stepped(decoder)
        assert merged == expected
    assert [len(group.sequences) for group in decoder.groups] == [5]


def test_sequences_that_join_together_have_room_together():
    """Two find memory beside the first one; the next begins a batch of its own."""
    network = Deep()
    admission = Admission(3, SequenceCost(state_bytes=1))
    decoder = Decoder(together(network, admission=admission))
    for joining in (1, 4):
        for _ in range(joining):
            decoder.add(resting(network, 5))
        stepped(decoder)
    assert [len(group.sequences) for group in decoder.groups] == [3, 1, 1]


def test_a_chunk_is_no_longer_than_there_is_memory_to_compute_it():
    lengths: list[int] = []

    class Seen(Deep):
        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            lengths.append(tokens.shape[1])
            return super().__call__(tokens, cache)

    resources = uncached_resources(Seen(), lambda _: b"a", frozenset(), max_sequences=1, batches=False)
    stepper = Stepper(resources, longest_chunk=48)
    stepper.finish(stepper.submit(engine_request(range(200), 1)))
    assert max(lengths) == 48


def test_a_sequence_that_has_just_joined_holds_all_its_tokens_but_the_last():
    network = Deep()
    group, newcomer = BatchGroup(together(network), resting(network, 20)), resting(network, 7)
    group.join(newcomer)
    (held,) = group.remove(newcomer)
    assert held.tokens == held.caches[0].offset == 6
    first = group.sequences[0]
    (held,) = group.remove(first)
    assert held.tokens == held.caches[0].offset == 20


# --------------------------------------------------------------------------------------- each for itself


def decoded(sequences: list[EngineSequence], steps: int = 30) -> list[list[int]]:
    decoder = Decoder(together(Deep()))
    for sequence in sequences:
        decoder.add(sequence)
    for _ in range(steps):
        for sampled in stepped(decoder):
            sampled.sequence.accept(sampled.token, sampled.scored)
    return [sequence.tokens[len(sequence.generation.request.prompt) :][:20] for sequence in sequences]


CHOICES = [
    Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1),
    Sampling(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0, seed=2),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, seed=3),
    Sampling(temperature=1.3, top_k=0, top_p=0.8, min_p=0.0, seed=4),
    Sampling(temperature=0),
]


@pytest.mark.thorough
def test_what_a_sequence_samples_does_not_depend_on_its_company():
    """A larger top-k beside it, another order, another way of sampling."""
    network = Deep()
    alone = [decoded([resting(network, 5, sampling=choice)])[0] for choice in CHOICES]
    assert decoded([resting(network, 5, sampling=choice) for choice in CHOICES]) == alone
    assert decoded([resting(network, 5, sampling=choice) for choice in reversed(CHOICES)]) == alone[::-1]


# ---------------------------------------------------------------------------------------- the device's time


class Asked(Undrafted, Guide):
    """Allows everything, and notes when it receives a token."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def advance(self, tokens: Any) -> None:
        self._log.append("guide")

    def allowed(self) -> bytes:
        return bytes([1] * VOCABULARY)


def test_the_network_is_submitted_before_a_guide_waits_for_the_token_before(monkeypatch: pytest.MonkeyPatch):
    network, log = Deep(), list[str]()
    group = BatchGroup(together(network), resting(network, 5, guide=Asked(log)))
    group.step()
    submit = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *what: (log.append("submitted"), submit(*what)))
    log.clear()
    group.step()
    assert log[:2] == ["submitted", "guide"]


def test_log_probabilities_are_computed_with_the_step_that_they_are_of(monkeypatch: pytest.MonkeyPatch):
    network, submitted = Deep(), list[int]()
    submit = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *what: (submitted.append(len(what[-1])), submit(*what)))
    sequences = [resting(network, 5, top_logprobs=3), resting(network, 5)]
    group = BatchGroup(together(network), sequences[0])
    group.join(sequences[1])
    sampled = [*group.step(), *group.step()]
    assert submitted == [1, 1, 1], "one row asks for them"
    assert [bool(sample.scored) for sample in sampled] == [True, True, False]
