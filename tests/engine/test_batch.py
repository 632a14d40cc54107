"""Rows decode alone or together, and what MLX's caches do meanwhile."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from start_llm.engine.batch import Decoder, Group, fits
from start_llm.engine.generation import Generation
from start_llm.engine.reply import ReplyWriter
from start_llm.engine.row import Row, Sampled
from tests.engine.harness import Breakdown, FailsOnce, Wrapped, job, stepped, strand_of
from tests.ties import Tally, greedy_reference

PROMPTS = [tuple(range(3, 30)), tuple(range(400, 431)), (9, 8, 7, 6)]
LENGTH = 40


@pytest.fixture(autouse=True)
def one_stream() -> Iterator[None]:
    with mx.stream(generation_stream):
        yield


@pytest.fixture(scope="module")
def references(machinery):
    return [greedy_reference(machinery.network, prompt, LENGTH) for prompt in PROMPTS]


REPLY = 1000
"""Tokens that each row may write."""


def resting_row(machinery, prompt, **options: Any) -> Row:
    """A row whose prompt is computed up to its last token."""
    generation = Generation(job(prompt, REPLY, **options))
    reply = ReplyWriter(generation.job, machinery.token_bytes, machinery.end_tokens)
    cache = make_prompt_cache(machinery.network)
    if len(prompt) > 1:
        machinery.network(mx.array([prompt[:-1]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return Row(generation, reply, strand_of(cache))


def accept(sampled: list[Sampled]) -> None:
    for row, token, _, scored in sampled:
        row.accept(token, scored)


def replies(rows: list[Row]) -> list[list[int]]:
    return [row.tokens[len(row.generation.job.prompt) :] for row in rows]


def decode(decoder: Decoder, steps: int) -> list[int]:
    """Step, and tell how many tokens each step made."""
    made = []
    for _ in range(steps):
        sampled = stepped(decoder)
        accept(sampled)
        made.append(len(sampled))
    return made


# ---------------------------------------------------------------------------------------- alone, and together


def test_a_lone_row_says_what_mlx_lm_says(machinery, references):
    row = resting_row(machinery, PROMPTS[0])
    group = Group(machinery.network, row)
    for _ in range(LENGTH):
        accept(group.step())
    assert tuple(row.tokens) == PROMPTS[0] + references[0].ids


def test_a_batch_says_what_mlx_lm_says_of_each_row(machinery, references):
    rows = [resting_row(machinery, prompt) for prompt in PROMPTS]
    group = Group(machinery.network, rows[0])
    for row in rows[1:]:
        group.join(row)
    while any(len(reply) < LENGTH for reply in replies(rows)):
        accept(group.step())
    for reply, reference in zip(replies(rows), references, strict=True):
        Tally().compare(reply[:LENGTH], reference)


def test_a_released_row_is_at_rest(machinery):
    """Its cache holds all tokens but the last, so it can go on anywhere (notes: trust `offset`)."""
    row = resting_row(machinery, PROMPTS[0])
    group = Group(machinery.network, row)
    for _ in range(5):
        accept(group.step())
    released = group.release(row)
    assert released
    accept([released])
    assert len(row.tokens) == len(PROMPTS[0]) + 6
    assert [layer.offset for layer in row.cache] == [len(row.tokens) - 1] * 2


@pytest.mark.parametrize("released", [0, 1, 2])
def test_a_row_released_from_a_batch_is_at_rest(machinery, references, released):
    """And so is one that has just joined, whose last token nobody has fed yet."""
    decoder = Decoder(machinery.network, batches=True)
    rows = started(machinery, decoder, PROMPTS[:2])
    decode(decoder, 4)
    rows += started(machinery, decoder, PROMPTS[2:])
    decoder.start_next()
    held, sampled = decoder.release(rows[released])
    accept([sampled] if sampled else [])
    row = rows[released]
    assert held.tokens == len(row.tokens) - 1
    assert [layer.offset for layer in held.caches] == [held.tokens] * 2
    decode(decoder, 10)
    check_replies(rows, references, least=0)


@pytest.mark.parametrize("join_at", [0, 1, 2, 7])
def test_joining_loses_and_doubles_no_token(machinery, references, join_at):
    decoder = Decoder(machinery.network, batches=True)
    rows = [resting_row(machinery, prompt) for prompt in PROMPTS]
    decoder.add(rows[0])
    decode(decoder, join_at)
    decoder.add(rows[1])
    decode(decoder, join_at)
    decoder.add(rows[2])
    decode(decoder, 20)
    for reply, reference in zip(replies(rows), references, strict=True):
        assert len(reply) >= 15
        Tally().compare(reply, reference)


def test_nobody_waits_for_a_newcomer(machinery):
    """Who decodes already has a token in every step; the newcomer has its first one in the next step."""
    decoder = Decoder(machinery.network, batches=True)
    decoder.add(resting_row(machinery, PROMPTS[0]))
    assert decode(decoder, 3) == [1, 1, 1]
    decoder.add(resting_row(machinery, PROMPTS[1]))
    assert decode(decoder, 4) == [1, 2, 2, 2]


def test_a_row_that_ends_right_before_a_newcomer_is_fed_leaves_it_alone(machinery, references):
    decoder = Decoder(machinery.network, batches=True)
    first, second = resting_row(machinery, PROMPTS[0]), resting_row(machinery, PROMPTS[1])
    decoder.add(first)
    decode(decoder, 3)
    decoder.add(second)
    decoder.start_next()
    decoder.remove(first)
    decode(decoder, 10)
    assert decoder.rows == [second]
    assert replies([first, second]) == [list(references[0].ids[:3]), list(references[1].ids[:9])]


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_leaving_a_batch_does_not_change_the_others(machinery, references, leaving):
    decoder = Decoder(machinery.network, batches=True)
    rows = [resting_row(machinery, prompt) for prompt in PROMPTS]
    for row in rows:
        decoder.add(row)
    decode(decoder, 8)
    decoder.remove(rows[leaving])
    gone = len(rows[leaving].tokens)
    decode(decoder, 15)
    assert len(rows[leaving].tokens) == gone
    for reply, reference in zip(replies(rows), references, strict=True):
        Tally().compare(reply, reference)


def test_a_batch_that_ran_empty_can_be_joined_again(machinery, references):
    decoder = Decoder(machinery.network, batches=True)
    for _ in range(3):
        rows = [resting_row(machinery, prompt) for prompt in PROMPTS]
        for row in rows:
            decoder.add(row)
        decode(decoder, 10)
        for row in rows:
            decoder.remove(row)
        assert decoder.rows == []
        assert stepped(decoder) == []
        for reply, reference in zip(replies(rows), references, strict=True):
            Tally().compare(reply, reference)


def test_rows_take_turns_where_caches_cannot_be_merged(machinery, references):
    decoder = Decoder(machinery.network, batches=False)
    rows = [resting_row(machinery, prompt) for prompt in PROMPTS]
    decoder.add(rows[0])
    decode(decoder, 5)
    decoder.add(rows[1])
    decoder.add(rows[2])
    assert decode(decoder, 10) == [3] * 10
    assert replies(rows) == [list(r.ids[:n]) for r, n in zip(references, (15, 10, 10), strict=True)]


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_row_whose_start_fails_is_still_found(machinery, batches, nth):
    """A row that no list holds any more would leave its client waiting for ever."""
    broken = Wrapped(machinery.network, FailsOnce(lambda shape: True, nth=nth))
    decoder = Decoder(broken, batches=batches)
    rows = [resting_row(machinery, prompt) for prompt in PROMPTS[:2]]
    for row in rows:
        decoder.add(row)
    with pytest.raises(Breakdown):
        decode(decoder, 5)
    assert {id(row) for row in decoder.abandon()} == {id(row) for row in rows}
    assert decoder.rows == []


def test_after_a_failure_the_next_rows_decode(machinery, references):
    broken = Wrapped(machinery.network, FailsOnce(lambda shape: shape[0] == 2, nth=3))
    decoder = Decoder(broken, batches=True)
    for prompt in PROMPTS[:2]:
        decoder.add(resting_row(machinery, prompt))
    with pytest.raises(Breakdown):
        decode(decoder, 10)
    decoder.abandon()
    rows = [resting_row(machinery, prompt) for prompt in PROMPTS]
    for row in rows:
        decoder.add(row)
    decode(decoder, 10)
    for reply, reference in zip(replies(rows), references, strict=True):
        Tally().compare(reply, reference)


# -------------------------------------------------------------------------------------- rows of like lengths

LENGTHS = st.lists(st.integers(1, 200_000), min_size=1, max_size=8)
TINY = [(5, 6, 7), (9, 8, 7, 6)]
UNLIKE = [PROMPTS[1], tuple(range(3, 28)), *TINY]
"""Two long ones and two short ones."""


def test_examples_of_lengths_that_fit():
    assert fits([20_000, 30_000])
    assert fits([10_000, 30_000, 30_000, 30_000])
    assert not fits([9_000, 30_000])
    assert not fits([100, 100, 100, 20_000])


@given(LENGTHS, st.randoms(use_true_random=False))
def test_whether_lengths_fit_does_not_depend_on_their_order(lengths, rng):
    mixed = list(lengths)
    rng.shuffle(mixed)
    assert fits(mixed) == fits(lengths)


@given(st.integers(1, 10**6), st.integers(1, 16))
def test_one_row_fits_and_so_do_rows_of_one_length(length, rows):
    assert fits([length] * rows)


@given(st.integers(1, 10**6), st.lists(st.integers(0, 256), min_size=1, max_size=8))
def test_a_little_padding_always_fits(length, more):
    assert fits([length, *(length + one for one in more[:7])])


@given(LENGTHS)
def test_a_batch_that_fits_is_padded_by_half_at_most_or_by_little(lengths):
    padded = len(lengths) * max(lengths)
    assert not fits(lengths) or padded <= max(1.5 * sum(lengths), sum(lengths) + 2048)


@pytest.fixture
def padding_is_dear(monkeypatch):
    """So that short prompts can be too unlike to share a batch."""
    monkeypatch.setattr("start_llm.engine.batch._CHEAP_PADDING", 4)


@pytest.fixture(scope="module")
def unlike_references(machinery):
    return [greedy_reference(machinery.network, prompt, LENGTH) for prompt in UNLIKE]


def watched_decoder(machinery) -> tuple[Decoder, list[int]]:
    """A decoder, and how many rows each of its forward passes had."""
    passes: list[int] = []
    network = Wrapped(machinery.network, lambda shape: passes.append(shape[0]))
    return Decoder(network, batches=True), passes


def started(machinery, decoder: Decoder, prompts: list[tuple[int, ...]]) -> list[Row]:
    rows = [resting_row(machinery, prompt) for prompt in prompts]
    for row in rows:
        decoder.add(row)
    return rows


def check_replies(rows: list[Row], references, least: int) -> None:
    for reply, reference in zip(replies(rows), references, strict=True):
        assert len(reply) >= least
        Tally().compare(reply, reference)


@pytest.mark.usefixtures("padding_is_dear")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (0, 2, 3, 1)])
def test_rows_of_unlike_lengths_decode_in_batches_of_their_own(machinery, unlike_references, order):
    decoder, passes = watched_decoder(machinery)
    rows = started(machinery, decoder, [UNLIKE[place] for place in order])
    decode(decoder, 20)
    check_replies(rows, [unlike_references[place] for place in order], least=18)
    assert set(passes[4:]) == {2}, "each starts alone, until the other one comes"


@pytest.mark.usefixtures("padding_is_dear")
def test_a_row_that_is_like_no_other_decodes_alone(machinery, unlike_references):
    decoder, passes = watched_decoder(machinery)
    rows = started(machinery, decoder, UNLIKE[:3])
    decode(decoder, 20)
    check_replies(rows, unlike_references[:3], least=18)
    assert set(passes) == {1, 2}
    assert passes.count(1) > 15


@pytest.mark.usefixtures("padding_is_dear")
def test_a_newcomer_joins_those_that_it_is_like(machinery, unlike_references):
    decoder, passes = watched_decoder(machinery)
    rows = started(machinery, decoder, [UNLIKE[0], UNLIKE[2]])
    decode(decoder, 3)
    assert (set(passes), decoder.batched_bytes) == ({1}, 0)
    rows += started(machinery, decoder, [UNLIKE[1]])
    decode(decoder, 5)
    passes.clear()
    decode(decoder, 5)
    assert sorted(set(passes)) == [1, 2], "the long ones share a batch, and the short one is alone"
    rows += started(machinery, decoder, [UNLIKE[3]])
    decode(decoder, 15)
    check_replies(rows, [unlike_references[place] for place in (0, 2, 1, 3)], least=13)


@pytest.mark.usefixtures("padding_is_dear")
def test_a_group_that_ran_empty_is_forgotten_and_rows_go_on(machinery, unlike_references):
    decoder, _ = watched_decoder(machinery)
    rows = started(machinery, decoder, UNLIKE)
    decode(decoder, 5)
    for row in rows[2:]:
        decoder.remove(row)
    decode(decoder, 5)
    assert len(decoder.groups) == 1
    rows[2:] = started(machinery, decoder, UNLIKE[2:])
    decode(decoder, 10)
    check_replies(rows, unlike_references, least=8)


@pytest.mark.usefixtures("padding_is_dear")
def test_rows_of_all_batches_are_found_when_a_step_fails(machinery, unlike_references):
    breaks = FailsOnce(lambda shape: shape[0] == 2, nth=6)
    decoder = Decoder(Wrapped(machinery.network, breaks), batches=True)
    rows = started(machinery, decoder, UNLIKE)
    with pytest.raises(Breakdown):
        decode(decoder, 10)
    assert {id(row) for row in decoder.abandon()} == {id(row) for row in rows}
    assert (decoder.rows, decoder.batched_bytes) == ([], 0)
    rows = started(machinery, decoder, UNLIKE)
    decode(decoder, 10)
    check_replies(rows, unlike_references, least=8)


def test_the_last_row_of_a_batch_has_caches_of_its_own_again(machinery, references):
    decoder = Decoder(machinery.network, batches=True)
    rows = started(machinery, decoder, PROMPTS[:2])
    decode(decoder, 5)
    decoder.remove(rows[1])
    row = rows[0]
    assert decoder.batched_bytes == 0
    assert row.strand.lent is None
    assert [layer.offset for layer in row.strand.caches] == [len(row.tokens)] * 2
    decode(decoder, 10)
    check_replies(rows, references[:2], least=3)


def test_a_batch_is_joined_only_if_there_is_memory_for_its_padding(machinery):
    asked: list[list[int]] = []
    longest = len(PROMPTS[1]) + REPLY

    def has_room(lengths):
        asked.append(list(lengths))
        return sum(lengths) < 3 * longest

    decoder = Decoder(machinery.network, batches=True, has_room=has_room)
    started(machinery, decoder, [PROMPTS[1], PROMPTS[1], TINY[0]])
    decode(decoder, 2)
    assert [len(group.rows) for group in decoder.groups] == [2, 1]
    assert asked[-1] == [longest] * 3


def test_a_row_that_cannot_join_takes_its_group_with_it_and_no_other(machinery, monkeypatch):
    monkeypatch.setattr("start_llm.engine.batch._CHEAP_PADDING", 4)
    decoder = Decoder(machinery.network, batches=True)
    rows = started(machinery, decoder, [UNLIKE[0], UNLIKE[2]])
    decode(decoder, 3)
    newcomer = resting_row(machinery, UNLIKE[1])
    newcomer.cache[1] = None  # half of its caches can be merged
    decoder.add(newcomer)
    with pytest.raises(AttributeError):
        decoder.start_next()
    assert decoder.drop_starting() == [newcomer, rows[0]]
    assert decoder.rows == [rows[1]]


def test_bytes_of_batches_count_padding_and_nothing_else(machinery):
    decoder = Decoder(machinery.network, batches=True)
    long, short = started(machinery, decoder, [PROMPTS[1], TINY[0]])
    token = sum(layer.keys[..., :1, :].nbytes + layer.values[..., :1, :].nbytes for layer in long.cache)
    assert decoder.batched_bytes == 0
    decode(decoder, 4)
    assert decoder.batched_bytes >= 2 * len(PROMPTS[1]) * token
    decoder.remove(short)
    decoder.remove(long)
    assert decoder.batched_bytes == 0
    (alone,) = started(machinery, decoder, [PROMPTS[1]])
    decode(decoder, 4)
    assert decoder.batched_bytes == 0
    assert decoder.rows == [alone]


# ------------------------------------------------------------ facts about mlx_lm on which the engine is built


def test_offset_counts_prompt_and_reply_after_generation(machinery):
    cache = make_prompt_cache(machinery.network)
    steps = generate_step(mx.array(PROMPTS[0]), machinery.network, max_tokens=6, prompt_cache=cache)
    assert len(list(steps)) == 6
    assert [layer.offset for layer in cache] == [len(PROMPTS[0]) + 6] * 2


def test_holding_the_keys_of_a_cache_sees_what_is_written_later(machinery):
    """`keys` is the very object that the next forward pass writes into; a slice is a snapshot."""
    row = resting_row(machinery, PROMPTS[0])
    layer, place = row.cache[0], len(PROMPTS[0]) - 1
    held, snapshot = layer.keys, layer.keys[...]
    mx.eval(snapshot)
    before = np.array(held[..., place, :])
    machinery.network(mx.array([[5]]), cache=row.cache)
    assert layer.keys is held
    assert not (np.array(held[..., place, :]) == before).all()
    assert (np.array(snapshot[..., place, :]) == before).all()


def test_a_row_of_a_batch_that_is_dictated_to_feeds_what_it_was_told(machinery):
    decoder = Decoder(machinery.network, batches=True)
    rows = started(machinery, decoder, PROMPTS)
    decode(decoder, 6)
    rows[1].dictated.append(77)
    decode(decoder, 10)
    first, second, third = replies(rows)
    place = second.index(77)
    Tally().compare(
        second[place + 1 :], greedy_reference(machinery.network, (*PROMPTS[1], *second[: place + 1]), 9)
    )
    for reply, prompt in ((first, PROMPTS[0]), (third, PROMPTS[2])):
        Tally().compare(reply, greedy_reference(machinery.network, prompt, 16))
