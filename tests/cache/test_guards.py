"""Each test here holds one guard of the cache, which `tests/mutants` takes away to see whether it turns red.

Nothing here reads the insides of a decision: what is asked is what a prompt gets back, and what is held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from start_llm.cache import pages
from start_llm.cache.computed_prefixes import ComputedPrefixIndex
from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.opening import OpenedSequence
from start_llm.cache.pages import PageTree
from start_llm.cache.prompt_cache import PromptCache
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache import integrity
from tests.cache.fakes import BYTES_OF_A_TOKEN, FakeLayers, OutOfMemory, run
from tests.cache.integrity import check_cache

PAGE = 4
PROMPT = tuple(range(10, 29))
"""Four full pages, and three tokens."""
OTHER = tuple(range(50, 69))
REPLY = (1, 2, 3)
PLENTY = 10**9


class Clock:
    """Seconds, set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Counter:
    """A cache whose prompts are computed from their beginning to their end, and checked at every step."""

    def __init__(self, *, has_state: bool = False, identity: bytes = b"", **limits: Any) -> None:
        self.layers = FakeLayers(has_state=has_state)
        self.metrics = CacheMetrics()
        self.clock = Clock()
        self.cache = PromptCache(
            self.layers,
            limits=EvictionLimits(
                **{"budget_bytes": PLENTY, "cache_ttl_s": 0, "max_conversations": 10**6} | limits
            ),
            page_size=PAGE,
            metrics=self.metrics,
            identity=identity,
            clock=self.clock,
        )

    def open(self, ids: Sequence[int], boundaries: Sequence[int] = (), salt: bytes = b"") -> OpenedSequence:
        """Everything that is given back was computed from these very tokens."""
        opened = self.cache.opener.open(tuple(ids), salt, boundaries)
        known = opened.seq_cache.tokens
        assert known == list(ids[: len(known)])
        assert len(known) < len(ids)
        assert opened.seq_cache.caches[0].holds(known)
        return opened

    def begin(self, ids: Sequence[int], boundaries: Sequence[int] = (), salt: bytes = b"") -> OpenedSequence:
        """Everything but the last token is computed."""
        opened = self.open(ids, boundaries, salt)
        self.compute(opened, ids, len(ids) - 1)
        return opened

    def compute(self, opened: OpenedSequence, ids: Sequence[int], end: int) -> None:
        for stop in [*(stop for stop in opened.checkpoint_positions if stop < end), end]:
            chunk = ids[len(opened.seq_cache.tokens) : stop]
            opened.seq_cache.caches[0].feed(chunk)
            self.cache.record_chunk(opened.seq_cache, chunk, keep_state=stop in opened.checkpoint_positions)
        check_cache(self.cache)

    def end(self, opened: OpenedSequence, tokens: Sequence[int]) -> None:
        """`tokens` is the prompt and the reply."""
        opened.seq_cache.caches[0].feed(tokens[len(opened.seq_cache.tokens) :])
        self.cache.close(opened.seq_cache, opened.seq_cache.caches, tokens)
        check_cache(self.cache)

    def serve(
        self, ids: Sequence[int], reply: Sequence[int] = (), boundaries: Sequence[int] = (), salt: bytes = b""
    ) -> int:
        """How many tokens were known."""
        before = self.metrics.reused_tokens
        self.end(self.begin(ids, boundaries, salt), [*ids, *reply])
        return self.metrics.reused_tokens - before

    def known(self, ids: Sequence[int], salt: bytes = b"") -> int:
        """How many tokens of a prompt would not have to be computed; the prompt is given up at once."""
        opened = self.open(ids, salt=salt)
        length = len(opened.seq_cache.tokens)
        self.end(opened, opened.seq_cache.tokens)
        return length

    def cut_up(self) -> None:
        """Whatever rests is cut into pages."""
        for seq_cache in self.cache._store.seq_caches:
            if not seq_cache.is_active:
                self.cache._store.split_into_pages(seq_cache)
        check_cache(self.cache)


# --------------------------------------------------------------------------------------------- whose KV it is


def test_nothing_computed_by_other_weights_is_given_back():
    counter = Counter(identity=b"one")
    counter.serve(PROMPT)
    counter.cache._lookup.identity = b"two"
    assert counter.known((*PROMPT, 1)) == 0
    counter.cache._lookup.identity = b"one"
    assert counter.known((*PROMPT, 1)) == len(PROMPT)


def test_nothing_of_one_tenant_is_given_to_another():
    counter = Counter()
    counter.serve(PROMPT, salt=b"one")
    assert counter.known((*PROMPT, 1), b"two") == 0
    assert counter.known((*PROMPT, 1), b"one") == len(PROMPT)


def test_a_tenant_cannot_name_itself_into_another_model():
    counter = Counter(identity=b"model")
    counter.serve(PROMPT, salt=b"+one")
    counter.cache._lookup.identity = b"model+"
    assert counter.known((*PROMPT, 1), b"one") == 0


def test_tokens_with_the_same_key_as_others_do_not_get_their_kv(monkeypatch):
    """As if the hash were one of the position alone."""
    for module in (pages, integrity):
        monkeypatch.setattr(
            module, "page_key", lambda parent, tokens: hashlib.blake2b(parent, digest_size=16).digest()
        )
    counter = Counter()
    counter.serve(PROMPT)
    assert counter.serve(OTHER) == 0
    assert counter.known((*PROMPT, 1)) == len(PROMPT)
    assert counter.known((*OTHER, 1)) == len(OTHER)


# --------------------------------------------------------------------------------------------- how much of it


def test_a_prompt_that_is_nearly_known_computes_only_the_rest():
    counter = Counter()
    counter.serve(PROMPT)
    assert counter.known((*PROMPT[:-1], 99, 98)) == len(PROMPT) - 1
    counter.cut_up()
    assert counter.known((*PROMPT[:10], 99)) == 10
    assert counter.known((*PROMPT[:-1], 99, 98)) == len(PROMPT) - 1


def test_what_is_after_the_last_full_page_stays_when_caches_are_cut_up():
    counter = Counter()
    counter.serve(PROMPT, REPLY)
    counter.cut_up()
    assert counter.known((*PROMPT, *REPLY, 9)) == len(PROMPT) + len(REPLY)


def test_a_prompt_that_was_given_up_is_not_copied_when_it_is_asked_again():
    counter = Counter()
    gone = counter.open(PROMPT, boundaries=(18,))
    counter.compute(gone, PROMPT, 11)
    caches = gone.seq_cache.caches
    counter.end(gone, PROMPT[:11])
    assert counter.open(PROMPT, boundaries=(18,)).seq_cache.caches is caches


def test_an_edited_end_of_a_message_goes_on_from_the_state_before_it():
    counter = Counter(has_state=True)
    counter.serve(PROMPT, REPLY, boundaries=(9, 14))
    assert counter.serve((*PROMPT[:12], 9, 9), boundaries=(9, 13)) == 9
    assert counter.known((*PROMPT[:16], 9, 9)) == 14


def test_state_is_given_back_for_the_tokens_that_it_was_computed_from():
    counter = Counter(has_state=True)
    counter.serve(PROMPT, boundaries=(6, 13, 18))
    for end in (6, 18):
        counter.open((*PROMPT[:end], 99, 98, 97))


def test_the_state_at_the_end_stays_when_caches_are_cut_up():
    counter = Counter(has_state=True)
    counter.serve(PROMPT, REPLY)
    counter.cut_up()
    assert counter.known((*PROMPT, *REPLY, 9)) == len(PROMPT) + len(REPLY)


# -------------------------------------------------------------------------------------- whose caches go where


@pytest.mark.parametrize("has_state", [False, True])
def test_another_answer_to_the_same_prompt_starts_before_the_first_one(has_state):
    """The caches of the first are handed over, and put back to the end of what both share."""
    counter = Counter(has_state=has_state)
    first = counter.begin(PROMPT, boundaries=(9, 17))
    caches = first.seq_cache.caches
    counter.end(first, [*PROMPT, *range(200, 212)])
    again = counter.begin((*PROMPT[:18], 7, 7), boundaries=(9, 17))
    assert again.seq_cache.caches is caches
    counter.end(again, [*PROMPT[:18], 7, 7, 8])
    assert counter.known((*PROMPT, *range(200, 212), 9)) <= 18, "the first reply was written over"


def test_a_side_request_gets_a_copy_and_the_conversation_keeps_its_caches():
    counter = Counter()
    main = counter.begin(PROMPT, boundaries=(17,))
    caches = main.seq_cache.caches
    counter.end(main, [*PROMPT, *REPLY])
    side = counter.begin((*PROMPT[:9], 99, 98))
    assert side.seq_cache.caches is not caches
    counter.end(side, (*PROMPT[:9], 99, 98))
    assert counter.open((*PROMPT, *REPLY, 9)).seq_cache.caches is caches


def test_a_short_request_does_not_dissolve_the_caches_of_a_longer_conversation():
    counter = Counter()
    main = counter.begin(PROMPT)
    caches = main.seq_cache.caches
    counter.end(main, [*PROMPT, *REPLY])
    counter.serve((*PROMPT[:16], 99, 98))
    assert counter.open((*PROMPT, *REPLY, 9)).seq_cache.caches is caches


def test_the_caches_of_a_running_sequence_are_nobody_elses():
    counter = Counter()
    running = counter.begin(PROMPT, boundaries=(3,))
    beside = counter.open((*PROMPT[:12], 99))
    assert beside.seq_cache.caches[0] is not running.seq_cache.caches[0]
    assert running.seq_cache.caches[0].holds(PROMPT[:-1])


def test_a_short_request_does_not_cut_up_the_caches_of_a_running_sequence():
    counter = Counter()
    running = counter.begin(PROMPT)
    counter.serve((*PROMPT[:12], 99))
    assert running.seq_cache.caches[0].holds(PROMPT[:-1])
    counter.end(running, [*PROMPT, *REPLY])
    assert counter.known((*PROMPT, *REPLY, 9)) == len(PROMPT) + len(REPLY)


def test_caches_are_handed_over_for_their_own_tokens_alone():
    """The pages of the prompt lie in them first, and elsewhere then."""
    counter = Counter()
    long = counter.begin((*PROMPT[:8], *OTHER), boundaries=(3,))
    fork = counter.begin((*PROMPT[:8], *REPLY * 3))
    counter.end(long, (*PROMPT[:8], *OTHER))
    counter.end(fork, (*PROMPT[:8], *REPLY * 3))
    assert counter.known((*PROMPT[:8], *REPLY * 3, 9)) == 17


def test_what_two_sequences_computed_side_by_side_is_kept_once():
    counter = Counter()
    sequences = [counter.begin(PROMPT[:3]) for _ in range(2)]
    for sequence in sequences:
        counter.end(sequence, PROMPT[:3])
    assert counter.metrics.seq_caches == 1
    assert counter.metrics.stored_bytes == 3 * BYTES_OF_A_TOKEN


def test_a_page_lies_where_its_own_tokens_are():
    """A sequence that failed shares its first page with one, and all of its pages with nobody."""
    counter = Counter()
    beside = counter.begin((*PROMPT[:4], *OTHER))
    failed = counter.begin(PROMPT)
    counter.cache.discard(failed.seq_cache)
    check_cache(counter.cache)
    assert counter.known((*PROMPT, 1)) == 4
    counter.end(beside, (*PROMPT[:4], *OTHER))
    assert counter.known((*PROMPT, 1)) == 4


# ------------------------------------------------------------------------------------------------ what failed


def test_what_a_failed_sequence_computed_is_never_used():
    counter = Counter()
    failed = counter.begin(PROMPT)
    failed.seq_cache.caches[0].entries = [-1] * len(PROMPT)
    counter.cache.discard(failed.seq_cache)
    assert counter.known((*PROMPT, 1)) == 0


def test_a_seq_cache_whose_state_cannot_be_kept_goes_as_a_whole():
    counter = Counter(has_state=True)
    counter.serve(PROMPT)
    counter.layers.fails_after = 1
    with pytest.raises(OutOfMemory):
        counter.cut_up()
    counter.layers.fails_after = None
    check_cache(counter.cache)
    assert counter.metrics.seq_caches == 1
    counter.cache.shrink()
    assert (counter.metrics.seq_caches, counter.metrics.seq_cache_bytes) == (0, 0)


@pytest.mark.parametrize("copies", range(3))
def test_caches_that_cannot_be_put_together_leave_nothing_that_could_be_read(copies):
    """Arrays that had been moved into them are lost, and those behind them stay."""
    counter = Counter()
    counter.serve(PROMPT)
    counter.cut_up()
    counter.layers.fails_after = copies
    with suppress(OutOfMemory):
        counter.cache.discard(counter.cache.opener.open((*PROMPT[:10], 1), b"", ()).seq_cache)
    counter.layers.fails_after = None
    check_cache(counter.cache)
    assert not counter.cache._store.seq_caches
    assert counter.known((*PROMPT, 1)) in (0, len(PROMPT))
    counter.serve(PROMPT)
    assert counter.known((*PROMPT, 1)) == len(PROMPT)


# -------------------------------------------------------------------------------------------------- in motion


def test_what_a_prompt_is_restored_from_is_not_kept_beside_it():
    counter = Counter()
    counter.serve(PROMPT)
    counter.cut_up()
    counter.open((*PROMPT[:16], 1))
    counter.cache.tidy(0)
    assert counter.metrics.page_bytes == BYTES_OF_A_TOKEN * len(PROMPT[16:])
    assert counter.known((*PROMPT, 2)) == len(PROMPT)


def test_no_more_is_held_than_the_budget_when_a_conversation_branches_off_one_that_rests():
    """Neither has room beside the other: the one that rests keeps only what the other one lacks."""
    budget = 12 * len(PROMPT)
    counter = Counter(budget_bytes=budget)
    counter.serve(PROMPT)
    opened = counter.open((*PROMPT[:16], 1, 2))
    held = counter.cache._store.usage + counter.cache._store.active_usage
    assert held.nbytes - counter.cache._store.tree.unused_run_bytes <= budget
    assert opened.restored.tokens == 16
    assert counter.known((*PROMPT, 1)) == len(PROMPT)


def test_a_conversation_at_rest_keeps_its_caches_where_there_is_room_for_a_copy():
    counter = Counter()
    counter.serve(PROMPT)
    counter.open((*PROMPT[:16], 1, 2))
    assert counter.cache.opener.open((*PROMPT, 3), b"", ()).seq_cache.caches[0].offset == len(PROMPT)
    assert counter.metrics.reused_in_place == 1


def test_room_is_made_before_a_copy_is_and_not_out_of_what_is_copied(monkeypatch):
    counter = Counter(budget_bytes=500)
    counter.serve(OTHER)
    counter.serve(PROMPT)
    running = counter.open((*PROMPT, 1))
    stored: list[int] = []
    assemble = counter.layers.assemble

    def watched(*arguments: Any, **more: Any) -> Any:
        stored.append(counter.cache._store.usage.nbytes)
        return assemble(*arguments, **more)

    monkeypatch.setattr(counter.layers, "assemble", watched)
    copied = counter.open((*PROMPT[:16], 3))
    assert copied.seq_cache.tokens == list(PROMPT[:16])
    assert stored[0] + BYTES_OF_A_TOKEN * (len(PROMPT) + 16) <= 500
    assert running.seq_cache.caches[0].holds(PROMPT)


@pytest.mark.parametrize("known", ["nothing", "a sequence cache", "a run"])
def test_what_a_sequence_is_going_to_take_counts_from_the_beginning(known):
    """Forty tokens, of which some may be there."""
    counter = Counter(budget_bytes=500)
    counter.serve(OTHER)
    if known != "nothing":
        counter.serve(PROMPT)
    if known == "a run":
        counter.cut_up()
    counter.cache.opener.open((*PROMPT, 1), b"", (), 0, 40)
    assert counter.layers.reserved == 40
    assert counter.cache._store.usage.nbytes + 40 * BYTES_OF_A_TOKEN <= 500


def test_runs_are_cut_back_by_and_by_and_count_until_then():
    counter = Counter()
    counter.serve((*PROMPT, *OTHER))
    counter.cut_up()
    counter.open((*PROMPT[:16], 1))
    counter.cache.shrink()
    before = counter.metrics.page_bytes
    (run,) = counter.cache._store.tree._runs
    assert before == run.stored.nbytes
    counter.cache.tidy(0)
    check_cache(counter.cache)
    assert counter.metrics.page_bytes == run.stored.nbytes
    assert not counter.cache._store.tree.untrimmed_runs


def test_pages_that_go_take_their_memory_with_them_at_once_if_it_is_needed():
    counter = Counter(budget_bytes=300)
    counter.serve(PROMPT)
    counter.cut_up()
    counter.serve(OTHER)
    check_cache(counter.cache)
    store = counter.cache._store
    assert store.usage.nbytes <= 300
    assert 0 < counter.known((*PROMPT, 1)) < len(PROMPT)


# ----------------------------------------------------------------------------------------------------- memory


def test_a_seq_cache_that_was_cut_up_holds_nothing_whoever_still_knows_it():
    counter = Counter()
    opened = counter.begin(PROMPT)
    counter.end(opened, PROMPT)
    counter.cut_up()
    counter.cache.shrink()
    assert opened.seq_cache.caches == []
    assert counter.metrics.seq_cache_bytes == 0
    assert counter.metrics.page_bytes == BYTES_OF_A_TOKEN * len(PROMPT)


def test_a_failed_seq_cache_holds_nothing_whoever_still_knows_it():
    counter = Counter()
    opened = counter.begin(PROMPT)
    counter.cache.discard(opened.seq_cache)
    counter.cache.shrink()
    assert opened.seq_cache.caches == []
    assert counter.metrics.live_bytes == 0


def test_memory_that_was_let_go_is_given_back_to_the_system(monkeypatch):
    counter = Counter(budget_bytes=200)
    released: list[int] = []
    monkeypatch.setattr(counter.layers, "release", lambda: released.append(counter.metrics.evictions))
    counter.serve(PROMPT)
    assert not released
    counter.serve(OTHER)
    assert released


def test_no_more_arrays_than_allowed_are_kept():
    counter = Counter(max_arrays=12)
    for start in range(0, 4000, 100):
        counter.serve(range(start, start + 16))
        counter.cut_up()
        counter.cache.shrink()
        assert counter.metrics.arrays <= 12
    assert counter.metrics.evictions


def test_what_runs_counts_in_the_budget():
    counter = Counter(budget_bytes=300)
    counter.serve(PROMPT)
    counter.begin(OTHER)
    assert counter.metrics.stored_bytes + counter.metrics.live_bytes <= 300
    assert counter.metrics.live_bytes == BYTES_OF_A_TOKEN * (len(OTHER) - 1)


def test_what_lies_beside_the_seq_caches_counts_in_the_budget():
    counter = Counter(budget_bytes=300)
    counter.serve(PROMPT)
    counter.cache.batched_bytes = 200
    counter.cache.shrink()
    assert counter.metrics.stored_bytes <= 100


def test_state_has_its_share_of_the_budget_and_no_more():
    counter = Counter(has_state=True, budget_bytes=2000)
    for start in range(0, 4000, 100):
        counter.serve(range(start, start + 10), boundaries=(3, 7))
        assert counter.metrics.checkpoint_bytes <= 0.3 * 2000


def test_the_number_of_conversations_is_kept_and_the_latest_stay():
    counter = Counter(max_conversations=2)
    for first in (100, 200, 300):
        counter.serve(range(first, first + 9))
    assert counter.metrics.seq_caches == 2
    assert counter.known((*range(300, 309), 1)) == 9
    assert counter.known((*range(100, 109), 1)) == 0


def test_what_nobody_has_used_for_long_goes():
    counter = Counter(cache_ttl_s=60)
    counter.serve(PROMPT)
    counter.clock.now += 100
    counter.serve(OTHER)
    assert counter.known((*PROMPT, 1)) == 0


def test_the_pages_under_a_running_sequence_stay_when_the_conversation_that_made_them_goes():
    counter = Counter(max_conversations=1)
    counter.serve(PROMPT)
    running = counter.begin((*PROMPT[:16], 99))
    counter.serve(OTHER)
    assert counter.known((*PROMPT[:16], 98)) == 16
    assert running.seq_cache.caches[0].holds(PROMPT[:16])
    check_cache(counter.cache)


def test_a_running_sequence_is_not_let_go_although_memory_is_short():
    counter = Counter(budget_bytes=0)
    running = counter.begin(PROMPT)
    assert running.seq_cache.caches[0].holds(PROMPT[:-1])
    counter.end(running, PROMPT)
    assert counter.metrics.stored_bytes == 0


def test_no_more_is_remembered_of_what_was_computed_than_allowed():
    tree, computed_prefixes = PageTree(PAGE), ComputedPrefixIndex(PAGE, max_bytes=1000)
    page = tree.root(b"")
    for start in range(0, 40, PAGE):
        tokens = tuple(range(start, start + PAGE))
        page = tree.insert(page, tokens, run(tokens, start), 1)
        computed_prefixes.note_pages([page])
        assert 0 < computed_prefixes.nbytes <= 1000
