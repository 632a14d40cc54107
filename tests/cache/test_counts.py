"""The counters of prompts: their cost, the unavoidable part of it, and the reasons for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.cache import pages
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.common_beginning import common_length
from start_llm.core.events import Restored
from start_llm.telemetry.metrics import CacheMetrics
from tests.cache import integrity
from tests.cache.desk import ALL_NETWORKS, NETWORKS, PLENTY, PROMPT, REPLY, Desk
from tests.cache.fakes import FakeLayers

WITH_STATE = ["hybrid", "recurrent"]
SLICED = ["attention", "hybrid"]
ALL = len(PROMPT)


def counted(desk: Desk) -> tuple[int, int, dict[str, int]]:
    """Tokens computed, those of them that were unavoidable, and misses by reason; since the last look."""
    metrics = desk.metrics
    seen = metrics.computed_tokens, metrics.unavoidable_tokens, dict(metrics.misses)
    metrics.computed_tokens = metrics.unavoidable_tokens = 0
    metrics.misses.clear()
    return seen


def lose_everything(desk: Desk) -> None:
    desk.limit(budget_bytes=0)
    desk.limit(budget_bytes=PLENTY)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_new_prompt_and_the_same_one_under_another_salt_are_unavoidable(kind):
    desk = Desk(kind)
    desk.serve(PROMPT)
    assert counted(desk) == (ALL, ALL, {"new": 1})
    desk.end(desk.begin(PROMPT, salt=b"other"), PROMPT)
    assert counted(desk) == (ALL, ALL, {"new": 1})


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_next_turn_costs_what_is_new_in_it(kind):
    desk = Desk(kind)
    desk.serve(PROMPT, REPLY)
    counted(desk)
    desk.serve((*PROMPT, *REPLY, 5, 6))
    assert counted(desk) == (2, 2, {})


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_prompt_that_is_asked_again_costs_its_last_token(kind):
    """With state it is the one after the last message."""
    desk = Desk(kind)
    desk.serve(PROMPT, REPLY, boundaries=(18,))
    counted(desk)
    desk.serve(PROMPT, REPLY, boundaries=(18,))
    assert counted(desk) == (1, 1, {})


@pytest.mark.parametrize("boundaries", [(), (18,), (9,)])
@pytest.mark.parametrize("kind", NETWORKS)
def test_what_was_let_go_is_computed_again_but_not_unavoidable(kind, boundaries):
    """It is known to the token, whatever page or message it is in."""
    desk = Desk(kind)
    desk.serve(PROMPT, boundaries=boundaries)
    lose_everything(desk)
    counted(desk)
    desk.serve(PROMPT, boundaries=boundaries)
    assert counted(desk) == (ALL, 1, {"evicted": 1})


@pytest.mark.parametrize("shared", [16, 17, 15])
@pytest.mark.parametrize("kind", WITH_STATE)
def test_where_no_state_was_kept_tokens_are_computed_again_although_nothing_went(kind, shared):
    desk = Desk(kind)
    desk.serve(PROMPT, boundaries=(9, 13, 18))
    counted(desk)
    fork = (*PROMPT[:shared], 5, 5)
    desk.serve(fork, boundaries=(9, 13))
    assert counted(desk) == (len(fork) - 9, len(fork) - shared, {"no_state": 1})


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_prompt_that_was_given_up_and_goes_on_is_counted_once(kind):
    desk = Desk(kind)
    gone = desk.cache.opener.open(PROMPT, b"", (18,))
    desk.compute(gone, PROMPT[:11])
    desk.end(gone, PROMPT[:11])
    assert counted(desk) == (11, 11, {"new": 1})
    desk.serve(PROMPT, boundaries=(18,))
    assert counted(desk) == (ALL - 11, ALL - 11, {})


@pytest.mark.parametrize("kind", SLICED)
def test_a_prompt_that_was_given_up_and_let_go_is_known_to_its_last_token(kind):
    desk = Desk(kind)
    gone = desk.cache.opener.open(PROMPT, b"", (18,))
    desk.compute(gone, PROMPT[:11])
    desk.end(gone, PROMPT[:11])
    lose_everything(desk)
    counted(desk)
    desk.serve(PROMPT, boundaries=(18,))
    assert counted(desk) == (ALL, ALL - 11, {"evicted": 1})


def test_a_reply_that_comes_back_in_a_prompt_is_not_unavoidable_again():
    desk = Desk()
    desk.serve(PROMPT, (1, 2, 3, 4, 5, 6))
    lose_everything(desk)
    counted(desk)
    desk.serve((*PROMPT, 1, 2, 3, 4, 5, 6, 7))
    assert counted(desk) == (26, 1, {"evicted": 1})


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ALL_NETWORKS)
@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=14), min_size=1, max_size=8),
    ends=st.sets(st.integers(1, 14), max_size=2),
    budget=st.sampled_from([0, 200, PLENTY]),
)
def test_every_token_of_a_prompt_was_computed_or_reused(kind, prompts, ends, budget):
    desk = Desk(kind, budget=budget)
    for ids in prompts:
        desk.serve(ids, boundaries=sorted(end for end in ends if end <= len(ids)))
    metrics = desk.metrics
    assert metrics.computed_tokens + metrics.reused_tokens == sum(map(len, prompts))
    assert len({tuple(ids) for ids in prompts}) <= metrics.unavoidable_tokens <= metrics.computed_tokens
    assert metrics.lookups == len(prompts)
    assert set(metrics.misses) <= {"new", "evicted", *(["no_state"] if desk.layers.has_state else [])}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ALL_NETWORKS)
@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=14), min_size=1, max_size=8),
    budget=st.sampled_from([0, 200, PLENTY]),
)
def test_whoever_asks_gets_what_is_counted_however_many_ask_at_once(kind, prompts, budget):
    desk = Desk(kind, budget=budget)
    opened = [desk.begin(ids) for ids in prompts]
    restores = [item.restored for item in opened]
    assert Counter(item.miss for item in restores if item.miss) == desk.metrics.misses
    assert sum(item.tokens for item in restores) == desk.metrics.reused_tokens
    for item, ids in zip(opened, prompts, strict=True):
        desk.end(item, ids)


class Ledger:
    """All that was ever computed, by salt, kept by a test that knows nothing of pages."""

    def __init__(self) -> None:
        self._computed: dict[bytes, list[tuple[int, ...]]] = {}

    def unavoidable(self, ids: Sequence[int], salt: bytes) -> int:
        """Tokens of a prompt that were never computed before, and at least its last one."""
        known = (common_length(tuple(ids), earlier) for earlier in self._computed.get(salt, ()))
        return len(ids) - min(max(known, default=0), len(ids) - 1)

    def note(self, tokens: Sequence[int], salt: bytes) -> None:
        self._computed.setdefault(salt, []).append(tuple(tokens))


TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=30)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ALL_NETWORKS)
@given(
    requests=st.lists(
        st.tuples(TOKENS, TOKENS, st.sampled_from([b"one", b"other"]), st.booleans(), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    ends=st.sets(st.integers(1, 30), max_size=2),
)
def test_what_was_computed_before_is_never_called_unavoidable(kind, requests, ends):
    """Nor is anything else avoidable: below a page, within a message, and when nothing is left of it."""
    desk, ledger, unavoidable, computed = Desk(kind), Ledger(), 0, 0
    for ids, reply, salt, is_given_up, is_lost in requests:
        boundaries = sorted(end for end in ends if end <= len(ids))
        unavoidable += ledger.unavoidable(ids, salt)
        opened = desk.begin(ids, boundaries, salt)
        computed += len(ids) - opened.restored.tokens
        tokens = ids if is_given_up else [*ids, *reply]
        desk.end(opened, tokens)
        ledger.note(tokens, salt)
        if is_lost:
            lose_everything(desk)
        assert desk.metrics.unavoidable_tokens == unavoidable
        assert desk.metrics.computed_tokens == computed


def test_a_candidate_that_was_passed_over_is_reported(monkeypatch):
    for module in (pages, integrity):
        monkeypatch.setattr(module, "page_key", lambda parent, _: parent[1:] + parent[:1])
    desk = Desk()
    desk.serve((1, 2, 3, 4, 5))
    other = desk.begin((6, 7, 8, 9, 5))
    assert (other.restored.tokens, other.restored.rejected_keys) == (0, desk.metrics.rejected_keys) == (0, 1)


def test_without_a_cache_everything_is_computed():
    metrics = CacheMetrics()
    none = PromptCache(FakeLayers(), metrics=metrics)
    for _ in range(2):
        assert none.opener.peek(PROMPT, b"", (5,)) == Restored(0, "off")
        opened = none.opener.open(PROMPT, b"", (5,))
        assert opened.restored == Restored(0, "off")
        seq_cache = opened.seq_cache
        none.record_chunk(seq_cache, PROMPT[:10], keep_state=True)
        none.record_chunk(seq_cache, PROMPT[10:-1], keep_state=False)
        none.close(seq_cache, seq_cache.caches, PROMPT)
    assert (metrics.computed_tokens, metrics.lookups, metrics.misses) == (2 * ALL, 2, {"off": 2})
    assert (metrics.reused_tokens, metrics.unavoidable_tokens) == (0, 0)
