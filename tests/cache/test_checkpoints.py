"""State is kept where somebody may come back to, and where it is worth its bytes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from start_llm.cache.checkpoints import (
    checkpoint_to_drop,
    choose_positions,
    choose_positions_in_text,
    max_of_a_text,
    step_in_text,
)
from start_llm.cache.pages import Checkpoint, PageTree
from tests.cache.fakes import FakeCut, FakeState, kept_state, run

SIZE = 4
STATE_BYTES = FakeState(1).nbytes


# ----------------------------------------------------------------------------------------------------- places


@given(
    st.lists(st.integers(0, 9000), max_size=8).map(sorted),
    st.integers(0, 9000),
    st.integers(1, 9000),
    st.integers(0, 9000),
    st.integers(0, 9000),
    st.integers(0, 9000),
)
def test_places_are_ascending_and_have_something_to_compute_on_both_sides(
    boundaries, done, total, matched, repeated, known
):
    places = choose_positions(boundaries, done, total, matched, repeated, known)
    assert places == sorted(set(places))
    assert all(done < place < total for place in places)


@given(st.lists(st.integers(1, 500), min_size=1).map(sorted))
def test_a_new_prompt_keeps_the_ends_of_its_first_and_last_message(boundaries):
    assert choose_positions(boundaries, 0, 501, 0) == sorted({boundaries[0], boundaries[-1]})


def test_a_prompt_that_goes_on_keeps_the_end_of_its_last_message():
    assert choose_positions([100, 200, 300, 400], 250, 410, 200) == [400]
    assert choose_positions([100, 200], 250, 410, 200) == []


def test_the_end_of_the_first_message_is_kept_by_one_that_goes_on_in_the_middle_of_it():
    assert choose_positions([100, 200, 300, 400], 60, 410, 0) == [100, 400]


def test_where_an_earlier_conversation_went_another_way_state_is_kept_this_time():
    assert choose_positions([100, 200, 300, 400], 0, 410, 290) == [100, 200, 400]
    assert choose_positions([100, 200, 300, 400], 120, 410, 350) == [300, 400]


def test_state_is_kept_where_prompts_part_deep_inside_a_message():
    assert choose_positions([1000, 1100], 0, 1110, 700, known=790) == [790, 1000, 1100]
    assert choose_positions([1000, 1400], 0, 1410, 1200, known=1256) == [1000, 1256, 1400]


def test_no_state_is_kept_inside_a_message_that_saves_few_tokens():
    assert choose_positions([1000, 1100], 0, 1110, 200, known=255) == [1000, 1100]
    assert choose_positions([1000, 1400], 0, 1410, 1200, known=1255) == [1000, 1400]
    assert choose_positions([1000, 1100], 600, 1110, 700, known=790) == [1000, 1100]
    assert choose_positions([1000, 1100], 0, 1110, 1024, known=1110) == [1000, 1100]


def test_who_reads_messages_again_keeps_the_state_in_front_of_the_last_one_too():
    ends = [100, 200, 300, 400]
    assert choose_positions(ends, 100, 410, 100, repeated=200) == [300, 400]
    assert choose_positions(ends, 100, 410, 100, repeated=100) == [400]
    assert choose_positions(ends, 100, 410, 100, repeated=199) == [400]
    assert choose_positions(ends, 310, 410, 310, repeated=400) == [400]


@given(*[st.integers(0, 9000)] * 4, st.integers(6, 16))
def test_places_in_a_text_are_ascending_few_and_end_in_front_of_its_last_token(
    done, total, known, window, most
):
    places = choose_positions_in_text(done, total + 1, known, most, step_in_text(window))
    total += 1
    assert places == sorted(set(places))
    assert all(done < place < total for place in places)
    assert places[-1:] == [total - 1][: done < total - 1]
    assert len(places) <= most + 2


def test_a_text_keeps_state_at_its_end_and_at_every_step_that_it_can_afford():
    assert choose_positions_in_text(0, 40, 0, 6) == [39]
    assert choose_positions_in_text(0, 1144, 0, 6) == [256, 512, 768, 1024, 1143]
    assert choose_positions_in_text(0, 4096, 0, 6) == [768, 1536, 2304, 3072, 3840, 4095]
    assert choose_positions_in_text(0, 4096, 0, 16) == [*range(256, 4096, 256), 4095]
    assert choose_positions_in_text(0, 100_000, 0, 16)[:2] == [2048, 4096]
    assert choose_positions_in_text(600, 1144, 0, 6) == [768, 1024, 1143]
    assert choose_positions_in_text(1143, 1144, 1143, 6) == []


def test_states_of_windows_are_as_far_apart_as_these_are_long():
    assert [step_in_text(window) for window in (0, 128, 512, 1024, 4096)] == [256, 256, 512, 1024, 2048]
    assert choose_positions_in_text(0, 4096, 0, 16, 1024) == [1024, 2048, 3072, 4095]


def test_a_text_keeps_state_where_it_parts_from_an_earlier_one_if_that_saves_a_chunk():
    assert choose_positions_in_text(256, 1144, 572, 6) == [512, 572, 768, 1024, 1143]
    assert choose_positions_in_text(512, 1144, 520, 6) == [768, 1024, 1143]
    assert choose_positions_in_text(0, 40, 37, 6) == [37, 39]
    assert choose_positions_in_text(0, 300, 260, 6) == [260, 299], "one place of two that are side by side"


def test_a_text_may_have_more_states_than_a_conversation_if_they_are_small():
    assert [max_of_a_text(size, 8000) for size in (0, 1000, 100, 70, 1)] == [16, 6, 10, 14, 16]


def test_a_long_prompt_keeps_state_at_every_stride():
    assert choose_positions([], 0, 7000, 0) == [2048, 4096, 6144]
    assert choose_positions([5000], 3000, 7000, 0) == [4096, 5000, 6144]
    assert choose_positions([], 2048, 4096, 0) == []
    assert choose_positions([], 2048, 4098, 0) == [4096]


# ------------------------------------------------------------------------------------------------- superseded


class Conversations:
    """A tree with checkpoints on it."""

    def __init__(self, size: int = SIZE) -> None:
        self.tree = PageTree(size)

    def keep(self, tokens: Sequence[int]) -> Checkpoint:
        size = self.tree.page_size
        page = self.tree.root(b"")
        while len(tokens) - page.end >= size:
            part = tuple(tokens[page.end : page.end + size])
            page = self.tree.insert(page, part, run(part, page.end), 1)
        tail = tuple(tokens[page.end :])
        checkpoint = kept_state(page, tail, FakeState(1), FakeCut(tail) if tail else None, 1)
        page.checkpoints.append(checkpoint)
        return checkpoint


CHEAP, DEAR = STATE_BYTES / 1000, STATE_BYTES / 4.0
"""Bytes of a token: a state is worth a thousand of them, or four."""


def dropped(
    newest: Checkpoint, token_bytes: float, boundaries: Sequence[int], *, is_tight: bool
) -> int | None:
    """Return where the checkpoint is that is dropped."""
    checkpoint = checkpoint_to_drop(newest, token_bytes, boundaries, is_tight=is_tight)
    return checkpoint and checkpoint.position


def test_few_checkpoints_that_save_enough_are_all_kept():
    kept = Conversations()
    for length in (5, 20, 40, 60, 80, 100):
        assert dropped(kept.keep(range(length)), DEAR, (), is_tight=True) is None


def test_of_too_many_the_one_goes_that_saves_least():
    kept = Conversations()
    made = {length: kept.keep(range(length)) for length in (5, 40, 60, 70, 100, 140, 180)}
    assert dropped(made[180], DEAR, (), is_tight=True) == 70


def test_one_that_saves_less_than_its_bytes_are_worth_goes():
    kept = Conversations()
    made = {length: kept.keep(range(length)) for length in (5, 40, 43, 100)}
    assert dropped(made[100], DEAR, (), is_tight=True) == 43
    made[43].page.checkpoints.remove(made[43])
    assert dropped(made[100], DEAR, (), is_tight=True) is None
    assert dropped(made[100], CHEAP, (), is_tight=True) == 40
    assert dropped(made[100], 0, (), is_tight=True) is None, "there is no KV to compare it with"


def test_while_there_is_memory_none_has_to_be_worth_its_bytes():
    kept = Conversations()
    made = {length: kept.keep(range(length)) for length in (5, 40, 43, 100)}
    assert dropped(made[100], DEAR, (), is_tight=False) is None
    assert dropped(made[100], DEAR, (), is_tight=True) == 43


def test_even_while_there_is_memory_a_conversation_has_six():
    kept = Conversations()
    made = {length: kept.keep(range(length)) for length in (5, 40, 43, 60, 80, 100, 140)}
    assert dropped(made[100], CHEAP, (), is_tight=False) is None
    assert dropped(made[140], CHEAP, (), is_tight=False) == 43


def test_of_too_many_the_end_of_the_message_before_the_newest_stays_until_there_is_a_newer_one():
    """Who changes the last message in the next request goes on from it. A stride may be between the two."""
    kept, ends = Conversations(), [5, 40, 110, 140]
    made = {length: kept.keep(range(length)) for length in (5, 40, 60, 106, 110, 120, 140)}
    assert dropped(made[140], CHEAP, ends, is_tight=False) == 120
    made[120].page.checkpoints.remove(made[120])
    made[180] = kept.keep(range(180))
    assert dropped(made[180], CHEAP, [*ends, 180], is_tight=False) == 110


def test_the_first_and_the_newest_stay_whatever_they_save():
    kept = Conversations()
    kept.keep(range(1))
    assert dropped(kept.keep(range(2)), CHEAP, (), is_tight=True) is None


def test_the_end_of_the_first_message_stays_although_many_strides_are_before_it():
    kept = Conversations()
    made = {length: kept.keep(range(length)) for length in (20, 40, 60, 80, 85, 100, 120)}
    assert dropped(made[120], CHEAP, (), is_tight=False) == 85
    assert dropped(made[120], CHEAP, (85,), is_tight=False) == 100


def test_one_that_saves_a_stride_is_worth_any_bytes():
    kept = Conversations(size=512)
    for length in (1, 2049, 2049 + 2048):
        newest = kept.keep(range(length))
    assert dropped(newest, CHEAP, (), is_tight=True) is None


def test_other_conversations_after_the_same_beginning_lose_nothing():
    """Twenty sub-agents with one system prompt: each one's state is its own."""
    kept = Conversations()
    system = list(range(17))
    kept.keep(system)
    for agent in range(20):
        for length in (20, 60):
            own = kept.keep([*system, *[1000 + agent] * length])
            assert dropped(own, DEAR, (), is_tight=True) is None


def test_short_conversations_that_end_on_the_page_where_they_begin_lose_nothing():
    kept = Conversations(size=64)
    for agent in range(20):
        assert dropped(kept.keep([0, 1000 + agent]), DEAR, (), is_tight=True) is None
