"""What a client asks to keep stays at least so long, as far as there is room, and is found exactly there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from start_llm.cache.checkpoints import MAX_OF_A_CONVERSATION, checkpoint_to_drop
from start_llm.cache.kept_shares import beyond_their_share
from start_llm.cache.kv_format import KVFormat
from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import KeptUntil, Page, PageTree
from start_llm.core.prompt import KeptPrefix
from tests.cache.conversations import PAGE, Cached
from tests.cache.desk import PAGE as DESK_PAGE
from tests.cache.desk import Desk
from tests.cache.fakes import BYTES_OF_A_TOKEN, FakeLayers, run
from tests.cache.integrity import check_cache
from tests.cache.test_checkpoints import CHEAP, Conversations
from tests.engine.harness import engine_request
from tests.engine.test_guards import check, counting
from tests.engine.test_prewarm import restored
from tests.engine.test_turns import Clock

BOTH = pytest.mark.parametrize("has_state", [False, True])
TOKEN_BYTES = 2 * 32 * 4
"""One layer of the counting network has keys and values of 32 numbers, four bytes each."""
PLACE, LENGTH = 333, 600
HOUR = 3600


def prompt(seed: int, length: int = LENGTH) -> tuple[int, ...]:
    return tuple(int(n) for n in np.random.default_rng(seed).integers(0, 400, length))


def keeping(clock: Clock, **changes: Any) -> Cached:
    """Return an engine whose cache goes by this clock too."""
    stepper = counting(clock=clock, **changes)
    stepper.cache._clock = stepper.cache.opener.clock = stepper.cache._evictor._clock = clock
    return stepper


def say(stepper: Cached, ids: tuple[int, ...], *kept: tuple[int, int], **more: Any) -> int:
    """Return how many tokens were restored."""
    asked = engine_request(ids, 2, kept=tuple(KeptPrefix(*prefix) for prefix in kept), **more)
    request = stepper.submit(asked)
    stepper.finish(request)
    return restored(request)


@BOTH
def test_another_prompt_goes_on_exactly_there(has_state: bool):
    stepper = keeping(Clock(), has_state=has_state)
    ids = prompt(1)
    say(stepper, ids, (PLACE, 300), boundaries=(100, 590))
    assert say(stepper, (*ids[:PLACE], *prompt(2, 200)), boundaries=(100, 500)) == PLACE
    check(stepper)


@pytest.mark.thorough
def test_without_it_a_state_is_not_there():
    stepper = keeping(Clock(), has_state=True)
    ids = prompt(1)
    say(stepper, ids, boundaries=(100, 590))
    assert say(stepper, (*ids[:PLACE], *prompt(2, 200)), boundaries=(100, 500)) == 100


@pytest.mark.thorough
@BOTH
def test_it_outlives_what_was_used_later_while_it_is_to_stay(has_state: bool):
    """Memory for four prompts, of which eight come, an hour long."""
    clock = Clock()
    stepper = keeping(clock, has_state=has_state, budget=4 * LENGTH * TOKEN_BYTES + 60_000)
    ids = prompt(1)
    say(stepper, ids, (PLACE, HOUR), boundaries=(PLACE, 590))
    for seed in range(2, 10):
        clock.now += HOUR / 10
        say(stepper, prompt(seed), boundaries=(100, 590))
    assert stepper.cached.evictions
    count = say(stepper, (*ids[:PLACE], *prompt(20, 50)), boundaries=(PLACE, 370))
    assert count == (PLACE if has_state else pytest.approx(PLACE, abs=32))


@pytest.mark.thorough
@BOTH
def test_it_is_evicted_as_everything_else_behind_that(has_state: bool):
    clock = Clock()
    stepper = keeping(clock, has_state=has_state, budget=4 * LENGTH * TOKEN_BYTES + 60_000)
    ids = prompt(1)
    say(stepper, ids, (PLACE, 300), boundaries=(PLACE, 590))
    for seed in range(2, 10):
        clock.now += HOUR / 10
        say(stepper, prompt(seed), boundaries=(100, 590))
    assert say(stepper, (*ids[:PLACE], *prompt(20, 50)), boundaries=(PLACE, 370)) == 0


@pytest.mark.thorough
@BOTH
def test_a_key_that_marks_everything_has_no_more_than_its_share(has_state: bool):
    """Memory for eight prompts. One key marks sixteen for a day; another one asks once in between."""
    clock = Clock()
    stepper = keeping(clock, has_state=has_state, budget=8 * LENGTH * TOKEN_BYTES + 60_000)
    quiet = prompt(100)
    for seed in range(1, 17):
        clock.now += 10
        say(stepper, prompt(seed), (590, 24 * HOUR), boundaries=(100, 590), salt=b"greedy")
        if seed == 13:
            say(stepper, quiet, boundaries=(100, 590), salt=b"quiet")
    assert stepper.cached.evictions
    assert say(stepper, quiet, boundaries=(100, 590), salt=b"quiet") >= 590
    assert say(stepper, prompt(1), boundaries=(100, 590), salt=b"greedy") == 0, "it was used first"
    check(stepper)


@pytest.mark.parametrize(("keys", "pages"), [(1, 4), (2, 4), (4, 2), (8, 1)])
def test_a_key_has_a_quarter_and_all_of_them_a_half(keys: int, pages: int):
    """Each has eight pages of sixteen tokens in a budget for 256; later pages were used later."""
    store = PageStore(FakeLayers(), 16)
    store.token_bytes = BYTES_OF_A_TOKEN
    for key in range(keys):
        page = store.tree.root(bytes([key]))
        for number in range(8):
            page = store.tree.insert(page, (number,) * 16, run((number,) * 16, page.end), now=number)
            page.kept_until = 100.0
    beyond = beyond_their_share(store, 256 * BYTES_OF_A_TOKEN, 0, now=50.0)
    assert len(beyond) == keys * (8 - pages)
    assert min(page.end for page in beyond if isinstance(page, Page)) == 16 * (pages + 1), "beginnings stay"
    assert not beyond_their_share(store, 256 * BYTES_OF_A_TOKEN, 0, now=100.0), "their time is over"


def test_pages_count_with_the_bytes_that_they_have_when_they_are_quantised():
    """Of 18 pages, a quarter of the budget holds nine that are exact, and all of them at 8 bits and less."""
    stepper = keeping(Clock(), kv=KVFormat(8, 32, PAGE))
    say(stepper, prompt(1, 18 * PAGE), (18 * PAGE - 1, HOUR))
    store, budget = stepper.cache._store, 4 * 9 * PAGE * TOKEN_BYTES
    assert len(beyond_their_share(store, budget, 0, now=0)) == 9, "they are exact in the caches"
    for seq_cache in store.seq_caches:
        store.split_into_pages(seq_cache)
    assert not beyond_their_share(store, budget, 0, now=0)


def test_what_is_restored_stays_anew():
    """Each use counts from its own time, as with both vendors."""
    clock = Clock()
    stepper = keeping(clock)
    ids = prompt(1)
    say(stepper, ids, (PLACE, 300))
    clock.now += 200
    say(stepper, (*ids[:400], *prompt(2, 50)), (PLACE, 300))
    kept = {page.kept_until for page in stepper.cache._store.tree.pages() if page.end <= PLACE}
    assert kept == {clock.now + 300}


def test_there_is_no_room_for_it_beside_running_requests():
    """The budget counts first: a request is not refused for what another one asks to keep."""
    stepper = keeping(Clock(), budget=LENGTH * TOKEN_BYTES + 60_000)
    say(stepper, prompt(1), (590, HOUR))
    assert say(stepper, prompt(2), boundaries=(100, 590)) == 0
    assert stepper.cached.evictions


def test_an_operator_s_limit_of_age_counts_before_it():
    clock = Clock()
    stepper = keeping(clock)
    limits = stepper.cache._evictor.limits
    stepper.cache._evictor.limits = type(limits)(budget_bytes=limits.budget_bytes, cache_ttl_s=60.0)
    say(stepper, prompt(1), (590, HOUR))
    clock.now += 100
    stepper.cache.shrink()
    assert say(stepper, prompt(1)) == 0


def test_the_short_page_at_its_end_stays_too():
    clock = Clock()
    stepper = keeping(clock)
    ids = prompt(1)
    say(stepper, ids, (595, 300))
    (seq_cache,) = stepper.cache._store.seq_caches
    stepper.cache._store.split_into_pages(seq_cache)
    last = max(stepper.cache._store.tree.pages(), key=lambda page: page.end)
    assert (last.end > 595, last.kept_until) == (True, clock.now + 300)


def test_a_preempted_prompt_still_asks_for_it():
    stepper = keeping(Clock(), has_state=True)
    ids = prompt(1, 1500)
    asked = engine_request(ids, 2, kept=(KeptPrefix(1111, 300),), boundaries=(100, 1490))
    long = stepper.submit(asked)
    stepper.step_until(lambda: long.progress)
    short = stepper.submit(engine_request(prompt(2, 20), 2))
    stepper.finish(short)
    assert not long.ending
    stepper.finish(long)
    assert say(stepper, (*ids[:1111], *prompt(3, 50)), boundaries=(100, 1150)) == 1111


def test_a_preempted_prompt_goes_on_as_its_own_though_another_one_took_its_caches():
    """The short prompt begins with all that was computed of the long one, whose caches it takes over."""
    stepper = keeping(Clock(), has_state=True)
    ids = prompt(1, 1500)
    long = stepper.submit(engine_request(ids, 2, kept=(KeptPrefix(1111, 300),), boundaries=(100, 1490)))
    stepper.step_until(lambda: long.progress)
    computed = long.progress[-1][0]
    short = stepper.submit(
        engine_request((*ids[:computed], 5, 6), 2, boundaries=(100, computed), repeated_tokens=computed)
    )
    stepper.finish(short)
    assert (restored(short), bool(long.ending)) == (computed, False)
    stepper.finish(long)
    counts = stepper.cached
    assert (counts.computed_tokens, counts.unavoidable_tokens) == (len(ids) + 2, len(ids) + 2)
    assert say(stepper, (*ids[:1111], *prompt(3, 50)), boundaries=(100, 1150)) == 1111, "the kept place"
    assert say(stepper, (*ids[:1490], *prompt(4, 50)), boundaries=(100, 1520)) == 1490, "the last message"


def test_states_that_are_to_stay_are_not_dropped_for_later_ones_of_the_conversation():
    talk = Conversations()
    places = [talk.keep(range(5 + 40 * n)) for n in range(MAX_OF_A_CONVERSATION + 1)]
    for checkpoint in places[1:-1]:
        checkpoint.kept_until = 100.0
    ends = [checkpoint.position for checkpoint in places]
    assert checkpoint_to_drop(places[-1], CHEAP, ends, is_tight=False, now=50.0) is None
    assert checkpoint_to_drop(places[-1], CHEAP, ends, is_tight=True, now=50.0) is not None, "memory is short"
    assert checkpoint_to_drop(places[-1], CHEAP, ends, is_tight=False, now=100.0) is not None


def test_where_only_the_place_before_a_changed_message_may_go_it_goes_only_if_memory_is_short():
    talk = Conversations()
    places = [talk.keep(range(5 + 40 * n)) for n in range(MAX_OF_A_CONVERSATION + 1)]
    for kept in places[2:-1]:
        kept.kept_until = 100.0
    ends = [place.position for place in places]
    assert checkpoint_to_drop(places[-1], CHEAP, ends, is_tight=False, now=50.0) is None
    assert checkpoint_to_drop(places[-1], CHEAP, ends, is_tight=True, now=50.0) is places[1]


def test_a_page_that_outgrows_the_short_one_stays_as_long():
    """The longer page has the tokens that are to stay, and is not the short one with some more."""
    tree = PageTree(8)
    root = tree.root(b"")
    short = tree.insert(root, (1, 2, 3), run((1, 2, 3)), now=1)
    short.kept_until = 300.0
    assert tree.insert(root, (1, 2, 4), run((1, 2, 4)), now=2).kept_until == 0
    assert tree.insert(root, (1, 2, 3, 4), run((1, 2, 3, 4)), now=3).kept_until == 300.0


def test_who_takes_caches_over_keeps_the_place_in_their_last_page():
    """The next turn asks for nothing, and fills the page behind that place."""
    clock = Clock()
    stepper = keeping(clock)
    ids = prompt(1, 590)
    say(stepper, ids, (585, HOUR))
    assert say(stepper, (*ids, *prompt(2, 100))) >= 590
    until = {page.end: page.kept_until for page in stepper.cache._store.tree.pages()}
    assert {until[end] for end in range(32, 609, 32)} == {clock.now + HOUR}
    assert until[640] == 0


def test_a_place_behind_which_the_caches_were_cut_off_is_not_carried_on():
    clock = Clock()
    stepper = keeping(clock)
    ids = prompt(1, 582)
    say(stepper, ids, (583, HOUR), (579, HOUR // 2))
    (before,) = stepper.cache._store.seq_caches
    taken = stepper.cache._store.hand_over(before, before.path, 582)
    assert taken.kept == (KeptUntil(579, clock.now + HOUR // 2),)


@BOTH
@pytest.mark.parametrize("length", [20, 590], ids=["less than a page", "pages and a rest"])
def test_the_end_that_is_to_stay_outlives_half_an_hour_without_use(has_state: bool, length: int):
    """Memory is short, and what was not used for so long goes as a whole, but for what a client marked."""
    clock = Clock()
    stepper = keeping(clock, has_state=has_state)
    ids = prompt(1, length)
    say(stepper, ids, (length - 1, 2 * HOUR), boundaries=(length - 1,))
    clock.now += HOUR
    say(stepper, prompt(2, 2000), boundaries=(100, 1990))
    limits, stored = stepper.cache._evictor.limits, stepper.cached.stored_bytes
    stepper.cache._evictor.limits = type(limits)(budget_bytes=stored - 1000)
    stepper.cache.shrink()
    check_cache(stepper.cache)
    assert stepper.cached.evictions
    assert say(stepper, (*ids[: length - 1], 5, 6), boundaries=(length - 1,)) == length - 1


def test_a_place_is_noted_once_however_often_its_prompt_is_preempted_and_comes_back():
    """Each note is looked at again with every chunk."""
    desk = Desk("attention")
    opener, ids = desk.cache.opener, prompt(1, 5 * DESK_PAGE + 3)
    place = [KeptPrefix(5 * DESK_PAGE + 2, HOUR)]
    opened = opener.with_kept(opener.open(ids, b"", ()), ids, place)
    desk.compute(opened, ids[:-1])
    for _ in range(4):
        caches = opened.seq_cache.caches
        desk.cache.close(opened.seq_cache, caches, list(ids[:-1]), is_paused=True)
        opened = opener.reopen(ids, b"", (), opened.seq_cache)
    assert len(opened.seq_cache.kept) == 1
    for _ in range(4):
        desk.cache.close(opened.seq_cache, opened.seq_cache.caches, list(ids[:-1]))
        opened = opener.with_kept(opener.open(ids, b"", ()), ids, place)
    assert len(opened.seq_cache.kept) == 1
