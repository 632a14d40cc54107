"""Everything that is kept lies in one place only, and goes as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.cache.conversations import Conversations
from start_llm.cache.pages import MemoryUsage, Page, SequenceCache
from tests.cache.desk import NETWORKS, PAGE, PROMPT, Clock, Desk
from tests.cache.fakes import BYTES_OF_A_TOKEN, OutOfMemory
from tests.cache.integrity import check_cache

FORK = (*PROMPT[:17], 1, 1, 1, 1, 1, 1)
"""Longer than the prompt; they have four pages and a token in common."""
SIDE = (*PROMPT[:17], 2)
"""Shorter than the prompt."""
SHARED = PROMPT[:16]


def stored_tokens(desk: Desk) -> float:
    """How many the bytes are enough for, if nothing has state."""
    return desk.metrics.stored_bytes / BYTES_OF_A_TOKEN


def closed(desk: Desk, ids: Sequence[int]) -> SequenceCache:
    """A request that was served. Its sequence cache may rest, or be cut into pages."""
    opened = desk.begin(ids)
    desk.end(opened, ids)
    return opened.seq_cache


def known(desk: Desk, ids: Sequence[int]) -> int:
    """Tokens of `ids` that need no computing; asked without leaving a trace."""
    opened = desk.cache.opener.open((*ids, 99), b"", ())
    assert opened.seq_cache.caches[0].holds(opened.seq_cache.tokens)
    length = len(opened.seq_cache.tokens)
    desk.end(opened, opened.seq_cache.tokens)
    return length


# ------------------------------------------------------------------------------------------------ taking over


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_longer_one_of_two_conversations_keeps_its_caches_and_the_other_is_cut_into_pages(kind):
    desk = Desk(kind)
    short, long = closed(desk, PROMPT), closed(desk, FORK)
    assert desk.store.seq_caches == [long]
    assert all(page.holder is long for page in long.path)
    assert short.caches == []
    assert [known(desk, ids) for ids in (PROMPT, FORK)] == [len(PROMPT), len(FORK)]


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_idle_work_that_is_restored_from_less_than_a_page_is_as_old_as_that(kind):
    clock = Clock()
    desk = Desk(kind, clock=clock)
    used = clock.now
    desk.serve((10, 11, 12), (1,), boundaries=(2,))
    clock.now += 100
    opened = desk.cache.opener.open_for_idle_work((10, 11, 13), b"", ())
    assert (len(opened.seq_cache.tokens), opened.seq_cache.last_used) == (2, used)


def test_a_shorter_request_beside_a_conversation_leaves_it_its_caches():
    desk = Desk()
    long, _ = closed(desk, PROMPT), closed(desk, SIDE)
    assert desk.store.seq_caches == [long]
    caches = long.caches
    assert desk.cache.opener.open((*PROMPT, 5), b"", ()).seq_cache.caches is caches
    assert desk.metrics.reused_in_place == 1


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_conversation_that_runs_keeps_its_pages_whoever_ends_beside_it(kind):
    desk = Desk(kind)
    live = desk.begin(PROMPT)
    closed(desk, FORK)
    assert desk.store.seq_caches == [live.seq_cache]
    assert all(page.holder is live.seq_cache for page in live.seq_cache.path)
    assert live.seq_cache.caches[0].holds(PROMPT[:-1])
    desk.end(live, PROMPT)
    assert [known(desk, ids) for ids in (PROMPT, FORK)] == [len(PROMPT), len(FORK)]


def test_a_conversation_that_shares_nothing_leaves_the_others_alone():
    desk = Desk()
    seq_caches = [closed(desk, range(first, first + 15)) for first in (100, 200, 300)]
    assert desk.store.seq_caches == seq_caches


@pytest.mark.parametrize(
    "ending", [PROMPT, PROMPT[:18], PROMPT[:14]], ids=["all", "most", "less than a page"]
)
def test_what_another_conversation_has_too_is_not_stored_again(ending):
    desk = Desk()
    seq_cache, beside = desk.begin(PROMPT), desk.begin(ending)
    desk.end(seq_cache, PROMPT)
    desk.end(beside, ending)
    assert desk.store.seq_caches == [seq_cache.seq_cache]
    assert stored_tokens(desk) == len(PROMPT)


def distinct(sequences: Sequence[tuple[int, ...]]) -> int:
    """How many tokens they are if they share what they have in common at their beginnings."""
    return len({ids[:length] for ids in sequences for length in range(1, len(ids) + 1)})


@pytest.mark.thorough
@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=8))
@hypothesis.example([[2, 1, 2, 1, 1], [1, 1, 1, 1, 1], [2, 1, 2, 1]])
@hypothesis.settings(max_examples=50)
def test_no_token_is_stored_twice_however_conversations_part(ends):
    """But for less than a page of each, where two begin the same one. A last token may be a lost reply."""
    desk = Desk()
    prompts = [(*SHARED, *end) for end in ends]
    for ids in prompts:
        closed(desk, ids)
    desk.tidy()
    least, most = distinct([ids[:-1] for ids in prompts]), distinct(prompts)
    assert least <= stored_tokens(desk) <= most + (PAGE - 1) * len(prompts)


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_is_kept_weighs_as_much_as_before_once_all_caches_are_cut_into_pages(kind):
    desk = Desk(kind)
    for ids in (PROMPT, FORK, SIDE, range(100, 130)):
        closed(desk, ids)
    states = desk.metrics.checkpoint_bytes
    before = desk.metrics.stored_bytes - states
    for seq_cache in desk.store.seq_caches:
        desk.store.split_into_pages(seq_cache)
    desk.cache.shrink()
    check_cache(desk.cache)
    assert (desk.metrics.seq_cache_bytes, desk.store.idle_usage) == (0, MemoryUsage())
    if not desk.layers.has_state:
        assert desk.metrics.stored_bytes == before
    assert known(desk, FORK) == len(FORK)


# ------------------------------------------------------------------------------------- letting a whole one go


def drop(desk: Desk, seq_cache: SequenceCache) -> None:
    Conversations(desk.store).drop(seq_cache, lambda _: False)
    desk.cache.shrink()
    desk.cache.tidy(0)
    check_cache(desk.cache)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_conversation_alone_goes_with_everything(kind):
    desk = Desk(kind)
    desk.serve(PROMPT, boundaries=(9, 13, 18))
    drop(desk, *desk.store.seq_caches)
    assert (desk.metrics.stored_bytes, desk.metrics.pages, desk.metrics.checkpoints) == (0, 0, 0)
    assert desk.serve(PROMPT) == 0


def test_a_conversation_goes_back_to_where_another_one_stands_on_it():
    desk = Desk()
    long = closed(desk, FORK)
    closed(desk, SIDE)
    drop(desk, long)
    assert stored_tokens(desk) == len(SIDE)
    assert known(desk, FORK) == 17, "what the side request begins with"
    assert known(desk, SIDE) == len(SIDE)


def test_a_conversation_goes_no_further_back_than_is_spared():
    desk = Desk()
    seq_cache = closed(desk, PROMPT)
    Conversations(desk.store).drop(seq_cache, lambda item: isinstance(item, Page) and item.end <= 8)
    check_cache(desk.cache)
    assert known(desk, PROMPT) == 8


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_the_states_of_a_conversation_go_with_it_and_those_of_others_stay(kind):
    desk = Desk(kind)
    desk.serve(SHARED, boundaries=(8, 15))
    (gone,) = desk.store.seq_caches
    mine = closed(desk, (*PROMPT[:8], 1, 1, 1, 1, 1))
    drop(desk, gone)
    assert known(desk, SHARED) == 8
    assert known(desk, mine.tokens) == len(mine.tokens)


def test_a_conversation_that_a_live_sequence_was_copied_from_may_go():
    desk = Desk()
    long = closed(desk, FORK)
    live = desk.begin(SIDE)
    drop(desk, long)
    assert known(desk, FORK) == 17
    assert live.seq_cache.caches[0].holds(SIDE[:-1])
    desk.end(live, SIDE)
    assert known(desk, SIDE) == len(SIDE)


# --------------------------------------------------------------------------------------------- without memory


@pytest.mark.parametrize("copies", range(6))
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_copy_that_fails_while_caches_are_taken_over_costs_no_more_than_both(kind, copies):
    desk = Desk(kind)
    closed(desk, range(100, 115))
    closed(desk, PROMPT)
    long = desk.begin(FORK)
    desk.layers.fails_after = copies
    has_failed = False
    long.seq_cache.caches[0].feed(FORK[-1:])
    try:
        desk.cache.close(long.seq_cache, long.seq_cache.caches, FORK)
    except OutOfMemory:
        has_failed = True
    with suppress(OutOfMemory):
        desk.cache.tidy(0)
    desk.layers.fails_after = None
    check_cache(desk.cache)
    assert has_failed == (long.seq_cache not in desk.store.seq_caches)
    assert known(desk, range(100, 115)) == 15
    for ids in (PROMPT, FORK):
        desk.serve(ids)
        assert known(desk, ids) == len(ids)


@pytest.mark.parametrize("copies", range(4))
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_copy_that_fails_while_a_conversation_goes_costs_nobody_else_their_caches(kind, copies):
    desk = Desk(kind)
    long = closed(desk, FORK)
    live = desk.begin(SIDE)
    desk.layers.fails_after = copies
    try:
        drop(desk, long)
    except OutOfMemory:
        assert copies < len(SHARED) // PAGE
    desk.layers.fails_after = None
    check_cache(desk.cache)
    assert long not in desk.store.seq_caches
    assert live.seq_cache.caches[0].holds(SIDE[:-1])
    desk.end(live, SIDE)
    assert known(desk, SIDE) == len(SIDE)
