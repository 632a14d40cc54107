"""Recorded tokens are found by what their conversation says, and changed by nobody else."""

from __future__ import annotations

import itertools
import sqlite3
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.canonical import CanonicalKey, CanonicalMessage, Field, OmittedText, chain
from start_llm.transcripts.recorded_details import Claims, MessageDetails
from start_llm.transcripts.transcript_store import PrefixNode, TranscriptStore, Variant

ROOT = CanonicalKey.of(b"root")
PLENTY = 10**9
SILENT = MessageDetails(())
"""Tokens say nothing of a message that its key does not."""


def keys_of(*texts: str, root: CanonicalKey = ROOT) -> tuple[CanonicalKey, ...]:
    return chain(root, [CanonicalMessage(text.encode()) for text in texts])


def store_of(max_bytes: int = PLENTY, cache_ttl_s: float = 0) -> TranscriptStore:
    return TranscriptStore(max_bytes, cache_ttl_s, clock=itertools.count(1).__next__)


def add(
    store: TranscriptStore,
    key: CanonicalKey,
    depth: int,
    tokens: Iterable[int],
    *,
    last: MessageDetails = SILENT,
    claims: Claims | None = None,
    **more: Any,
) -> Variant:
    """`last` is of the last message; those before it are silent."""
    whole, details = array("I", tokens), (*[SILENT] * depth, last)
    return store.add(PrefixNode(key, depth, len(whole)), whole, details, claims=claims or Claims(), **more)


def known_tokens(store: TranscriptStore, keys: Sequence[CanonicalKey]) -> list[tuple[int, tuple[int, ...]]]:
    """Depth and tokens of all that is known of each prefix, the longest first."""
    return [(variant.depth, tuple(variant.tokens())) for key in reversed(keys) for variant in store.at(key)]


def use(store: TranscriptStore, keys: Sequence[CanonicalKey]) -> None:
    """A conversation goes on from the longest prefix."""
    store.use(next(variant for key in reversed(keys) for variant in store.at(key)))


# -------------------------------------------------------------------------------------------------- the chain


@given(st.lists(st.text(max_size=3), max_size=5), st.lists(st.text(max_size=3), max_size=5))
def test_two_prefixes_have_one_key_only_if_they_say_the_same(left, right):
    ours, theirs = keys_of(*left), keys_of(*right)
    for count in range(1, min(len(left), len(right)) + 1):
        assert (ours[count - 1] == theirs[count - 1]) == (left[:count] == right[:count])
    assert not set(ours) & set(keys_of(*left, root=CanonicalKey.of(b"another tenant")))


def test_where_one_part_ends_and_the_next_begins_counts():
    assert CanonicalKey.of(b"ab", b"c") != CanonicalKey.of(b"a", b"bc") != CanonicalKey.of(b"abc")


# -------------------------------------------------------------------------------------------------- finding


def test_each_known_prefix_is_found():
    store, keys = store_of(), keys_of("a", "b", "c")
    first = add(store, keys[0], 0, [1, 2])
    add(store, keys[1], 1, [1, 2, 3], parent=first)
    assert known_tokens(store, keys) == [(1, (1, 2, 3)), (0, (1, 2))]
    assert known_tokens(store, keys_of("a", "x")) == [(0, (1, 2))]
    assert known_tokens(store, keys_of("x", "b")) == []


def test_only_what_is_new_is_stored():
    store, keys = store_of(), keys_of("a", "b")
    first = add(store, keys[0], 0, range(1000))
    before = store.metrics.nbytes
    second = add(store, keys[1], 1, range(1010), parent=first)
    assert (len(second.delta), tuple(second.tokens())) == (10, tuple(range(1010)))
    assert store.metrics.nbytes - before == second.nbytes < first.nbytes


def test_a_message_whose_end_is_not_known_is_read_with_the_next_one():
    store, keys = store_of(), keys_of("a", "b", "c")
    details = [MessageDetails((), bytes([depth])) for depth in range(3)]
    tokens = array("I", [1, 2, 3])
    first = store.add(PrefixNode(keys[0], 0, 1), tokens, details, claims=Claims())
    last = store.add(PrefixNode(keys[2], 2, 3), tokens, details, parent=first, claims=Claims())
    assert (first.details, last.details) == (tuple(details[:1]), tuple(details[1:]))
    assert last.all_details() == tuple(details)


def test_what_builds_on_what_was_forgotten_is_whole():
    store, keys = store_of(), keys_of("a", "b")
    first = add(store, keys[0], 0, [1, 2])
    store._forget(first)
    other = add(store, keys[1], 1, [1, 2, 3], parent=first)
    assert (other.parent, tuple(other.tokens()), len(other.details)) == (None, (1, 2, 3), 2)


def test_the_same_tokens_again_are_the_same_variant():
    store, keys = store_of(), keys_of("a")
    assert add(store, keys[0], 0, [1, 2]) is add(store, keys[0], 0, [1, 2])
    assert store.metrics.variants == 1


def test_the_same_tokens_that_mean_something_else_are_another_variant():
    store, (key,) = store_of(), keys_of("a")
    add(store, key, 0, [1, 2])
    add(store, key, 0, [1, 2], last=MessageDetails((), b"some reasoning"))
    assert known_tokens(store, [key]) == [(0, (1, 2))] * 2


def test_the_same_tokens_after_others_are_another_variant():
    store, keys = store_of(), keys_of("a", "b")
    for number in (1, 2):
        parent = add(store, keys[0], 0, [number])
        assert tuple(add(store, keys[1], 1, [number, 5], parent=parent).tokens()) == (number, 5)


def test_the_same_tokens_again_are_the_newest_and_of_the_newest_session():
    store, (key,) = store_of(), keys_of("a")
    first = add(store, key, 0, [1], session="one")
    other = add(store, key, 0, [2])
    add(store, key, 0, [1], session="two")
    assert (first.session, first.last_used > other.last_used) == ("two", True)


def test_tokens_that_were_computed_again_belong_to_both_conversations():
    store, (key,) = store_of(), keys_of("a")
    first = add(store, key, 0, [1], claims=Claims({"one": None}, reply_surprisal_bits=3))
    assert add(store, key, 0, [1], claims=Claims({"two": None}, reply_surprisal_bits=2)) is first
    assert first.claims == Claims({"one": None, "two": None}, reply_surprisal_bits=3)


def test_a_reply_that_is_read_again_was_still_reported():
    store, (key,) = store_of(), keys_of("a")
    add(store, key, 0, [1], claims=Claims(is_delivered=True))
    assert add(store, key, 0, [1]).claims.is_delivered


def test_a_reply_that_was_only_read_is_reported_when_it_is_written():
    store, (key,) = store_of(), keys_of("a")
    read = add(store, key, 0, [1])
    add(store, key, 0, [1], claims=Claims(is_delivered=True))
    assert read.claims.is_delivered


def size_of(tokens: Iterable[int]) -> int:
    """What a message with these tokens takes."""
    return add(store_of(), keys_of("any")[0], 0, tokens).nbytes


def test_texts_that_were_sent_take_room():
    store, (key,) = store_of(), keys_of("a")
    status = OmittedText("git status", "block", 0, "x" * 5000)
    add(store, key, 0, [1, 2], last=MessageDetails((status,)))
    assert 5000 <= store.metrics.nbytes - size_of([1, 2]) < 6000


def test_texts_of_notes_take_room_too():
    store, (key,) = store_of(), keys_of("a")
    noted = Field("git status", 0, "block"), "x" * 5000
    add(store, key, 0, [1, 2], last=MessageDetails((), noted=(noted,)))
    assert 5000 <= store.metrics.nbytes - size_of([1, 2]) < 6000


# ----------------------------------------------------------------------------------- nobody harms another one


def test_a_branch_and_a_side_request_leave_the_main_conversation_alone():
    """The strict-append guard: whatever is written, what was there is found as before."""
    store, main = store_of(), keys_of("system", "question", "answer")
    last: Variant | None = None
    for depth in range(3):
        last = add(store, main[depth], depth, range(depth + 1), parent=last, session="s")
    before = known_tokens(store, main)
    for texts in (("system", "another question"), ("title prompt",), ("system", "question", "other answer")):
        keys = keys_of(*texts)
        add(store, keys[-1], len(texts) - 1, [0, 9, 9], session="s")
    assert known_tokens(store, main) == before


# ------------------------------------------------------------------------------------------------ forgetting


def test_a_prefix_keeps_32_and_forgets_what_was_used_least_recently_with_all_after_it():
    store, keys, other = store_of(), keys_of("a", "b"), keys_of("a", "c")
    variants = [add(store, keys[0], 0, [number]) for number in range(32)]
    add(store, keys[1], 1, [1, 5], parent=variants[1])
    kept = add(store, other[1], 1, [0, 5], parent=variants[0])
    store.use(kept)
    add(store, keys[0], 0, [32])
    assert [variant.delta[0] for variant in store.at(keys[0])] == [0, *range(2, 33)]
    assert known_tokens(store, keys[1:]) == []
    assert known_tokens(store, other[1:]) == [(1, (0, 5))]


def test_what_was_used_least_recently_goes_first_and_never_what_others_build_on():
    room = 4 * size_of(range(10))
    store, kept, other = store_of(room), keys_of("a", "b"), keys_of("x")
    first = add(store, kept[0], 0, range(10))
    add(store, kept[1], 1, range(20), parent=first)
    add(store, other[0], 0, range(10))
    use(store, kept)
    for number in range(20):
        add(store, keys_of(f"new {number}")[0], 0, range(10))
        assert known_tokens(store, kept)[0][0] == 1, "it is used all the time"
        use(store, kept)
        assert store.metrics.nbytes <= room
    assert known_tokens(store, other) == []
    assert store.metrics.forgotten > 0


def test_a_whole_conversation_goes_for_one_that_needs_its_room():
    room = size_of(range(500)) + size_of(range(50))
    store, old, new = store_of(max_bytes=room), keys_of("a", "b", "c"), keys_of("x")
    last: Variant | None = None
    for depth in range(3):
        last = add(store, old[depth], depth, range(depth + 1), parent=last)
    add(store, new[0], 0, range(500))
    assert (known_tokens(store, old), [depth for depth, _ in known_tokens(store, new)]) == ([], [0])


def test_what_is_not_used_for_too_long_goes():
    store = store_of(cache_ttl_s=10)
    old = keys_of("old")
    add(store, old[0], 0, [1])
    for number in range(10):
        add(store, keys_of(f"{number}")[0], 0, [1])
    assert known_tokens(store, old) == []


def test_without_an_age_nothing_gets_too_old():
    store = store_of()
    old = keys_of("old")
    add(store, old[0], 0, [1])
    for number in range(50):
        add(store, keys_of(f"{number}")[0], 0, [1])
    assert known_tokens(store, old) == [(0, (1,))]


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(0, 2)), max_size=25
    )
)
def test_everything_that_is_found_was_added_and_is_counted(added):
    """Against a plain dict, with too little memory for all of it."""
    store, known = store_of(max_bytes=5 * 450), dict[CanonicalKey, set[tuple[int, ...]]]()
    for texts, seed in added:
        keys, last = keys_of(*texts), None
        tokens: list[int] = []
        for depth, text in enumerate(texts):
            tokens += [ord(text), seed]
            last = add(store, keys[depth], depth, tokens, parent=last)
            known.setdefault(keys[depth], set()).add(tuple(tokens))
        for depth, there in known_tokens(store, keys):
            assert there in known[keys[depth]]
        assert store.metrics.nbytes <= store.max_bytes
    assert_all_is_counted(store)


@patch("start_llm.transcripts.transcript_store._MAX_VARIANTS", 2)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=25))
def test_whatever_falls_out_of_a_full_prefix_is_counted(added):
    store, keys = store_of(), keys_of("a", "b", "c")
    for number, depth in added:
        last: Variant | None = None
        for at in range(depth + 1):
            last = add(store, keys[at], at, [number] * (at + 1), parent=last)
        assert last in store.at(keys[depth])
    assert all(len(store.at(key)) <= 2 for key in keys)
    assert_all_is_counted(store)


def test_a_text_that_a_library_has_encoded_since_counts_as_before():
    store, word = store_of(), chr(0x23E) * 100
    details = MessageDetails((OmittedText("", "space", 0, "", word, False),))
    variant = add(store, keys_of("a")[0], 0, [1], last=details)
    size = sys.getsizeof(word)
    sqlite3.connect(":memory:").execute("SELECT ?", [word])
    assert sys.getsizeof(word) > size, "this is how a count goes wrong"
    assert_all_is_counted(store)
    store._forget(variant)
    assert store.metrics.nbytes == 0


def assert_all_is_counted(store: TranscriptStore) -> None:
    variants = [item for kept in store._nodes.values() for item in kept]
    assert store.metrics.variants == len(variants)
    assert store.metrics.nbytes == sum(item.nbytes for item in variants)
    assert all(
        item.children == {id(other): other for other in variants if other.parent is item} for item in variants
    )
    assert all(any(item.parent is other for other in variants) for item in variants if item.parent)


def test_the_conversations_that_came_back_most_are_those_with_most_messages_of_late():
    """The clock is read twice for each."""
    store = store_of()
    for name, depth in (("long ago", 50), ("a", 2), ("b", 8), ("c", 4), ("b", 3), ("d", 4)):
        add(store, CanonicalKey(f"{name} {depth}".encode()), depth, range(depth + 1), session=name)
    known_tokens = [(variant.session, variant.depth) for variant in store.returning(3, within_s=10)]
    assert known_tokens == [("b", 8), ("d", 4), ("c", 4)]


def test_sessions_of_two_tenants_with_one_id_are_two():
    store = store_of()
    for tenant, depth in ((b"ann", 4), (b"ben", 6)):
        place, ids = PrefixNode(CanonicalKey(tenant), depth, depth + 1, tenant), array("I", range(depth + 1))
        store.add(place, ids, [MessageDetails(())] * len(ids), claims=Claims(), session="main")
    assert [variant.tenant for variant in store.returning(3, within_s=10)] == [b"ben", b"ann"]
