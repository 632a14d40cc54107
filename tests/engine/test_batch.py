"""Sequences decode alone or together, and what MLX's caches do meanwhile."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission
from start_llm.engine.batch import BatchGroup
from start_llm.engine.decoder import Decoder, may_pad
from start_llm.engine.generation import Generation
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.engine.sequence import EngineSequence, Sampled
from tests.engine.harness import (
    Breakdown,
    FailsOnce,
    Wrapped,
    engine_request,
    join_next,
    seq_cache_of,
    stepped,
)
from tests.ties import Tally, greedy_reference

PROMPTS = [tuple(range(3, 30)), tuple(range(400, 431)), (9, 8, 7, 6)]
LENGTH = 40
LAYERS = 2


@pytest.fixture(autouse=True)
def one_stream() -> Iterator[None]:
    with mx.stream(generation_stream):
        yield


@pytest.fixture(scope="module")
def references(resources):
    return [greedy_reference(resources.network, prompt, LENGTH) for prompt in PROMPTS]


REPLY = 1000
"""Tokens that each sequence may write."""


def resting_sequence(resources, prompt, **options: Any) -> EngineSequence:
    """A sequence whose prompt is computed up to its last token."""
    generation = Generation(engine_request(prompt, REPLY, **options))
    reply = ReplyWriter(generation.request, resources.token_bytes, resources.eos_token_ids)
    cache = make_prompt_cache(resources.network)
    if len(prompt) > 1:
        resources.network(mx.array([prompt[:-1]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return EngineSequence(generation, reply, seq_cache_of(cache))


def accept(sampled: list[Sampled]) -> None:
    for sample in sampled:
        sample.sequence.accept(sample.token, sample.scored)


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The calls of a method from now on."""
    calls: list[str] = []
    real = getattr(owner, name)

    def note(*arguments: Any) -> Any:
        calls.append(name)
        return real(*arguments)

    monkeypatch.setattr(owner, name, note)
    return calls


def replies(sequences: list[EngineSequence]) -> list[list[int]]:
    return [sequence.tokens[len(sequence.generation.request.prompt) :] for sequence in sequences]


def decode(decoder: Decoder, steps: int) -> list[int]:
    """Step, and tell how many tokens each step made."""
    made = []
    for _ in range(steps):
        sampled = stepped(decoder)
        accept(sampled)
        made.append(len(sampled))
    return made


# ---------------------------------------------------------------------------------------- alone, and together


def test_a_lone_sequence_says_what_mlx_lm_says(resources, references):
    sequence = resting_sequence(resources, PROMPTS[0])
    group = BatchGroup(resources, sequence)
    for _ in range(LENGTH):
        accept(group.step())
    assert tuple(sequence.tokens) == PROMPTS[0] + references[0].ids


def test_a_batch_says_what_mlx_lm_says_of_each_sequence(resources, references):
    sequences = [resting_sequence(resources, prompt) for prompt in PROMPTS]
    group = BatchGroup(resources, sequences[0])
    for sequence in sequences[1:]:
        group.join(sequence)
    while any(len(reply) < LENGTH for reply in replies(sequences)):
        accept(group.step())
    for reply, reference in zip(replies(sequences), references, strict=True):
        Tally().compare(reply[:LENGTH], reference)


def test_a_released_sequence_is_at_rest(resources):
    """Its cache holds all tokens but the last, so it can go on anywhere (notes: trust `offset`)."""
    sequence = resting_sequence(resources, PROMPTS[0])
    group = BatchGroup(resources, sequence)
    for _ in range(5):
        accept(group.step())
    released = group.release(sequence)
    assert released
    accept([released])
    assert len(sequence.tokens) == len(PROMPTS[0]) + 6
    assert [layer.offset for layer in sequence.layer_caches] == [len(sequence.tokens) - 1] * 2


@pytest.mark.parametrize("released", [0, 1, 2])
def test_a_sequence_released_from_a_batch_is_at_rest(resources, references, released):
    """And so is one that has just joined, whose last token nobody has fed yet."""
    decoder = Decoder(resources)
    sequences = started(resources, decoder, PROMPTS[:2])
    decode(decoder, 4)
    sequences += started(resources, decoder, PROMPTS[2:])
    join_next(decoder)
    held, sampled = decoder.release(sequences[released])
    accept([sampled] if sampled else [])
    sequence = sequences[released]
    assert held.tokens == len(sequence.tokens) - 1
    assert [layer.offset for layer in held.caches] == [held.tokens] * 2
    decode(decoder, 10)
    check_replies(sequences, references, least=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("join_at", [0, 1, 2, 7])
def test_joining_loses_and_doubles_no_token(resources, references, join_at):
    decoder = Decoder(resources)
    sequences = [resting_sequence(resources, prompt) for prompt in PROMPTS]
    decoder.add(sequences[0])
    decode(decoder, join_at)
    decoder.add(sequences[1])
    decode(decoder, join_at)
    decoder.add(sequences[2])
    decode(decoder, 20)
    for reply, reference in zip(replies(sequences), references, strict=True):
        assert len(reply) >= 15
        Tally().compare(reply, reference)


def test_nobody_waits_for_a_newcomer(resources):
    """Running replies get a token in every step; the newcomer gets its first one in the next step."""
    decoder = Decoder(resources)
    decoder.add(resting_sequence(resources, PROMPTS[0]))
    assert decode(decoder, 3) == [1, 1, 1]
    decoder.add(resting_sequence(resources, PROMPTS[1]))
    assert decode(decoder, 4) == [1, 2, 2, 2]


def test_a_sequence_that_ends_right_before_a_newcomer_is_fed_leaves_it_alone(resources, references):
    decoder = Decoder(resources)
    first, second = resting_sequence(resources, PROMPTS[0]), resting_sequence(resources, PROMPTS[1])
    decoder.add(first)
    decode(decoder, 3)
    decoder.add(second)
    join_next(decoder)
    decoder.remove(first)
    decode(decoder, 10)
    assert decoder.sequences == [second]
    assert replies([first, second]) == [list(references[0].ids[:3]), list(references[1].ids[:9])]


@pytest.mark.sample(2)
@pytest.mark.parametrize("beside", [1, 2])
def test_several_join_by_one_merge_and_say_what_mlx_lm_says(resources, references, monkeypatch, beside):
    prompts = [*PROMPTS, *PROMPTS[:2]]
    sequences = [resting_sequence(resources, prompt) for prompt in prompts]
    group = BatchGroup(resources, sequences[0])
    for sequence in sequences[1:beside]:
        group.join(sequence)
    merged = noted(monkeypatch, BatchKVCache, "merge")
    group.join(*sequences[beside:])
    assert len(merged) == LAYERS
    while any(len(reply) < 20 for reply in replies(sequences)):
        accept(group.step())
    for place, reply in enumerate(replies(sequences)):
        Tally().compare(reply[:20], references[place % len(PROMPTS)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("leaving", [(0, 1), (2, 0), (1, 3, 4), (0, 1, 2, 3), (4, 3, 2, 1, 0)])
def test_several_leave_by_one_filter_and_each_takes_its_own_caches(
    resources, references, monkeypatch, leaving
):
    prompts = [*PROMPTS, *PROMPTS[:2]]
    sequences = [resting_sequence(resources, prompt) for prompt in prompts]
    decoder = Decoder(resources)
    for sequence in sequences:
        decoder.add(sequence)
    decode(decoder, 8)
    (group,) = decoder.groups
    filtered = noted(monkeypatch, BatchKVCache, "filter")
    released = decoder.remove_from(group, [sequences[place] for place in leaving])
    assert len(filtered) == (LAYERS if len(leaving) < 4 else 0), "who stays alone gets caches of its own"
    for place, (caches, count) in zip(leaving, released, strict=True):
        assert count == len(sequences[place].tokens)
        alone = resting_sequence(resources, [*sequences[place].tokens, 0])
        for ours, wanted in zip(caches, alone.layer_caches, strict=True):
            assert ours.offset == wanted.offset == count
            assert mx.allclose(ours.keys[..., :count, :], wanted.keys[..., :count, :], atol=1e-3)
    decode(decoder, 10)
    for place, reply in enumerate(replies(sequences)):
        assert len(reply) == (7 if place in leaving else 17) + (place == 0)
        Tally().compare(reply, references[place % len(PROMPTS)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_leaving_a_batch_does_not_change_the_others(resources, references, leaving):
    decoder = Decoder(resources)
    sequences = [resting_sequence(resources, prompt) for prompt in PROMPTS]
    for sequence in sequences:
        decoder.add(sequence)
    decode(decoder, 8)
    decoder.remove(sequences[leaving])
    gone = len(sequences[leaving].tokens)
    decode(decoder, 15)
    assert len(sequences[leaving].tokens) == gone
    for reply, reference in zip(replies(sequences), references, strict=True):
        Tally().compare(reply, reference)


def test_a_batch_that_ran_empty_can_be_joined_again(resources, references):
    decoder = Decoder(resources)
    for _ in range(3):
        sequences = [resting_sequence(resources, prompt) for prompt in PROMPTS]
        for sequence in sequences:
            decoder.add(sequence)
        decode(decoder, 10)
        for sequence in sequences:
            decoder.remove(sequence)
        assert decoder.sequences == []
        assert stepped(decoder) == []
        for reply, reference in zip(replies(sequences), references, strict=True):
            Tally().compare(reply, reference)


def test_sequences_take_turns_where_caches_cannot_be_merged(resources, references):
    decoder = Decoder(replace(resources, batches=False))
    sequences = [resting_sequence(resources, prompt) for prompt in PROMPTS]
    decoder.add(sequences[0])
    decode(decoder, 5)
    decoder.add(sequences[1])
    decoder.add(sequences[2])
    assert decode(decoder, 10) == [3] * 10
    assert replies(sequences) == [list(r.ids[:n]) for r, n in zip(references, (15, 10, 10), strict=True)]


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_sequence_whose_start_fails_is_still_found(resources, batches, nth):
    """A sequence that no list holds any more would leave its client waiting for ever."""
    broken = Wrapped(resources.network, FailsOnce(lambda shape: True, nth=nth))
    decoder = Decoder(replace(resources, network=broken, batches=batches))
    sequences = [resting_sequence(resources, prompt) for prompt in PROMPTS[:2]]
    for sequence in sequences:
        decoder.add(sequence)
    with pytest.raises(Breakdown):
        decode(decoder, 5)
    assert {id(sequence) for sequence in decoder.abandon()} == {id(sequence) for sequence in sequences}
    assert decoder.sequences == []


def test_after_a_failure_the_next_sequences_decode(resources, references):
    broken = Wrapped(resources.network, FailsOnce(lambda shape: shape[0] == 2, nth=3))
    decoder = Decoder(replace(resources, network=broken))
    for prompt in PROMPTS[:2]:
        decoder.add(resting_sequence(resources, prompt))
    with pytest.raises(Breakdown):
        decode(decoder, 10)
    decoder.abandon()
    sequences = [resting_sequence(resources, prompt) for prompt in PROMPTS]
    for sequence in sequences:
        decoder.add(sequence)
    decode(decoder, 10)
    for reply, reference in zip(replies(sequences), references, strict=True):
        Tally().compare(reply, reference)


# ---------------------------------------------------------------------------------- sequences of like lengths

LENGTHS = st.lists(st.integers(1, 200_000), min_size=1, max_size=8)
TINY = [(5, 6, 7), (9, 8, 7, 6)]
UNLIKE = [PROMPTS[1], tuple(range(3, 28)), *TINY]
"""Two long ones and two short ones."""


def test_examples_of_lengths_that_fit():
    assert may_pad([20_000, 30_000])
    assert may_pad([10_000, 30_000, 30_000, 30_000])
    assert not may_pad([9_000, 30_000])
    assert not may_pad([100, 100, 100, 20_000])


@given(LENGTHS, st.randoms(use_true_random=False))
def test_whether_lengths_fit_does_not_depend_on_their_order(lengths, rng):
    mixed = list(lengths)
    rng.shuffle(mixed)
    assert may_pad(mixed) == may_pad(lengths)


@given(st.integers(1, 10**6), st.integers(1, 16))
def test_one_sequence_fits_and_so_do_sequences_of_one_length(length, sequences):
    assert may_pad([length] * sequences)


@given(st.integers(1, 10**6), st.lists(st.integers(0, 256), min_size=1, max_size=8))
def test_a_little_padding_always_fits(length, more):
    assert may_pad([length, *(length + extra for extra in more[:7])])


@given(LENGTHS)
def test_a_batch_that_fits_is_padded_by_half_at_most_or_by_little(lengths):
    padded = len(lengths) * max(lengths)
    assert not may_pad(lengths) or padded <= max(1.5 * sum(lengths), sum(lengths) + 2048)


@pytest.fixture
def padding_is_dear(monkeypatch):
    """So that short prompts can be too unlike to share a batch."""
    monkeypatch.setattr("start_llm.engine.decoder._CHEAP_PADDING", 4)


@pytest.fixture(scope="module")
def unlike_references(resources):
    return [greedy_reference(resources.network, prompt, LENGTH) for prompt in UNLIKE]


def watched_decoder(resources) -> tuple[Decoder, list[int]]:
    """A decoder, and how many sequences each of its forward passes had."""
    passes: list[int] = []
    network = Wrapped(resources.network, lambda shape: passes.append(shape[0]))
    return Decoder(replace(resources, network=network)), passes


def started(resources, decoder: Decoder, prompts: list[tuple[int, ...]]) -> list[EngineSequence]:
    sequences = [resting_sequence(resources, prompt) for prompt in prompts]
    for sequence in sequences:
        decoder.add(sequence)
    return sequences


def check_replies(sequences: list[EngineSequence], references, least: int) -> None:
    for reply, reference in zip(replies(sequences), references, strict=True):
        assert len(reply) >= least
        Tally().compare(reply, reference)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("padding_is_dear")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (0, 2, 3, 1)])
def test_sequences_of_unlike_lengths_decode_in_batches_of_their_own(resources, unlike_references, order):
    decoder, passes = watched_decoder(resources)
    sequences = started(resources, decoder, [UNLIKE[place] for place in order])
    decode(decoder, 20)
    check_replies(sequences, [unlike_references[place] for place in order], least=18)
    assert set(passes[4:]) == {2}, "each starts alone, until the other one comes"


@pytest.mark.usefixtures("padding_is_dear")
def test_a_sequence_that_is_like_no_other_decodes_alone(resources, unlike_references):
    decoder, passes = watched_decoder(resources)
    sequences = started(resources, decoder, UNLIKE[:3])
    decode(decoder, 20)
    check_replies(sequences, unlike_references[:3], least=18)
    assert set(passes) == {1, 2}
    assert passes.count(1) > 15


@pytest.mark.usefixtures("padding_is_dear")
def test_a_newcomer_joins_those_that_it_is_like(resources, unlike_references):
    decoder, passes = watched_decoder(resources)
    sequences = started(resources, decoder, [UNLIKE[0], UNLIKE[2]])
    decode(decoder, 3)
    assert (set(passes), decoder.batched_bytes) == ({1}, 0)
    sequences += started(resources, decoder, [UNLIKE[1]])
    decode(decoder, 5)
    passes.clear()
    decode(decoder, 5)
    assert sorted(set(passes)) == [1, 2], "the long ones share a batch, and the short one is alone"
    sequences += started(resources, decoder, [UNLIKE[3]])
    decode(decoder, 15)
    check_replies(sequences, [unlike_references[place] for place in (0, 2, 1, 3)], least=13)


@pytest.mark.usefixtures("padding_is_dear")
def test_a_group_that_ran_empty_is_forgotten_and_sequences_go_on(resources, unlike_references):
    decoder, _ = watched_decoder(resources)
    sequences = started(resources, decoder, UNLIKE)
    decode(decoder, 5)
    for sequence in sequences[2:]:
        decoder.remove(sequence)
    decode(decoder, 5)
    assert len(decoder.groups) == 1
    sequences[2:] = started(resources, decoder, UNLIKE[2:])
    decode(decoder, 10)
    check_replies(sequences, unlike_references, least=8)


@pytest.mark.usefixtures("padding_is_dear")
def test_sequences_of_all_batches_are_found_when_a_step_fails(resources, unlike_references):
    breaks = FailsOnce(lambda shape: shape[0] == 2, nth=6)
    decoder = Decoder(replace(resources, network=Wrapped(resources.network, breaks)))
    sequences = started(resources, decoder, UNLIKE)
    with pytest.raises(Breakdown):
        decode(decoder, 10)
    assert {id(sequence) for sequence in decoder.abandon()} == {id(sequence) for sequence in sequences}
    assert (decoder.sequences, decoder.batched_bytes) == ([], 0)
    sequences = started(resources, decoder, UNLIKE)
    decode(decoder, 10)
    check_replies(sequences, unlike_references, least=8)


def test_the_last_sequence_of_a_batch_has_caches_of_its_own_again(resources, references):
    decoder = Decoder(resources)
    sequences = started(resources, decoder, PROMPTS[:2])
    decode(decoder, 5)
    decoder.remove(sequences[1])
    sequence = sequences[0]
    assert decoder.batched_bytes == 0
    assert sequence.seq_cache.fetch_from_batch is None
    assert [layer.offset for layer in sequence.seq_cache.caches] == [len(sequence.tokens)] * 2
    decode(decoder, 10)
    check_replies(sequences, references[:2], least=3)


def test_a_batch_is_joined_only_if_there_is_memory_for_its_padding(resources):
    asked: list[list[int]] = []
    longest = len(PROMPTS[1]) + REPLY

    class Asked(Admission):
        def fits(self, lengths: Iterable[int]) -> bool:
            asked.append(list(lengths))
            return super().fits(asked[-1])

    admission = Asked(3 * longest - 1, SequenceCost(token_bytes=1))
    decoder = Decoder(replace(resources, admission=admission))
    started(resources, decoder, [PROMPTS[1], PROMPTS[1], TINY[0]])
    decode(decoder, 2)
    assert [len(group.sequences) for group in decoder.groups] == [2, 1]
    assert asked[-1] == [longest] * 3


def test_a_sequence_that_cannot_join_takes_its_group_with_it_and_no_other(resources, monkeypatch):
    monkeypatch.setattr("start_llm.engine.decoder._CHEAP_PADDING", 4)
    decoder = Decoder(resources)
    sequences = started(resources, decoder, [UNLIKE[0], UNLIKE[2]])
    decode(decoder, 3)
    newcomer = resting_sequence(resources, UNLIKE[1])
    newcomer.layer_caches[1] = None  # half of its caches can be merged
    decoder.add(newcomer)
    with pytest.raises(AttributeError):
        join_next(decoder)
    assert decoder.drop_joining() == [newcomer, sequences[0]]
    assert decoder.sequences == [sequences[1]]


def test_bytes_of_batches_count_padding_and_nothing_else(resources):
    decoder = Decoder(resources)
    long, short = started(resources, decoder, [PROMPTS[1], TINY[0]])
    token = sum(
        layer.keys[..., :1, :].nbytes + layer.values[..., :1, :].nbytes for layer in long.layer_caches
    )
    assert decoder.batched_bytes == 0
    decode(decoder, 4)
    assert decoder.batched_bytes >= 2 * len(PROMPTS[1]) * token
    decoder.remove(short)
    decoder.remove(long)
    assert decoder.batched_bytes == 0
    (alone,) = started(resources, decoder, [PROMPTS[1]])
    decode(decoder, 4)
    assert decoder.batched_bytes == 0
    assert decoder.sequences == [alone]


# ------------------------------------------------------------ facts about mlx_lm on which the engine is built


def test_offset_counts_prompt_and_reply_after_generation(resources):
    cache = make_prompt_cache(resources.network)
    steps = generate_step(mx.array(PROMPTS[0]), resources.network, max_tokens=6, prompt_cache=cache)
    assert len(list(steps)) == 6
    assert [layer.offset for layer in cache] == [len(PROMPTS[0]) + 6] * 2


def test_holding_the_keys_of_a_cache_sees_what_is_written_later(resources):
    """`keys` is the very object that the next forward pass writes into; a slice is a snapshot."""
    sequence = resting_sequence(resources, PROMPTS[0])
    layer, place = sequence.layer_caches[0], len(PROMPTS[0]) - 1
    held, snapshot = layer.keys, layer.keys[...]
    mx.eval(snapshot)
    before = np.array(held[..., place, :])
    resources.network(mx.array([[5]]), cache=sequence.layer_caches)
    assert layer.keys is held
    assert not (np.array(held[..., place, :]) == before).all()
    assert (np.array(snapshot[..., place, :]) == before).all()


def test_a_sequence_of_a_batch_with_forced_tokens_feeds_those(resources):
    decoder = Decoder(resources)
    sequences = started(resources, decoder, PROMPTS)
    decode(decoder, 6)
    sequences[1].forced_tokens.append(77)
    decode(decoder, 10)
    first, second, third = replies(sequences)
    place = second.index(77)
    Tally().compare(
        second[place + 1 :], greedy_reference(resources.network, (*PROMPTS[1], *second[: place + 1]), 9)
    )
    for reply, prompt in ((first, PROMPTS[0]), (third, PROMPTS[2])):
        Tally().compare(reply, greedy_reference(resources.network, prompt, 16))
