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

from start_llm.cache import computed_prefixes, pages
from start_llm.cache.conversations import Conversations
from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.opening import OpenedSequence
from start_llm.cache.pages import SequenceCache
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.common_beginning import common_length
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache import integrity
from tests.cache.desk import (
    ALL_NETWORKS,
    NETWORKS,
    PLENTY,
    PROMPT,
    REPLY,
    Clock,
    Desk,
    is_pinned,
    prompt_cache,
)
from tests.cache.fakes import BYTES_OF_A_TOKEN, FakeCache, FakeLayers, OutOfMemory
from tests.cache.integrity import check_cache


@dataclass
class LiveRow:
    """A request that is being computed. `caches` is what it computes in: its sequence cache's, or a
    batch's.
    """

    seq_cache: SequenceCache
    ids: tuple[int, ...]
    salt: bytes
    checkpoint_positions: tuple[int, ...]
    caches: list[FakeCache]
    generated: list[int] = field(default_factory=list[int])

    @property
    def done(self) -> int:
        return len(self.seq_cache.tokens)

    @property
    def left(self) -> int:
        return len(self.ids) - 1 - self.done

    @property
    def held(self) -> list[int]:
        """The tokens that its caches hold."""
        return [*self.ids[: self.done], *self.generated]


class Machine(RuleBasedStateMachine):
    """Several sequences at once, on two salts; the model is nothing but the tokens themselves."""

    kind = "attention"

    @initialize(
        budget=st.sampled_from([0, 150, 400, 1200, PLENTY, PLENTY]),
        max_conversations=st.sampled_from([None, None, 1, 3]),
        cache_ttl_s=st.sampled_from([None, None, 0, 5]),
        batched_bytes=st.sampled_from([0, 0, 100]),
    )
    def begin(
        self, budget: int, max_conversations: int | None, cache_ttl_s: float | None, batched_bytes: int
    ) -> None:
        limits = EvictionLimits(
            budget_bytes=budget, cache_ttl_s=cache_ttl_s, max_conversations=max_conversations
        )
        self.cache, self.layers = prompt_cache(self.kind, limits)
        self.cache.batched_bytes = batched_bytes
        self.budget = budget
        self.sequences: list[LiveRow] = []
        self.known: list[tuple[bytes, tuple[int, ...]]] = [(b"", ())]
        self.promised: list[tuple[bytes, tuple[int, ...]]] = []
        self.evicted = 0

    @property
    def metrics(self) -> CacheMetrics:
        return self.cache._metrics

    # ------------------------------------------------------------------------------------------------ opening

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(data=st.data(), more=st.lists(st.integers(1, 2), min_size=1, max_size=9))
    def open(self, data: st.DataObject, more: list[int]) -> None:
        """A prompt that goes along with something known for a while; mostly with all of it."""
        salt, base = data.draw(st.sampled_from(self.known))
        cut = data.draw(st.sampled_from([len(base), len(base), len(base) - 1, len(base) // 2]))
        self._open(
            (*base[: max(cut, 0)], *more), data.draw(st.sampled_from([salt, salt, salt, b"other"])), data
        )

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        salt, base = data.draw(st.sampled_from(self.known))
        if base:
            self._open(base, salt, data)

    def _open(self, ids: tuple[int, ...], salt: bytes, data: st.DataObject) -> None:
        boundaries = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=3)))
        before = deepcopy(self.cache._metrics)
        peeked = self.cache.opener.peek(ids, salt, boundaries)
        assert self.cache._metrics == before, "a question is counted"
        opened = self.cache.opener.open(ids, salt, boundaries)
        assert opened.restored == peeked
        self._check_opened(opened, ids, salt)
        sequence = LiveRow(opened.seq_cache, ids, salt, opened.checkpoint_positions, opened.seq_cache.caches)
        self.sequences.append(sequence)
        self.known.append((salt, ids))

    def _check_opened(self, opened: OpenedSequence, ids: tuple[int, ...], salt: bytes) -> None:
        seq_cache, done = opened.seq_cache, len(opened.seq_cache.tokens)
        assert seq_cache.tokens == list(ids[:done])
        assert done < len(ids), "a token is left to compute"
        assert seq_cache.caches[0].holds(ids[:done])
        assert seq_cache.is_active
        assert list(opened.checkpoint_positions) == sorted(set(opened.checkpoint_positions))
        assert all(done < stop < len(ids) for stop in opened.checkpoint_positions)
        assert self.layers.has_state or not opened.checkpoint_positions
        self._forget_promises()  # to make room for this one, others may have gone
        shared = [common_length(ids[:-1], kept) for other, kept in self.promised if other == salt]
        assert done >= max(shared, default=0), "something is computed twice"

    # ------------------------------------------------------------------------------------------------ growing

    @precondition(lambda self: any(sequence.left for sequence in self.sequences))
    @rule(data=st.data(), most=st.integers(1, 7))
    def grow(self, data: st.DataObject, most: int) -> None:
        sequence = data.draw(st.sampled_from([sequence for sequence in self.sequences if sequence.left]))
        self._grow(sequence, most)

    @precondition(lambda self: any(sequence.left for sequence in self.sequences))
    @rule(data=st.data())
    def grow_to_the_end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([sequence for sequence in self.sequences if sequence.left]))
        while sequence.left:
            self._grow(sequence, 7)

    def _grow(self, sequence: LiveRow, most: int) -> None:
        stops = [stop for stop in sequence.checkpoint_positions if stop > sequence.done]
        last = len(sequence.ids) if self.cache.passes_checkpoints or not stops else stops[0]
        end = min(sequence.done + most, sequence.done + sequence.left, last)
        sequence.caches[0].feed(sequence.ids[sequence.done : end])
        for stop in (*(stop for stop in stops if stop < end), end):
            piece = sequence.ids[sequence.done : stop]
            self.cache.record_chunk(sequence.seq_cache, piece, keep_state=stop in stops, ahead=end - stop)
        self._settled()

    @precondition(lambda self: any(not sequence.left for sequence in self.sequences))
    @rule(data=st.data(), reply=st.lists(st.integers(1, 2), min_size=1, max_size=7), batched=st.booleans())
    def decode(self, data: st.DataObject, reply: list[int], batched: bool) -> None:
        """In the sequence cache's own caches, or in copies, as in a batch."""
        sequence = data.draw(st.sampled_from([sequence for sequence in self.sequences if not sequence.left]))
        if batched:
            sequence.caches = [cache.copy() for cache in sequence.caches]
        tokens = reply if sequence.generated else [sequence.ids[-1], *reply]
        sequence.caches[0].feed(tokens)
        sequence.generated += tokens

    # ------------------------------------------------------------------------------------------------ the end

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """At the end of a reply, or in the middle of prefill or decode."""
        sequence = data.draw(st.sampled_from(self.sequences))
        self._drop(sequence)
        self._close(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(st.integers(1, 2), min_size=1, max_size=5))
    def take_a_turn(self, data: st.DataObject, more: list[int]) -> None:
        """The next turn of a conversation begins with all that was computed for this one."""
        sequence = data.draw(st.sampled_from(self.sequences))
        evicted = self.cache._evictor.evicted
        self._drop(sequence)
        held = self._close(sequence)
        self._open((*held, *more), sequence.salt, data)
        if self.cache._evictor.evicted == evicted:
            assert self.sequences[-1].done >= len(held)

    def _close(self, sequence: LiveRow) -> tuple[int, ...]:
        evicted, held = self.cache._evictor.evicted, tuple(sequence.held)
        self.cache.close(sequence.seq_cache, sequence.caches, held)
        self.known.append((sequence.salt, held))
        self._settled()
        if self.cache._evictor.evicted == evicted:
            self._promise(sequence.salt, held[: sequence.seq_cache.shared_prefix_length])
        return held

    @rule()
    def tidy(self) -> None:
        """Part of it at a time, as between two steps."""
        self.cache.tidy(0)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self._drop(sequence)
        sequence.caches[0].entries = [-1] * sequence.caches[0].offset
        sequence.caches[0].digest = -1
        self.cache.discard(sequence.seq_cache)
        self.promised.clear()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), copies=st.integers(0, 3))
    def run_out_of_memory_at_the_end(self, data: st.DataObject, copies: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self._drop(sequence)
        self.layers.fails_after = copies
        try:
            self.cache.close(sequence.seq_cache, sequence.caches, tuple(sequence.held))
        except OutOfMemory:
            self.cache.discard(sequence.seq_cache)
        finally:
            self.layers.fails_after = None
        self.promised.clear()

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(data=st.data(), copies=st.integers(0, 3))
    def run_out_of_memory_at_the_start(self, data: st.DataObject, copies: int) -> None:
        salt, base = data.draw(st.sampled_from(self.known))
        self.layers.fails_after = copies
        try:
            opened = self.cache.opener.open((*base, 1), salt, ())
        except OutOfMemory:
            self.promised.clear()
        else:
            self.cache.discard(opened.seq_cache)
            self.promised.clear()
        finally:
            self.layers.fails_after = None

    def _drop(self, sequence: LiveRow) -> None:
        self.sequences = [row for row in self.sequences if row is not sequence]

    # ----------------------------------------------------------------------------------------- what must hold

    def _promise(self, salt: bytes, tokens: tuple[int, ...]) -> None:
        """Without state, what was computed for a prompt is never computed again while nothing has to go."""
        if not self.layers.has_state:
            self.promised.append((salt, tokens))

    def _settled(self) -> None:
        """Assert the laws that hold whenever the cache had an opportunity to let things go."""
        self._forget_promises()
        store = self.cache._store
        stored, held = store.usage, store.usage + store.active_usage
        beside = self.cache.batched_bytes
        assert held.nbytes + beside <= self.budget or is_pinned(self.cache)
        max_conversations = self.cache._evictor.limits.max_conversations
        assert max_conversations is None or len(list(Conversations(store).ends())) <= max_conversations
        assert self.metrics.stored_bytes == stored.nbytes
        assert self.metrics.live_bytes == store.active_usage.nbytes + beside
        assert self.metrics.arrays == held.arrays
        assert self.metrics.pages == sum(1 for _ in store.tree.pages())
        assert self.metrics.checkpoints == len(store.checkpoints)
        assert self.metrics.seq_caches == len(store.seq_caches)

    def _forget_promises(self) -> None:
        evicted = self.cache._evictor.evicted
        if evicted > self.evicted:
            self.evicted = evicted
            self.promised.clear()

    @invariant()
    def nothing_contradicts_anything(self) -> None:
        if hasattr(self, "cache"):
            check_cache(self.cache)

    @invariant()
    def every_sequence_holds_what_it_computed(self) -> None:
        for sequence in getattr(self, "sequences", []):
            assert sequence.caches[0].holds(sequence.held)
            assert (
                sequence.seq_cache.caches[0].holds(sequence.held)
                or sequence.caches is not sequence.seq_cache.caches
            )

    @invariant()
    def everything_that_is_kept_is_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        for seq_cache in self.cache._store.seq_caches:
            if not seq_cache.is_active:
                assert seq_cache.caches[0].holds(seq_cache.tokens)


def hold_to_it(kind: str, examples: int) -> None:
    machine = type("Machine", (Machine,), {"kind": kind})
    settings = hypothesis.settings(max_examples=examples, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=settings)  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.parametrize("kind", ALL_NETWORKS)
@pytest.mark.sample(4)
def test_every_restore_is_exact_whatever_happened_before(kind):
    hold_to_it(kind, examples=50)


def weak_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """One of two after each parent. A key made from a key is another one, as with a good hash."""
    return (int.from_bytes(parent) + 1 + sum(tokens) % 2).to_bytes(17)


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("kind", ALL_NETWORKS)
def test_every_restore_is_exact_although_most_keys_are_those_of_other_tokens(kind, monkeypatch):
    for module in (pages, computed_prefixes, integrity):
        monkeypatch.setattr(module, "page_key", weak_key)
    hold_to_it(kind, examples=20)


# ---------------------------------------------------------------------------------------- one thing at a time


EVERYTHING = len(PROMPT) + len(REPLY)


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_next_turn_gets_the_very_caches_of_the_last_one(kind):
    desk = Desk(kind)
    first = desk.begin(PROMPT)
    caches = first.seq_cache.caches
    desk.end(first, [*PROMPT, *REPLY])
    second = desk.cache.opener.open((*PROMPT, *REPLY, 5, 6), b"", ())
    assert second.seq_cache.caches is caches
    assert second.seq_cache.tokens == [*PROMPT, *REPLY]
    assert (desk.metrics.lookups, desk.metrics.hits, desk.metrics.reused_in_place) == (2, 1, 1)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_fork_gets_a_copy_and_leaves_the_other_conversation_its_caches(kind):
    desk = Desk(kind)
    first = desk.begin(PROMPT, boundaries=(12, 18))
    desk.end(first, [*PROMPT, *REPLY])
    caches = first.seq_cache.caches
    fork = desk.begin((*PROMPT[:15], 5, 6))
    assert fork.seq_cache.caches is not caches
    desk.end(fork, [*PROMPT[:15], 5, 6])
    assert desk.cache.opener.open((*PROMPT, *REPLY, 7), b"", ()).seq_cache.caches is caches


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
    assert desk.cache.opener.open(PROMPT, b"other", ()).seq_cache.tokens == []


def test_a_second_sequence_gets_what_the_first_one_has_computed_so_far():
    desk = Desk()
    first = desk.cache.opener.open(PROMPT, b"", ())
    desk.compute(first, PROMPT[:11])
    second = desk.cache.opener.open(PROMPT, b"", ())
    assert second.seq_cache.tokens == list(PROMPT[:11])
    assert second.seq_cache.caches is not first.seq_cache.caches
    desk.compute(second, PROMPT)
    desk.end(first, PROMPT[:11])
    desk.end(second, PROMPT)
    assert desk.serve((*PROMPT, 1)) == len(PROMPT)


def test_what_a_running_sequence_was_restored_with_is_found_in_it():
    desk = Desk()
    first = desk.cache.opener.open(PROMPT, b"", ())
    desk.compute(first, PROMPT[:11])
    desk.cache.opener.open(PROMPT, b"", ())
    desk.cache.discard(first.seq_cache)
    assert desk.cache.opener.open(PROMPT, b"", ()).seq_cache.tokens == list(PROMPT[:11])


def test_who_gets_the_caches_of_a_longer_prompt_does_not_make_it_a_reply():
    """Asked again with an earlier end of its last message, it is still what somebody goes on from."""
    desk = Desk()
    desk.serve(PROMPT)
    desk.serve(PROMPT, boundaries=(9,))
    assert desk.metrics.reused_in_place == 1
    desk.serve((*PROMPT[:12], 5))
    assert desk.serve(PROMPT) == len(PROMPT) - 1


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_was_given_up_is_handed_over_to_who_asks_again(kind):
    desk = Desk(kind)
    gone = desk.cache.opener.open(PROMPT, b"", (18,))
    desk.compute(gone, PROMPT[:11])
    desk.end(gone, PROMPT[:11])
    caches = gone.seq_cache.caches
    again = desk.cache.opener.open(PROMPT, b"", (18,))
    assert again.seq_cache.caches is caches
    assert again.seq_cache.tokens == list(PROMPT[:11])


def test_an_answer_that_is_replaced_by_another_leaves_nothing_after():
    desk = Desk()
    desk.serve(PROMPT, REPLY)
    alone = desk.metrics.stored_bytes
    for reply in ((7, 7, 7), (8, 8, 8)):
        assert desk.serve(PROMPT, reply) == len(PROMPT) - 1
    assert desk.metrics.stored_bytes == alone
    assert desk.metrics.reused_in_place == 2


def test_a_last_message_without_anything_after_it_is_no_reply():
    desk = Desk()
    desk.serve(PROMPT, boundaries=(9, len(PROMPT)))
    assert desk.serve((*PROMPT[:15], 5), boundaries=(9, 16)) == 15
    assert desk.metrics.reused_in_place == 0
    assert desk.serve((*PROMPT, 5), boundaries=(9, 20)) == len(PROMPT)


def test_what_others_build_on_outlives_the_seq_cache_that_held_it():
    desk = Desk()
    desk.serve(PROMPT[:6], PROMPT[6:])  # a short prompt with a long reply
    fork = desk.begin((*PROMPT[:16], 5))  # goes along with all of the reply
    again = desk.begin((*PROMPT[:6], 9))  # takes the sequence cache, and says something else
    assert again.seq_cache.caches[0].holds((*PROMPT[:6],))
    desk.end(fork, (*PROMPT[:16], 5))
    assert desk.serve((*PROMPT[:16], 5, 5)) == 17


# ------------------------------------------------------------------------------------------------- with state


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_with_state_a_prompt_goes_on_from_the_ends_of_its_messages(kind):
    desk = Desk(kind)
    desk.serve(PROMPT, REPLY, boundaries=(9, 13, 18))
    assert desk.serve((*PROMPT[:15], 5)) == 9, "the first and the last message keep theirs"
    assert desk.serve((*PROMPT[:18], 5)) == 18


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_after_long_rules_other_conversations_go_on_from_their_end(kind):
    """There are more strides before that than a conversation keeps checkpoints (lesson 116)."""
    desk = Desk(kind)
    rules = tuple(range(7 * 2048 + 90))
    asked = (*rules, *[20_000] * 40)
    assert desk.serve(asked, REPLY, boundaries=(len(rules), len(asked) - 2)) == 0
    more = (*asked, *REPLY, *[20_001] * 40)
    desk.serve(more, REPLY, boundaries=(len(rules), len(asked) - 2, len(more) - 2))
    other = (*rules, *[30_000] * 40)
    assert desk.serve(other, REPLY, boundaries=(len(rules), len(other) - 2)) == len(rules)


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
        assert len(desk.cache.opener.open((*ids, 5), b"", ()).seq_cache.tokens) == len(ids)


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
    oldest = desk.cache._store.seq_caches[0]
    desk.cache._store.split_into_pages(oldest)
    kept = [item for page in (oldest.root, *oldest.path) for item in page.checkpoints]
    own = [item for item in kept if [*item.tail] == oldest.tokens[item.page.end :][: len(item.tail)]]
    left = [*oldest.path, *oldest.end_page.children.values(), *own]
    assert max(item.last_used for item in left) == oldest.last_used


def test_two_things_that_go_together_are_not_let_go_twice():
    """A short page that waits to go, and the sequence cache beside it, which hands it in again."""
    desk = Desk()
    desk.serve(range(8), (1, 1))
    desk.serve((*range(8), 2, 2))
    desk.serve((*range(8), 1, 1, 1))
    desk.cache._evictor.limits = EvictionLimits(budget_bytes=0)
    desk.cache.shrink()
    check_cache(desk.cache)
    assert desk.metrics.stored_bytes == 0
    assert list(desk.cache._store.tree.pages()) == []


def test_what_runs_is_never_let_go():
    desk = Desk(budget=0)
    sequences = [desk.begin((*PROMPT, last)) for last in range(3)]
    assert [len(sequence.seq_cache.tokens) for sequence in sequences] == [19, 19, 19]
    assert all(sequence.seq_cache.caches[0].holds(PROMPT) for sequence in sequences)
    for last, sequence in enumerate(sequences):
        desk.end(sequence, (*PROMPT, last))
    assert desk.metrics.stored_bytes == 0
    assert desk.serve(PROMPT) == 0


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_failed_is_never_used(kind):
    desk = Desk(kind)
    failed = desk.begin(PROMPT, boundaries=(12,))
    desk.cache.discard(failed.seq_cache)
    check_cache(desk.cache)
    again = desk.cache.opener.open(PROMPT, b"", (12,))
    assert again.seq_cache.tokens == []
    desk.compute(again, PROMPT[:12])
    desk.end(again, PROMPT)
    assert desk.serve((*PROMPT, 1)) == len(PROMPT)


@pytest.mark.parametrize(("end", "known"), [(2, 0), (10, 8)], ids=["at the root", "at a page of another"])
@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_a_state_that_a_failed_sequence_kept_goes_and_those_of_others_stay(kind, end, known):
    desk = Desk(kind)
    if known:
        desk.serve((*PROMPT[:8], *[1] * 5), boundaries=(8, 11))
    failed = desk.begin(PROMPT, boundaries=(end,))
    assert any(checkpoint.position == end for checkpoint in desk.store.checkpoints)
    desk.cache.discard(failed.seq_cache)
    check_cache(desk.cache)
    assert desk.cache.opener.open(PROMPT, b"", ()).restored.tokens == known


def test_what_others_computed_after_a_failed_sequence_is_used_once_it_is_reached():
    desk = Desk()
    failed = desk.begin((*PROMPT[:10],))
    beside = desk.begin(PROMPT)
    desk.end(beside, PROMPT)
    desk.cache.discard(failed.seq_cache)
    check_cache(desk.cache)
    for ids in ((*PROMPT[:10], 1), (*PROMPT[:3], 1)):
        assert desk.serve(ids) < len(ids)
    assert desk.serve(PROMPT[:12]) == 11
    assert desk.serve((*PROMPT, 1)) == len(PROMPT)


def test_pages_of_a_failed_sequence_go_to_who_holds_them_too():
    desk = Desk()
    failed, beside = desk.begin(PROMPT), desk.begin(PROMPT)
    desk.cache.discard(failed.seq_cache)
    check_cache(desk.cache)
    assert len(desk.cache.opener.open((*PROMPT, 1), b"", ()).seq_cache.tokens) == len(PROMPT) - 1
    desk.cache.discard(beside.seq_cache)
    check_cache(desk.cache)


@pytest.mark.parametrize("copies", range(8))
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_copy_that_fails_costs_its_seq_cache_and_nothing_else(kind, copies):
    desk = Desk(kind)
    desk.serve(PROMPT)
    desk.serve((*PROMPT[:16], 1, 1, 1, 1, 1), boundaries=(16,))
    forks = [desk.begin((*PROMPT[:16], 2, *[last] * 9)) for last in range(2)]
    desk.layers.fails_after = copies
    for fork in forks:
        with suppress(OutOfMemory):
            desk.cache.close(fork.seq_cache, fork.seq_cache.caches, fork.seq_cache.tokens)
    with suppress(OutOfMemory):
        desk.cache.discard(desk.cache.opener.open((*PROMPT[:9], 1), b"", ()).seq_cache)
    desk.layers.fails_after = None
    check_cache(desk.cache)
    assert all(not seq_cache.is_active for seq_cache in desk.cache._store.seq_caches)
    desk.serve(PROMPT)
    assert desk.serve((*PROMPT, 1)) == len(PROMPT)


def test_pages_without_kv_are_never_passed_over():
    """Caches would hold fewer tokens than their offset says."""
    desk = Desk()
    desk.serve(PROMPT)
    (seq_cache,) = desk.store.seq_caches
    plan = desk.cache._lookup.match((*PROMPT, 1), b"").plan
    desk.store.tree.hold(plan.path[1], None)
    copy = SequenceCache([], seq_cache.root, list(PROMPT[:16]), list(plan.path))
    with pytest.raises(ValueError, match="lost"):
        desk.store.assemble(copy, None, None, 16, 0)


# ------------------------------------------------------------------------------------------- who is preempted


def preempted(desk: Desk, tokens: Sequence[int]) -> OpenedSequence:
    """A sequence that has computed so much of the prompt, goes, and comes back."""
    opened = desk.cache.opener.open(PROMPT, b"", (18,))
    desk.compute(opened, tokens)
    before = opened.seq_cache
    desk.cache.close(before, before.caches, list(tokens), is_paused=True)
    check_cache(desk.cache)
    return desk.cache.opener.reopen(PROMPT, b"", (18,), before)


@pytest.mark.parametrize("kind", NETWORKS)
def test_who_goes_on_does_not_count_as_another_user_of_its_pages(kind):
    """Once its client has given it up, nobody has used them."""
    desk = Desk(kind)
    again = preempted(desk, PROMPT[:13])
    assert {page.uses for page in again.seq_cache.path} == {1}
    desk.cache.close(again.seq_cache, again.seq_cache.caches, PROMPT[:13], is_given_up=True)
    assert {page.uses for page in again.seq_cache.path} == {0}


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_prompt_that_is_complete_and_goes_on_is_counted_once(kind):
    """The reply has not begun: a decode step computes the last token, as it would have before."""
    desk = Desk(kind)
    again = preempted(desk, PROMPT[:18])
    assert len(again.seq_cache.tokens) == 18
    desk.compute(again, PROMPT[:18])
    assert desk.metrics.computed_tokens == desk.metrics.unavoidable_tokens == len(PROMPT)


def test_what_less_than_a_page_is_copied_from_counts_as_used():
    clock = Clock()
    desk = Desk(clock=clock)
    desk.serve(PROMPT[:7], boundaries=(6,))
    desk.store.split_into_pages(desk.store.seq_caches[0])
    last = max(desk.store.tree.pages(), key=lambda page: page.end)
    clock.now += 100
    assert len(desk.cache.opener.open((*PROMPT[:6], 1, 2), b"", ()).seq_cache.tokens) == 6
    assert (last.end, last.last_used, last.uses) == (7, clock.now, 1)


def test_without_a_cache_nothing_is_ever_given_back():
    none = PromptCache(FakeLayers())
    for _ in range(3):
        opened = none.opener.open(PROMPT, b"", (5,))
        assert (opened.seq_cache.tokens, opened.checkpoint_positions) == ([], ())
        assert opened.seq_cache.caches[0].holds(())
        opened.seq_cache.caches[0].feed(PROMPT)
        none.record_chunk(opened.seq_cache, PROMPT, keep_state=True)
        none.close(opened.seq_cache, opened.seq_cache.caches, PROMPT)
        assert opened.seq_cache.caches == [], "an interrupted sequence keeps its caches"


def test_without_a_cache_a_failed_sequence_holds_nothing():
    none = PromptCache(FakeLayers())
    seq_cache = none.opener.open(PROMPT, b"", ()).seq_cache
    seq_cache.move_to_batch(list)
    none.discard(seq_cache)
    assert (seq_cache.caches, seq_cache.fetch_from_batch) == ([], None)


@pytest.mark.parametrize("place", [18, 17, 16, 15, 10, 5, 1])
def test_a_state_that_is_taken_back_is_that_of_the_tokens_before_the_edit(place):
    desk = Desk("windows")
    desk.serve(PROMPT, REPLY)
    ids = (*PROMPT[:place], 90, 91)
    opened = desk.begin(ids)
    assert opened.restored.tokens == place
    assert opened.seq_cache.caches[0].holds(ids[:-1])
    desk.end(opened, ids)


def test_within_a_block_nothing_is_evicted_and_behind_it_all_that_is_too_much():
    desk = Desk(budget=400)
    opened = [desk.begin((number, *PROMPT)) for number in range(90, 96)]
    with desk.cache.shrinking_later():
        for sequence in opened:
            tokens = sequence.seq_cache.tokens
            desk.cache.close(sequence.seq_cache, sequence.seq_cache.caches, list(tokens))
        desk.cache.shrink()
    assert desk.metrics.evictions == 0
    assert desk.store.usage.nbytes > 400
    desk.cache.shrink_if_due()
    assert desk.metrics.evictions > 0
    assert desk.store.usage.nbytes <= 400
    check_cache(desk.cache)


def test_behind_a_block_in_which_nobody_asked_for_it_memory_is_not_counted():
    desk = Desk(budget=400)
    counted = list[int]()
    desk.cache._evictor.shrink = lambda *_, **__: counted.append(1)
    with desk.cache.shrinking_later():
        pass
    desk.cache.shrink_if_due()
    assert counted == []
    with desk.cache.shrinking_later():
        desk.cache.shrink()
    desk.cache.shrink_if_due()
    desk.cache.shrink_if_due()
    assert counted == [1]


def test_after_a_block_that_failed_what_is_too_much_can_be_evicted():
    desk = Desk(budget=400)
    opened = [desk.begin((number, *PROMPT)) for number in range(90, 96)]
    with pytest.raises(OutOfMemory), desk.cache.shrinking_later():
        for sequence in opened:
            desk.cache.close(sequence.seq_cache, sequence.seq_cache.caches, list(sequence.seq_cache.tokens))
        raise OutOfMemory
    desk.cache.shrink_if_due()
    assert desk.store.usage.nbytes <= 400
