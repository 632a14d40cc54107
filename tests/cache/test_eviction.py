"""Old, short and rarely used things go first, and no more than has to."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.cache import checkpoint_store, eviction
from start_llm.cache.conversations import Conversations
from start_llm.cache.eviction import retention_score
from start_llm.cache.pages import CacheItem, Checkpoint, Page
from start_llm.cache.plan import plan_restore
from tests.cache.desk import NETWORKS, Clock, Desk
from tests.cache.fakes import BYTES_OF_A_STATE, BYTES_OF_A_TOKEN
from tests.cache.integrity import check_cache

LENGTHS = st.integers(0, 10**6)
COUNTS = st.integers(0, 10**4)
AGES = st.integers(0, 10**6)


@given(length=LENGTHS, uses=COUNTS, age=AGES)
def test_it_is_a_positive_number_for_anything(length, uses, age):
    assert 0 < retention_score(length=length, uses=uses, age=age) < math.inf


@given(length=LENGTHS, uses=COUNTS, age=AGES, more=st.integers(1, 10**6))
def test_longer_more_used_and_younger_things_stay_longer(length, uses, age, more):
    usual = retention_score(length=length, uses=uses, age=age)
    assert retention_score(length=length + more, uses=uses, age=age) >= usual
    assert retention_score(length=length, uses=uses + more, age=age) >= usual
    assert retention_score(length=length, uses=uses, age=age + more) <= usual


def test_each_of_them_matters():
    usual = retention_score(length=100, uses=3, age=10)
    assert retention_score(length=101, uses=3, age=10) > usual
    assert retention_score(length=100, uses=4, age=10) > usual
    assert retention_score(length=100, uses=3, age=11) < usual


def test_a_leaf_that_was_just_used_outlives_a_long_one_that_was_not_for_an_hour():
    assert retention_score(length=256, uses=1, age=1) > retention_score(length=20_000, uses=5, age=1000)


# ------------------------------------------------------------------------ limits on conversations, and on age

SIZE = 12
"""Tokens of a conversation, if nothing else is said."""
BYTES = SIZE * BYTES_OF_A_TOKEN
SHARED = tuple(range(8))


def talk(desk: Desk, conversation: int, length: int = SIZE) -> tuple[int, ...]:
    """One that shares nothing with the others."""
    ids = tuple(range(1000 * conversation, 1000 * conversation + length))
    desk.serve(ids)
    return ids


def left(desk: Desk, ids: tuple[int, ...]) -> int:
    """How many tokens of a conversation are kept, without using them."""
    root = desk.cache._lookup.root(b"")
    matched = desk.store.tree.match(root, ids)
    return plan_restore(root, matched, (*ids, 0), has_state=False).length


@pytest.mark.parametrize("kind", NETWORKS)
def test_no_more_conversations_are_kept_than_allowed_whatever_memory_there_is(kind):
    desk = Desk(kind, max_conversations=2)
    conversations = [talk(desk, n) for n in range(5)]
    assert [left(desk, ids) for ids in conversations] == [0, 0, 0, SIZE, SIZE]
    desk.serve((*conversations[3], 1))
    talk(desk, 7)
    assert [left(desk, ids) for ids in conversations] == [0, 0, 0, SIZE, 0], (
        "the one that goes was not used for longest"
    )


def test_conversations_count_wherever_they_lie():
    desk = Desk(max_conversations=None)
    conversations = [talk(desk, n) for n in range(6)]
    for seq_cache in desk.store.seq_caches[::2]:
        desk.store.split_into_pages(seq_cache)
    desk.limit(max_conversations=3)
    assert [left(desk, ids) for ids in conversations] == [0, 0, 0, SIZE, SIZE, SIZE]


@pytest.mark.parametrize("limits", [{"max_conversations": 6}, {"budget_bytes": 6 * BYTES}])
def test_of_equals_those_that_came_first_go_first_wherever_they_lie_in_memory(limits):
    """Several processes that do the same evict the same."""
    desk = Desk(max_conversations=None, clock=Clock())
    spoken = [talk(desk, n) for n in range(20)]
    for seq_cache in desk.store.seq_caches[:]:
        desk.store.split_into_pages(seq_cache)
    root = desk.cache._lookup.root(b"")
    paths = {ids: desk.store.tree.match(root, ids) for ids in spoken}
    by_address = sorted(spoken, key=lambda ids: id(paths[ids][-1]))
    for number, ids in enumerate(reversed(by_address)):  # as if they had come in the other order
        for page in paths[ids]:
            page.number = number
    desk.limit(**limits)
    stay = [left(desk, ids) for ids in reversed(by_address)]
    assert 0 < stay.count(SIZE) <= 6
    assert stay == sorted(stay)


def test_a_conversation_that_runs_counts_for_nothing_and_stays():
    desk = Desk(max_conversations=1)
    sequences = [desk.begin(range(1000 * n, 1000 * n + SIZE)) for n in range(1, 4)]
    talk(desk, 5)
    talk(desk, 6)
    assert sum(seq_cache.is_active for seq_cache in desk.store.seq_caches) == 3
    assert all(sequence.seq_cache.caches[0].holds(sequence.seq_cache.tokens) for sequence in sequences)


@pytest.mark.parametrize(("others", "stays"), [(24, False), (23, True)])
def test_if_memory_is_short_24_conversations_are_enough(others, stays):
    """The oldest beyond them go first, although they are worth more than younger ones."""
    clock = Clock()
    desk = Desk(max_conversations=None, clock=clock)
    long = talk(desk, 99, length=100)
    clock.now += 1
    for n in range(others):
        talk(desk, n)
    assert left(desk, long) == 100, "nothing goes while there is memory"
    desk.limit(budget_bytes=desk.metrics.stored_bytes - 1)
    assert left(desk, long) == (100 if stays else 0)


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_nobody_used_for_too_long_goes_whatever_memory_there_is(kind):
    clock = Clock()
    desk = Desk(kind, cache_ttl_s=10, clock=clock)
    old, used = talk(desk, 1), talk(desk, 2)
    clock.now += 9
    desk.serve((*used, 1))
    clock.now += 1
    desk.cache.shrink()
    assert left(desk, old) == SIZE
    clock.now += 1
    desk.cache.shrink()
    assert (left(desk, old), left(desk, used)) == (0, SIZE)
    clock.now += 100
    desk.cache.shrink()
    assert desk.metrics.stored_bytes == 0


@pytest.mark.parametrize(
    ("cache_ttl_s", "age", "goes_whole"), [(None, 1801, True), (None, 1799, False), (0, 10**6, False)]
)
def test_if_memory_is_short_what_nobody_used_for_half_an_hour_goes_as_a_whole(cache_ttl_s, age, goes_whole):
    """Younger things give back from their ends what is needed, and no more. 0 is never."""
    clock = Clock()
    desk = Desk(cache_ttl_s=cache_ttl_s, clock=clock)
    old = talk(desk, 1, length=200)
    clock.now += age
    talk(desk, 2)
    assert left(desk, old) == 200, "nothing goes while there is memory"
    desk.limit(budget_bytes=desk.metrics.stored_bytes - 1)
    assert left(desk, old) == 0 if goes_whole else 150 < left(desk, old) < 200


# ---------------------------------------------------------------- states at the root, and at pages of others

WITH_STATE = pytest.mark.parametrize("kind", ["hybrid", "recurrent", "windows"])


def tails(desk: Desk) -> set[tuple[int, ...]]:
    return {checkpoint.tail for checkpoint in desk.store.checkpoints}


@WITH_STATE
def test_a_prompt_shorter_than_a_page_goes_with_its_states_when_nobody_used_it_for_too_long(kind):
    clock = Clock()
    desk = Desk(kind, cache_ttl_s=10, clock=clock)
    desk.serve((1, 2, 3), boundaries=(2,))
    clock.now += 11
    desk.cache.shrink()
    check_cache(desk.cache)
    assert (desk.metrics.stored_bytes, desk.metrics.checkpoints) == (0, 0)


@WITH_STATE
@pytest.mark.parametrize("shared", [(), SHARED], ids=["root", "shared page"])
def test_states_of_an_unused_conversation_go_although_others_need_the_page_before_them(kind, shared):
    """Also those that were left when its caches were split. What leads to the other one as well stays."""
    clock = Clock()
    desk = Desk(kind, cache_ttl_s=10, clock=clock)
    used, first = (*shared, 5, 6, 7, 7, 7, 7), len(shared) + 1
    for last in range(50, 53):
        desk.serve((*shared, 5, last, last), boundaries=(first, first + 1))
    desk.store.split_into_pages(desk.store.seq_caches[0])
    for _ in range(2):
        desk.serve(used, boundaries=(first, len(used) - 1))
        clock.now += 6
    desk.cache.shrink()
    check_cache(desk.cache)
    assert all(not tail or tail[0] in (5, 7) for tail in tails(desk))
    assert not any(set(tail) & {50, 51, 52} for tail in tails(desk))
    assert (5,) in tails(desk)
    assert left(desk, used) == len(used)


@WITH_STATE
def test_states_go_with_the_conversations_that_are_too_many(kind):
    desk = Desk(kind, max_conversations=2)
    for last in range(50, 60):
        desk.serve((5, last, last), boundaries=(1, 2))
    assert {tail[1] for tail in tails(desk) if len(tail) > 1} <= {58, 59}
    assert (5,) in tails(desk), "both begin with it"


@WITH_STATE
def test_the_state_at_the_end_of_caches_that_are_cut_up_is_as_young_as_they_are(kind):
    """It was kept on the way, before the conversation went on in place and was given up there."""
    clock = Clock()
    desk = Desk(kind, clock=clock)
    for _ in range(2):
        clock.now += 100
        opened = desk.cache.opener.open((*range(10), 77), b"", (9,))
        desk.compute(opened, range(9))
        desk.end(opened, range(9))
    desk.store.split_into_pages(*desk.store.seq_caches)
    assert [end.last_used for end in Conversations(desk.store).ends()] == [clock.now]


@WITH_STATE
def test_a_state_from_which_a_running_sequence_goes_on_stays(kind):
    clock = Clock()
    desk = Desk(kind, cache_ttl_s=10, clock=clock)
    running = desk.begin((*SHARED, 5, 6, 7, 7, 7, 7), boundaries=(len(SHARED) + 1,))
    desk.serve((*SHARED, 50, 51), boundaries=(len(SHARED) + 1,))
    clock.now += 11
    desk.cache.shrink()
    check_cache(desk.cache)
    assert tails(desk) == {(5,)}
    desk.end(running, (*SHARED, 5, 6, 7, 7, 7, 7))


# ------------------------------------------------------------------------------------------------- the budget


def test_as_much_as_there_is_memory_for_is_kept_and_a_little_more_than_needed_goes():
    desk = Desk(max_conversations=None, cache_ttl_s=None)
    for n in range(20):
        talk(desk, n)
    assert desk.metrics.stored_bytes == 20 * BYTES
    enough = math.ceil(20 * BYTES / 0.98)  # with the reserve for what counting does not see
    desk.limit(budget_bytes=enough)
    assert (desk.metrics.stored_bytes, desk.metrics.evictions) == (20 * BYTES, 0)
    desk.limit(budget_bytes=enough - 2)
    assert 0.85 * enough < desk.metrics.stored_bytes <= 0.93 * enough


@pytest.mark.parametrize("kind", NETWORKS)
def test_sequences_that_run_count_and_are_never_dropped(kind):
    desk = Desk(kind, budget=600)
    kept = talk(desk, 1)
    sequence = desk.begin(range(5000, 5010))
    assert left(desk, kept) == SIZE
    desk.cache.batched_bytes = 600
    desk.cache.shrink()
    assert (left(desk, kept), desk.metrics.stored_bytes) == (0, 0)
    assert desk.metrics.live_bytes == 600 + desk.layers.nbytes(sequence.seq_cache.caches)
    assert sequence.seq_cache.caches[0].holds(range(5000, 5009))
    desk.cache.batched_bytes = 0
    desk.end(sequence, range(5000, 5010))
    assert left(desk, tuple(range(5000, 5010))) == 10


def test_a_sequence_that_grows_pushes_out_what_rests():
    desk = Desk(budget=2 * BYTES)
    kept = talk(desk, 1)
    sequence = desk.cache.opener.open(tuple(range(5000, 5030)), b"", ())
    for end in range(1, 24):
        desk.compute(sequence, range(5000, 5000 + end))
        held = desk.metrics.stored_bytes + desk.metrics.live_bytes
        assert held <= 2 * BYTES
    assert left(desk, kept) == 0


@pytest.mark.parametrize("most", [19, 5, 1])
def test_no_more_arrays_are_kept_than_allowed(most):
    desk = Desk()
    for n in range(10):
        talk(desk, n)
        desk.serve((*range(1000 * n, 1000 * n + 8), 1, 1, 1, 1, 1))
    assert desk.metrics.arrays == 20
    desk.limit(max_arrays=most)
    assert most / 2 < desk.metrics.arrays + 1 <= most + 1
    assert desk.metrics.arrays == (desk.store.usage + desk.store.active_usage).arrays


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_states_take_three_tenths_of_the_budget(kind):
    desk = Desk(kind, budget=10_000)
    for n in range(45):
        desk.serve(range(1000 * n, 1000 * n + 8), boundaries=(4,))
        assert desk.metrics.checkpoint_bytes <= 3000
    assert desk.metrics.checkpoints == 3000 // BYTES_OF_A_STATE
    assert left(desk, tuple(range(8))) == 8, "only states had to go"


def test_the_best_state_may_be_larger_than_three_tenths_of_the_budget():
    desk = Desk("recurrent", budget=3 * BYTES_OF_A_STATE)
    ids = range(1000, 1016)
    desk.serve(ids, boundaries=(4, 12))
    (checkpoint,) = desk.store.checkpoints
    assert checkpoint.position == 12


@pytest.mark.parametrize("kind", NETWORKS)
def test_without_a_budget_all_goes_but_what_a_sequence_stands_on(kind):
    desk = Desk(kind)
    for last in range(4):
        desk.serve((*range(20), last, *[7] * last), boundaries=(5, 13))
        talk(desk, 1 + last)
    sequence = desk.begin((*range(13), 9, 9))
    desk.limit(budget_bytes=0)
    assert desk.metrics.evictions > 0
    assert list(Conversations(desk.store).ends()) == []
    assert not desk.store.checkpoints
    assert {id(page) for page in desk.store.tree.pages()} == {id(page) for page in sequence.seq_cache.path}
    desk.end(sequence, (*range(13), 9, 9))
    assert (desk.metrics.stored_bytes, desk.metrics.pages, desk.metrics.arrays) == (0, 0, 0)


def test_what_is_listed_twice_is_let_go_once():
    """A state that was used after the caches after it: it goes by itself, and learns when they go."""
    clock = Clock()
    desk = Desk("hybrid", budget=10_000, clock=clock)
    desk.serve(range(19), boundaries=(17, 18))
    clock.now += 100
    assert desk.serve((*range(17), 5)) == 17
    desk.cache.batched_bytes = 10_000
    desk.cache.shrink()
    check_cache(desk.cache)
    assert (desk.metrics.stored_bytes, desk.metrics.pages, desk.metrics.checkpoints) == (0, 0, 0)


# -------------------------------------------------------------------------------- what goes is written before


class Saving:
    """Takes what is evicted."""

    def __init__(self) -> None:
        self.saved: list[CacheItem] = []

    def save(self, victim: CacheItem) -> None:
        self.saved.append(victim)

    def is_dispensable(self, item: CacheItem) -> bool:
        return False

    def touch(self, path: Sequence[Page]) -> None:
        pass

    def note_change(self) -> None:
        pass


def saving(desk: Desk) -> Saving:
    taker: Any = Saving()
    desk.cache._evictor.write_back = desk.cache.disk.write_back = taker
    return taker


def test_states_that_go_for_their_share_are_written_before():
    desk = Desk("hybrid", budget=10_000)
    taker = saving(desk)
    for n in range(45):
        desk.serve(range(1000 * n, 1000 * n + 8), boundaries=(4,))
    assert all(isinstance(item, Checkpoint) for item in taker.saved)
    assert desk.metrics.evictions == len(taker.saved) > 0


# ------------------------------------------------------------------------------------------------------- work


def test_where_nothing_is_due_nothing_is_sorted(monkeypatch):
    desk = Desk(max_conversations=50, cache_ttl_s=10**6)
    for n in range(20):
        talk(desk, n)
    sorted_ends = list[int]()

    def count(ends: Iterable[CacheItem]) -> list[CacheItem]:
        listed = list(ends)
        sorted_ends.append(len(listed))
        return listed

    monkeypatch.setattr(eviction, "_oldest_first", count)
    desk.cache.shrink()
    assert sum(sorted_ends) == 0


def test_the_state_before_is_looked_for_only_where_states_are(monkeypatch):
    """A prompt of a hundred pages, none of which has a state behind it."""
    desk = Desk("windows")
    seq_cache = desk.begin(range(400)).seq_cache
    for checkpoint in desk.store.checkpoints:
        desk.store.checkpoints.drop(checkpoint)
    tails = list[Page]()
    monkeypatch.setattr(Page, "tail_of", lambda page, _: tails.append(page) or ())
    assert checkpoint_store._earlier_state(seq_cache) is None
    assert len(seq_cache.path) == 99
    assert not tails
