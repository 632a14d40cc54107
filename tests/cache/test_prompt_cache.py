"""Whatever is asked in whatever order: what is given back was computed from exactly these tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from start_llm.cache import integrity, ledger, pages
from start_llm.cache.eviction import Limits
from start_llm.cache.no_reuse import NoReuse
from start_llm.cache.pages import Strand, common_length
from start_llm.cache.prompt_cache import Opened
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache.desk import NETWORKS, PLENTY, PROMPT, REPLY, Desk, is_pinned, prompt_cache
from tests.cache.fakes import BYTES_OF_A_TOKEN, FakeCache, FakeLayers, OutOfMemory


@dataclass
class LiveRow:
    """A request that is being computed. `caches` is what it computes in: its strand's, or a batch's."""

    strand: Strand
    ids: tuple[int, ...]
    salt: bytes
    stops: tuple[int, ...]
    caches: list[FakeCache]
    said: list[int] = field(default_factory=list[int])

    @property
    def done(self) -> int:
        return len(self.strand.tokens)

    @property
    def left(self) -> int:
        return len(self.ids) - 1 - self.done

    @property
    def held(self) -> list[int]:
        """The tokens that its caches hold."""
        return [*self.ids[: self.done], *self.said]


class Machine(RuleBasedStateMachine):
    """Several rows at once, on two salts; the model is nothing but the tokens themselves."""

    kind = "attention"

    @initialize(
        budget=st.sampled_from([0, 150, 400, 1200, PLENTY, PLENTY]),
        most_ends=st.sampled_from([None, None, 1, 3]),
        unused_s=st.sampled_from([None, None, 0, 5]),
        beside_bytes=st.sampled_from([0, 0, 100]),
    )
    def begin(self, budget: int, most_ends: int | None, unused_s: float | None, beside_bytes: int) -> None:
        limits = Limits(budget_bytes=budget, unused_s=unused_s, most_ends=most_ends)
        self.cache, self.layers = prompt_cache(self.kind, limits)
        self.cache.beside_bytes = beside_bytes
        self.budget = budget
        self.rows: list[LiveRow] = []
        self.known: list[tuple[bytes, tuple[int, ...]]] = [(b"", ())]
        self.promised: list[tuple[bytes, tuple[int, ...]]] = []
        self.evicted = 0

    @property
    def metrics(self) -> CacheMetrics:
        return self.cache._metrics

    # ------------------------------------------------------------------------------------------------ opening

    @precondition(lambda self: len(self.rows) < 4)
    @rule(data=st.data(), more=st.lists(st.integers(1, 2), min_size=1, max_size=9))
    def open(self, data: st.DataObject, more: list[int]) -> None:
        """A prompt that goes along with something known for a while; mostly with all of it."""
        salt, base = data.draw(st.sampled_from(self.known))
        cut = data.draw(st.sampled_from([len(base), len(base), len(base) - 1, len(base) // 2]))
        self._open(
            (*base[: max(cut, 0)], *more), data.draw(st.sampled_from([salt, salt, salt, b"other"])), data
        )

    @precondition(lambda self: len(self.rows) < 4)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        salt, base = data.draw(st.sampled_from(self.known))
        if base:
            self._open(base, salt, data)

    def _open(self, ids: tuple[int, ...], salt: bytes, data: st.DataObject) -> None:
        boundaries = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=3)))
        before = deepcopy(self.cache._metrics)
        told = self.cache.peek(ids, salt, boundaries)
        assert self.cache._metrics == before, "a question is counted"
        opened = self.cache.open(ids, salt, boundaries)
        assert opened.restored == told
        self._check_opened(opened, ids, salt)
        row = LiveRow(opened.strand, ids, salt, opened.stops, opened.strand.caches)
        self.rows.append(row)
        self.known.append((salt, ids))

    def _check_opened(self, opened: Opened, ids: tuple[int, ...], salt: bytes) -> None:
        strand, done = opened.strand, len(opened.strand.tokens)
        assert strand.tokens == list(ids[:done])
        assert done < len(ids), "a token is left to compute"
        assert strand.caches[0].holds(ids[:done])
        assert strand.is_live
        assert list(opened.stops) == sorted(set(opened.stops))
        assert all(done < stop < len(ids) for stop in opened.stops)
        assert self.layers.has_state or not opened.stops
        self._forget_promises()  # to make room for this one, others may have gone
        shared = [common_length(ids[:-1], kept) for other, kept in self.promised if other == salt]
        assert done >= max(shared, default=0), "something is computed twice"

    # ------------------------------------------------------------------------------------------------ growing

    @precondition(lambda self: any(row.left for row in self.rows))
    @rule(data=st.data(), most=st.integers(1, 7))
    def grow(self, data: st.DataObject, most: int) -> None:
        row = data.draw(st.sampled_from([row for row in self.rows if row.left]))
        self._grow(row, most)

    @precondition(lambda self: any(row.left for row in self.rows))
    @rule(data=st.data())
    def grow_to_the_end(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row in self.rows if row.left]))
        while row.left:
            self._grow(row, 7)

    def _grow(self, row: LiveRow, most: int) -> None:
        stop = next((stop for stop in row.stops if stop > row.done), len(row.ids))
        end = min(row.done + most, row.done + row.left, stop)
        chunk = row.ids[row.done : end]
        row.caches[0].feed(chunk)
        self.cache.grew(row.strand, chunk, keep_state=end in row.stops)
        self._settled()

    @precondition(lambda self: any(not row.left for row in self.rows))
    @rule(data=st.data(), reply=st.lists(st.integers(1, 2), min_size=1, max_size=7), batched=st.booleans())
    def decode(self, data: st.DataObject, reply: list[int], batched: bool) -> None:
        """In the strand's own caches, or in copies, as in a batch."""
        row = data.draw(st.sampled_from([row for row in self.rows if not row.left]))
        if batched:
            row.caches = [cache.copy() for cache in row.caches]
        tokens = reply if row.said else [row.ids[-1], *reply]
        row.caches[0].feed(tokens)
        row.said += tokens

    # ------------------------------------------------------------------------------------------------ the end

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """At the end of a reply, or in the middle of prefill or decode."""
        row = data.draw(st.sampled_from(self.rows))
        self._drop(row)
        self._close(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.lists(st.integers(1, 2), min_size=1, max_size=5))
    def take_a_turn(self, data: st.DataObject, more: list[int]) -> None:
        """The next turn of a conversation begins with all that was computed for this one."""
        row = data.draw(st.sampled_from(self.rows))
        evicted = self.cache._evictor.evicted
        self._drop(row)
        held = self._close(row)
        self._open((*held, *more), row.salt, data)
        if self.cache._evictor.evicted == evicted:
            assert self.rows[-1].done >= len(held)

    def _close(self, row: LiveRow) -> tuple[int, ...]:
        evicted, held = self.cache._evictor.evicted, tuple(row.held)
        self.cache.close(row.strand, row.caches, held)
        self.known.append((row.salt, held))
        self._settled()
        if self.cache._evictor.evicted == evicted:
            self._promise(row.salt, held[: row.strand.shared_to])
        return held

    @rule()
    def tidy(self) -> None:
        """Part of it at a time, as between two steps."""
        self.cache.tidy(0)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self._drop(row)
        row.caches[0].entries = [-1] * row.caches[0].offset
        row.caches[0].digest = -1
        self.cache.discard(row.strand)
        self.promised.clear()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), copies=st.integers(0, 3))
    def run_out_of_memory_at_the_end(self, data: st.DataObject, copies: int) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self._drop(row)
        self.layers.fails_after = copies
        try:
            self.cache.close(row.strand, row.caches, tuple(row.held))
        except OutOfMemory:
            self.cache.discard(row.strand)
        finally:
            self.layers.fails_after = None
        self.promised.clear()

    @precondition(lambda self: len(self.rows) < 4)
    @rule(data=st.data(), copies=st.integers(0, 3))
    def run_out_of_memory_at_the_start(self, data: st.DataObject, copies: int) -> None:
        salt, base = data.draw(st.sampled_from(self.known))
        self.layers.fails_after = copies
        try:
            opened = self.cache.open((*base, 1), salt, ())
        except OutOfMemory:
            self.promised.clear()
        else:
            self.cache.discard(opened.strand)
            self.promised.clear()
        finally:
            self.layers.fails_after = None

    def _drop(self, row: LiveRow) -> None:
        self.rows = [one for one in self.rows if one is not row]

    # ----------------------------------------------------------------------------------------- what must hold

    def _promise(self, salt: bytes, tokens: tuple[int, ...]) -> None:
        """Without state, what was computed for a prompt is never computed again while nothing has to go."""
        if not self.layers.has_state:
            self.promised.append((salt, tokens))

    def _settled(self) -> None:
        """What holds whenever the cache had an opportunity to let things go."""
        self._forget_promises()
        store = self.cache._store
        stored, held = store.weight, store.weight + store.live_weight
        beside = self.cache.beside_bytes
        assert held.nbytes + beside <= self.budget or is_pinned(self.cache)
        most_ends = self.cache._evictor.limits.most_ends
        assert most_ends is None or len(list(store.ends())) <= most_ends
        assert self.metrics.stored_bytes == stored.nbytes
        assert self.metrics.live_bytes == store.live_weight.nbytes + beside
        assert self.metrics.arrays == held.arrays
        assert self.metrics.pages == sum(1 for _ in store.tree.pages())
        assert self.metrics.checkpoints == len(store.checkpoints)
        assert self.metrics.strands == len(store.strands)

    def _forget_promises(self) -> None:
        evicted = self.cache._evictor.evicted
        if evicted > self.evicted:
            self.evicted = evicted
            self.promised.clear()

    @invariant()
    def nothing_contradicts_anything(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()

    @invariant()
    def every_row_holds_what_it_computed(self) -> None:
        for row in getattr(self, "rows", []):
            assert row.caches[0].holds(row.held)
            assert row.strand.caches[0].holds(row.held) or row.caches is not row.strand.caches

    @invariant()
    def everything_that_is_kept_is_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        for strand in self.cache._store.strands:
            if not strand.is_live:
                assert strand.caches[0].holds(strand.tokens)


def hold_to_it(kind: str, examples: int) -> None:
    machine = type("Machine", (Machine,), {"kind": kind})
    settings = hypothesis.settings(max_examples=examples, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=settings)  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_restore_is_exact_whatever_happened_before(kind):
    hold_to_it(kind, examples=50)


def weak_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """One of two behind each parent. A key made from a key is another one, as with a good hash."""
    return (int.from_bytes(parent) + 1 + sum(tokens) % 2).to_bytes(17)


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_restore_is_exact_although_most_keys_are_those_of_other_tokens(kind, monkeypatch):
    for module in (pages, ledger, integrity):
        monkeypatch.setattr(module, "page_key", weak_key)
    hold_to_it(kind, examples=20)


# ---------------------------------------------------------------------------------------- one thing at a time


EVERYTHING = len(PROMPT) + len(REPLY)


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_next_turn_gets_the_very_caches_of_the_last_one(kind):
    desk = Desk(kind)
    first = desk.begin(PROMPT)
    caches = first.strand.caches
    desk.end(first, [*PROMPT, *REPLY])
    second = desk.cache.open((*PROMPT, *REPLY, 5, 6), b"", ())
    assert second.strand.caches is caches
    assert second.strand.tokens == [*PROMPT, *REPLY]
    assert (desk.metrics.lookups, desk.metrics.hits, desk.metrics.handed_over) == (2, 1, 1)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_fork_gets_a_copy_and_leaves_the_other_conversation_its_caches(kind):
    desk = Desk(kind)
    first = desk.begin(PROMPT, boundaries=(12, 18))
    desk.end(first, [*PROMPT, *REPLY])
    fork = desk.begin((*PROMPT[:15], 5, 6))
    assert fork.strand.caches is not first.strand.caches
    desk.end(fork, [*PROMPT[:15], 5, 6])
    assert desk.cache.open((*PROMPT, *REPLY, 7), b"", ()).strand.caches is first.strand.caches


def test_what_two_conversations_share_is_stored_once():
    desk = Desk()
    desk.serve(PROMPT)
    alone = desk.metrics.stored_bytes
    for last in range(5):
        assert desk.serve((*PROMPT[:16], last)) == 16
    assert desk.metrics.stored_bytes == alone + 5 * BYTES_OF_A_TOKEN
    assert desk.serve(PROMPT[:17]) == 16
    assert desk.metrics.stored_bytes == alone + 5 * BYTES_OF_A_TOKEN


def test_a_prompt_is_found_again_to_the_token_and_not_by_another_salt():
    desk = Desk()
    desk.serve(PROMPT)
    assert desk.serve((*PROMPT[:14], 5)) == 14
    assert desk.cache.open(PROMPT, b"other", ()).strand.tokens == []


def test_a_second_row_gets_what_the_first_one_has_computed_so_far():
    desk = Desk()
    first = desk.cache.open(PROMPT, b"", ())
    desk.compute(first, PROMPT[:11])
    second = desk.cache.open(PROMPT, b"", ())
    assert second.strand.tokens == list(PROMPT[:11])
    assert second.strand.caches is not first.strand.caches
    desk.compute(second, PROMPT)
    desk.end(first, PROMPT[:11])
    desk.end(second, PROMPT)
    assert desk.serve((*PROMPT, 1)) == len(PROMPT)


def test_who_gets_the_caches_of_a_longer_prompt_does_not_make_it_a_reply():
    """Asked again with an earlier end of its last message, it is still what somebody goes on from."""
    desk = Desk()
    desk.serve(PROMPT)
    desk.serve(PROMPT, boundaries=(9,))
    assert desk.metrics.handed_over == 1
    desk.serve((*PROMPT[:12], 5))
    assert desk.serve(PROMPT) == len(PROMPT) - 1


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_was_given_up_is_handed_over_to_who_asks_again(kind):
    desk = Desk(kind)
    gone = desk.cache.open(PROMPT, b"", (18,))
    desk.compute(gone, PROMPT[:11])
    desk.end(gone, PROMPT[:11])
    again = desk.cache.open(PROMPT, b"", (18,))
    assert again.strand.caches is gone.strand.caches
    assert again.strand.tokens == list(PROMPT[:11])


def test_an_answer_that_is_replaced_by_another_leaves_nothing_behind():
    desk = Desk()
    desk.serve(PROMPT, REPLY)
    alone = desk.metrics.stored_bytes
    for reply in ((7, 7, 7), (8, 8, 8)):
        assert desk.serve(PROMPT, reply) == len(PROMPT) - 1
    assert desk.metrics.stored_bytes == alone
    assert desk.metrics.handed_over == 2


def test_a_last_message_without_anything_behind_it_is_no_reply():
    desk = Desk()
    desk.serve(PROMPT, boundaries=(9, len(PROMPT)))
    assert desk.serve((*PROMPT[:15], 5), boundaries=(9, 16)) == 15
    assert desk.metrics.handed_over == 0
    assert desk.serve((*PROMPT, 5), boundaries=(9, 20)) == len(PROMPT)


def test_what_others_build_on_outlives_the_strand_that_held_it():
    desk = Desk()
    desk.serve(PROMPT[:6], PROMPT[6:])  # a short prompt with a long reply
    fork = desk.begin((*PROMPT[:16], 5))  # goes along with all of the reply
    again = desk.begin((*PROMPT[:6], 9))  # takes the strand, and says something else
    assert again.strand.caches[0].holds((*PROMPT[:6],))
    desk.end(fork, (*PROMPT[:16], 5))
    assert desk.serve((*PROMPT[:16], 5, 5)) == 17


# ------------------------------------------------------------------------------------------------- with state


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_with_state_a_prompt_goes_on_from_the_ends_of_its_messages(kind):
    desk = Desk(kind)
    desk.serve(PROMPT, REPLY, boundaries=(9, 13, 18))
    assert desk.serve((*PROMPT[:15], 5)) == 9, "the first and the last message keep theirs"
    assert desk.serve((*PROMPT[:18], 5)) == 18


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_where_two_conversations_went_apart_a_third_one_goes_on(kind):
    desk = Desk(kind)
    desk.serve(PROMPT, boundaries=(5, 13, 18))
    assert desk.serve((*PROMPT[:16], 5, 5), boundaries=(5, 13, 17)) == 5
    assert desk.serve((*PROMPT[:16], 6, 6), boundaries=(5, 13, 17)) == 13


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_conversations_that_begin_alike_keep_their_own_state(kind):
    """As many as there are: they do not count as one long conversation."""
    desk = Desk(kind)
    for agent in range(12):
        ids = (*PROMPT[:9], 100 + agent, *[agent] * 20)
        desk.end(desk.begin(ids, boundaries=(9, 29)), ids)
    for agent in range(12):
        ids = (*PROMPT[:9], 100 + agent, *[agent] * 20)
        assert len(desk.cache.open((*ids, 5), b"", ()).strand.tokens) == len(ids)


# --------------------------------------------------------------------------------------------- what is let go


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_budget_is_kept_and_the_oldest_goes_first(kind):
    desk = Desk(kind, budget=400)
    prompts = [tuple(range(100 * n, 100 * n + 12)) for n in range(1, 8)]
    for ids in prompts:
        desk.serve(ids)
        assert desk.metrics.stored_bytes <= 400
    assert desk.metrics.evictions > 0
    assert desk.serve((*prompts[-1], 5)) == 12
    assert desk.serve((*prompts[0], 5)) == 0


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_an_old_conversation_leaves_when_its_caches_go_is_as_old_as_it_was(kind):
    desk = Desk(kind)
    for n in range(1, 11):
        desk.serve(range(100 * n, 100 * n + 11))
    oldest = desk.cache._store.strands[0]
    desk.cache._store.dissolve(oldest)
    left = [*oldest.path, *oldest.end_page.children.values(), *desk.cache._store.checkpoints]
    assert max(one.last_used for one in left) == oldest.last_used


def test_two_things_that_go_together_are_not_let_go_twice():
    """A short page that waits to go, and the strand beside it, which hands it in again."""
    desk = Desk()
    desk.serve(range(8), (1, 1))
    desk.serve((*range(8), 2, 2))
    desk.serve((*range(8), 1, 1, 1))
    desk.cache._evictor.limits = Limits(budget_bytes=0)
    desk.cache.shrink()
    desk.cache.check_integrity()
    assert desk.metrics.stored_bytes == 0
    assert list(desk.cache._store.tree.pages()) == []


def test_what_runs_is_never_let_go():
    desk = Desk(budget=0)
    rows = [desk.begin((*PROMPT, last)) for last in range(3)]
    assert [len(row.strand.tokens) for row in rows] == [19, 19, 19]
    assert all(row.strand.caches[0].holds(PROMPT) for row in rows)
    for last, row in enumerate(rows):
        desk.end(row, (*PROMPT, last))
    assert desk.metrics.stored_bytes == 0
    assert desk.serve(PROMPT) == 0


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_failed_is_never_used(kind):
    desk = Desk(kind)
    failed = desk.begin(PROMPT, boundaries=(12,))
    desk.cache.discard(failed.strand)
    desk.cache.check_integrity()
    again = desk.cache.open(PROMPT, b"", (12,))
    assert again.strand.tokens == []
    desk.compute(again, PROMPT[:12])
    desk.end(again, PROMPT)
    assert desk.serve((*PROMPT, 1)) == len(PROMPT)


def test_what_others_computed_behind_a_failed_row_is_used_once_it_is_reached():
    desk = Desk()
    failed = desk.begin((*PROMPT[:10],))
    beside = desk.begin(PROMPT)
    desk.end(beside, PROMPT)
    desk.cache.discard(failed.strand)
    desk.cache.check_integrity()
    for ids in ((*PROMPT[:10], 1), (*PROMPT[:3], 1)):
        assert desk.serve(ids) < len(ids)
    assert desk.serve(PROMPT[:12]) == 11
    assert desk.serve((*PROMPT, 1)) == len(PROMPT)


def test_pages_of_a_failed_row_go_to_who_holds_them_too():
    desk = Desk()
    failed, beside = desk.begin(PROMPT), desk.begin(PROMPT)
    desk.cache.discard(failed.strand)
    desk.cache.check_integrity()
    assert len(desk.cache.open((*PROMPT, 1), b"", ()).strand.tokens) == len(PROMPT) - 1
    desk.cache.discard(beside.strand)
    desk.cache.check_integrity()


@pytest.mark.parametrize("copies", range(8))
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_copy_that_fails_costs_its_strand_and_nothing_else(kind, copies):
    desk = Desk(kind)
    desk.serve(PROMPT)
    desk.serve((*PROMPT[:16], 1, 1, 1, 1, 1), boundaries=(16,))
    forks = [desk.begin((*PROMPT[:16], 2, *[last] * 9)) for last in range(2)]
    desk.layers.fails_after = copies
    for fork in forks:
        with suppress(OutOfMemory):
            desk.cache.close(fork.strand, fork.strand.caches, fork.strand.tokens)
    with suppress(OutOfMemory):
        desk.cache.discard(desk.cache.open((*PROMPT[:9], 1), b"", ()).strand)
    desk.layers.fails_after = None
    desk.cache.check_integrity()
    assert all(not strand.is_live for strand in desk.cache._store.strands)
    desk.serve(PROMPT)
    assert desk.serve((*PROMPT, 1)) == len(PROMPT)


def test_without_a_cache_nothing_is_ever_given_back():
    none = NoReuse(FakeLayers())
    for _ in range(3):
        opened = none.open(PROMPT, b"", (5,))
        assert (opened.strand.tokens, opened.stops) == ([], ())
        assert opened.strand.caches[0].holds(())
        opened.strand.caches[0].feed(PROMPT)
        none.grew(opened.strand, PROMPT, keep_state=True)
        none.close(opened.strand, opened.strand.caches, PROMPT)
        assert opened.strand.caches == [], "an interrupted row keeps its strand"


def test_without_a_cache_a_failed_row_holds_nothing():
    none = NoReuse(FakeLayers())
    strand = none.open(PROMPT, b"", ()).strand
    strand.lend(list)
    none.discard(strand)
    assert (strand.caches, strand.lent) == ([], None)
