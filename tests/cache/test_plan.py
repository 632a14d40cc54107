"""The longest restore is found, with the least copying, and never more than the prompt has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from start_llm.cache.pages import Checkpoint, Page, PageTree, SequenceCache
from start_llm.cache.plan import RestorePlan, RestoreSource, plan_restore
from tests.cache.fakes import FakeCut, FakeState, kept_state, run

SIZE = 4
LONG = tuple(range(100, 118))
"""Four full pages, and two tokens."""


class Stored:
    """A tree with things put into it by hand."""

    def __init__(self) -> None:
        self.tree = PageTree(SIZE)
        self.root = self.tree.root(b"")

    def pages(self, tokens: Sequence[int], holder: SequenceCache | None = None) -> list[Page]:
        """The pages of these tokens, in arrays of their own or in a sequence cache; the last may be short."""
        path: list[Page] = []
        page = self.root
        for start in range(0, len(tokens), SIZE):
            part = tuple(tokens[start : start + SIZE])
            page = self.tree.insert(page, part, holder or run(part, start), now=1)
            path.append(page)
        return path

    def seq_cache(
        self, tokens: Sequence[int], *, live: bool = False, shared_prefix_length: int | None = None
    ) -> SequenceCache:
        """A sequence cache that holds all of its pages which nobody else holds."""
        seq_cache = SequenceCache([], self.root, list(tokens), is_active=live)
        seq_cache.path = self.pages(tokens[: len(tokens) // SIZE * SIZE], seq_cache)
        seq_cache.shared_prefix_length = len(tokens) if shared_prefix_length is None else shared_prefix_length
        seq_cache.end_page.seq_caches.append(seq_cache)
        return seq_cache

    def checkpoint(self, tokens: Sequence[int], reach: int = 0) -> Checkpoint:
        """State after these tokens, which goes back by `reach`. Their full pages have to be there."""
        path = self.tree.match(self.root, tokens)
        page = path[-1] if path else self.root
        tail = tuple(tokens[page.end :])
        assert len(tail) < SIZE
        checkpoint = kept_state(page, tail, FakeState(1, (0,) * reach), FakeCut(tail) if tail else None, 1)
        page.checkpoints.append(checkpoint)
        return checkpoint

    def plan(self, ids: Sequence[int], *, has_state: bool = False) -> RestorePlan:
        matched = self.tree.match(self.root, ids[:-1])
        return plan_restore(self.root, matched, tuple(ids), has_state=has_state)


@pytest.fixture
def stored() -> Stored:
    return Stored()


def spans(plan: RestorePlan) -> list[tuple[int, int]]:
    """Return the copied spans, from place to place."""
    tail = [(plan.tail.start, plan.tail.end)] if plan.tail else []
    return [*((page.start, page.end) for page in plan.path), *tail]


# --------------------------------------------------------------------------------------------------- no state


@pytest.mark.parametrize("has_state", [False, True])
def test_nothing_is_known_of_a_new_prompt(stored, has_state):
    stored.seq_cache(LONG)
    for ids in ((1,), (1, 2), (1, *LONG), LONG[:1]):
        assert stored.plan(ids, has_state=has_state) == RestorePlan()


@pytest.mark.parametrize("length", [2, 5, 8, 9, 13, 16, 18])
def test_pages_are_restored_to_the_exact_token_but_for_the_last(stored, length):
    path = stored.pages(LONG)
    plan = stored.plan(LONG[:length])
    assert plan.length == length - 1
    assert plan.path == tuple(path[: (length - 1) // SIZE])
    assert [token for span in spans(plan) for token in range(*span)] == list(range(length - 1))
    assert plan.reused_in_place is plan.checkpoint is None


def test_the_part_of_a_page_before_a_difference_is_used(stored):
    stored.pages(LONG)
    plan = stored.plan((*LONG[:11], 7, 7, 7))
    assert (plan.length, len(plan.path)) == (11, 2)
    assert spans(plan) == [(0, 4), (4, 8), (8, 11)]


def test_a_short_page_is_used_and_goes_no_further_than_it_says(stored):
    stored.pages(LONG)
    assert stored.plan((*LONG, 7, 7)).length == 18


def test_a_page_that_is_lost_is_not_used_as_a_whole_or_in_part(stored):
    path = stored.pages(LONG)
    stored.tree.hold(path[2], None)
    for ids in (LONG, (*LONG[:11], 7, 7)):
        plan = stored.plan(ids)
        assert (plan.length, plan.path) == (8, tuple(path[:2]))


def test_the_longest_of_several_ways_on_is_taken(stored):
    stored.pages((*LONG[:9], 7, 7, 7))
    stored.seq_cache((*LONG[:11],), live=True)
    stored.pages((*LONG[:10], 8, 8))
    plan = stored.plan(LONG)
    assert plan.length == 11
    assert plan.tail and isinstance(plan.tail.item, SequenceCache)


def test_a_running_sequence_is_copied_and_never_handed_over(stored):
    seq_cache = stored.seq_cache(LONG, live=True, shared_prefix_length=0)
    plan = stored.plan((*LONG, 1))
    assert plan.length == 18
    assert plan.reused_in_place is None
    assert (plan.path, plan.tail) == (tuple(seq_cache.path), RestoreSource(seq_cache, 16, 18))


@pytest.mark.parametrize(
    ("ids", "length"), [((*LONG, 1), 18), (LONG, 17), ((*LONG[:14], 1), 14), ((*LONG[:16], 1), 16)]
)
def test_a_resting_seq_cache_is_handed_over_if_only_its_reply_is_lost(stored, ids, length):
    seq_cache = stored.seq_cache(LONG, shared_prefix_length=14)
    plan = stored.plan(ids)
    assert plan.reused_in_place is seq_cache
    assert (plan.length, plan.tail) == (length, None)
    assert plan.path == tuple(seq_cache.path[: length // SIZE])


def test_a_resting_seq_cache_is_copied_where_a_prompt_goes_another_way_before_its_end(stored):
    seq_cache = stored.seq_cache(LONG, shared_prefix_length=14)
    plan = stored.plan((*LONG[:13], 1))
    assert plan.reused_in_place is None
    assert plan.tail == RestoreSource(seq_cache.path[3], 12, 13)


def test_a_seq_cache_is_handed_over_although_others_hold_some_of_its_pages(stored):
    stored.pages(LONG[:8])
    seq_cache = stored.seq_cache(LONG, shared_prefix_length=14)
    assert stored.plan((*LONG, 1)).reused_in_place is seq_cache


def test_what_a_checkpoint_has_after_its_page_is_the_tail(stored):
    stored.pages(LONG[:16])
    checkpoint = stored.checkpoint(LONG[:18])
    assert stored.plan((*LONG, 1), has_state=True).tail == RestoreSource(checkpoint, 16, 18)


# ------------------------------------------------------------------------------------------------- with state


def test_with_state_pages_alone_are_no_place_to_go_on(stored):
    stored.pages(LONG)
    stored.seq_cache(LONG, live=True)
    assert stored.plan((*LONG, 1), has_state=True) == RestorePlan()


def test_the_deepest_checkpoint_within_the_prompt_counts(stored):
    path = stored.pages(LONG[:16])
    for length in (3, 8, 10, 11, 16):
        stored.checkpoint(LONG[:length])
    stored.checkpoint((*LONG[:12], 1))
    plans = [stored.plan(LONG[:length], has_state=True) for length in range(2, 19)]
    assert [plan.length for plan in plans] == [0, 0, *[3] * 5, 8, 8, 10, *[11] * 5, 16, 16]
    for plan in plans[2:]:
        assert plan.checkpoint
        assert plan.checkpoint.position == plan.length
        assert plan.path == tuple(path[: plan.length // SIZE])
        assert sum(end - start for start, end in spans(plan)) == plan.length
    assert stored.plan((*LONG[:12], 1, 1), has_state=True).length == 13


def test_a_checkpoint_is_not_used_after_a_lost_page(stored):
    path = stored.pages(LONG[:16])
    stored.checkpoint(LONG[:6])
    stored.checkpoint(LONG)
    stored.tree.hold(path[2], None)
    assert stored.plan((*LONG, 1), has_state=True).length == 6


def test_with_state_a_seq_cache_is_handed_over_where_it_ends(stored):
    seq_cache = stored.seq_cache(LONG, shared_prefix_length=14)
    stored.checkpoint(LONG[:14])
    plan = stored.plan((*LONG, 1), has_state=True)
    assert (plan.length, plan.reused_in_place, plan.checkpoint) == (18, seq_cache, None)


def test_with_state_a_seq_cache_that_goes_on_is_put_back_to_a_checkpoint(stored):
    seq_cache = stored.seq_cache(LONG, shared_prefix_length=14)
    early, late = stored.checkpoint(LONG[:9]), stored.checkpoint(LONG[:14])
    again = stored.plan(LONG, has_state=True)
    assert (again.length, again.reused_in_place, again.checkpoint) == (14, seq_cache, late)
    edited = stored.plan((*LONG[:13], 1), has_state=True)
    assert (edited.length, edited.reused_in_place, edited.checkpoint) == (9, None, early)
    assert edited.tail == RestoreSource(early, 8, 9)


def test_of_a_seq_cache_and_a_checkpoint_the_longer_one_counts(stored):
    seq_cache = stored.seq_cache(LONG[:6])
    assert stored.plan(LONG, has_state=True).reused_in_place is seq_cache
    checkpoint = stored.checkpoint(LONG[:7])
    assert stored.plan(LONG, has_state=True).checkpoint is checkpoint


def test_a_seq_cache_that_ends_with_the_prompt_leaves_it_nothing_to_compute(stored):
    stored.seq_cache(LONG)
    stored.checkpoint(LONG)
    assert stored.plan(LONG, has_state=True) == RestorePlan()


# ------------------------------------------------------------------------------------ states that can go back


def test_a_state_that_goes_back_serves_a_prompt_that_parts_before_it(stored):
    stored.pages(range(16))
    later = stored.checkpoint(range(16), reach=6)
    plan = stored.plan((*range(11), 50, 51), has_state=True)
    assert (plan.length, plan.checkpoint, spans(plan)) == (11, later, [(0, 4), (4, 8), (8, 11)])
    assert stored.plan((*range(9), 50), has_state=True).length == 0, "it does not go back that far"


def test_a_state_goes_back_within_the_tail_that_it_has_itself(stored):
    stored.pages(range(8))
    later = stored.checkpoint(range(11), reach=3)
    plan = stored.plan((*range(10), 50, 51), has_state=True)
    assert (plan.length, plan.checkpoint, spans(plan)) == (10, later, [(0, 4), (4, 8), (8, 10)])
    assert stored.plan((*range(8), 50), has_state=True).length == 8


def test_the_state_at_the_place_itself_counts_before_one_that_goes_back_less_far(stored):
    stored.pages(range(16))
    here, _ = stored.checkpoint(range(8)), stored.checkpoint(range(16), reach=2)
    plan = stored.plan((*range(11), 50, 51), has_state=True)
    assert (plan.length, plan.checkpoint) == (8, here)


def test_a_state_of_other_tokens_does_not_go_back_to_those_before_them(stored):
    stored.pages(range(8))
    stored.pages((*range(4), 60, 61, 62, 63))
    stored.checkpoint((*range(4), 60, 61, 62, 63), reach=8)
    assert stored.plan((*range(7), 50), has_state=True).length == 0
    assert stored.plan((*range(4), 60, 50), has_state=True).length == 5
