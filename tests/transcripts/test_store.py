"""What was computed for a conversation is found by what the conversation says, and changed by nobody else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.canonical import CanonicalKey, CanonicalMessage, Conversation, LiveField, Root, chain
from start_llm.transcripts.bind import rank
from start_llm.transcripts.lineage import Lineages
from start_llm.transcripts.store import Held, Limits, TranscriptStore, Variant

ROOT = CanonicalKey.of(b"root")
PLENTY = Limits(most_bytes=10**9)


def keys_of(*texts: str, root: CanonicalKey = ROOT) -> tuple[CanonicalKey, ...]:
    return chain(root, [CanonicalMessage(text.encode()) for text in texts])


def store_of(limits: Limits = PLENTY) -> TranscriptStore:
    return TranscriptStore(limits, clock=itertools.count(1).__next__)


def add(
    store: TranscriptStore,
    key: CanonicalKey,
    depth: int,
    tokens: Sequence[int],
    *,
    thought: bytes | None = None,
    before: Sequence[bytes | None] = (),
    **more: Any,
) -> Variant:
    """`thought` is that of the last message, `before` those of the messages in front of it."""
    thoughts = (*before, *[None] * (depth - len(before)), thought)
    held = Held(
        thoughts,
        (None,) * (depth + 1),
        ((),) * (depth + 1),
        (0,) * (depth + 1),
        replied=depth if thought else -1,
    )
    return store.add(key, depth, tokens, held, **more)


def found(
    store: TranscriptStore,
    keys: Sequence[CanonicalKey],
    echoed: Sequence[bytes | None] | None = None,
    session: str = "",
) -> list[tuple[int, tuple[int, ...]]]:
    """Depth and tokens of each known prefix, the longest first."""
    nothing = [None] * len(keys)
    asked = Conversation(
        tenant=b"",
        root=Root(ROOT, ROOT),
        roles=["user"] * len(keys),
        messages=(),
        keys=keys,
        echoed=echoed or nothing,
        shown=nothing,
        own=nothing,
        live=[()] * len(keys),
        notable=[False] * len(keys),
        ignored=[()] * len(keys),
        session=session,
    )
    variants = store.find(keys, lambda one: rank(one, asked, lineages=Lineages(), keeps_thoughts=True))
    return [(one.depth, tuple(one.tokens())) for one in variants]


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


def test_the_longest_known_prefix_comes_first():
    store, keys = store_of(), keys_of("a", "b", "c")
    first = add(store, keys[0], 0, [1, 2])
    add(store, keys[1], 1, [1, 2, 3], parent=first)
    assert found(store, keys) == [(1, (1, 2, 3)), (0, (1, 2))]
    assert found(store, keys_of("a", "x")) == [(0, (1, 2))]
    assert found(store, keys_of("x", "b")) == []


def test_texts_that_were_told_take_room():
    store, (key,) = store_of(), keys_of("a")
    held = Held((None,), (None,), (((LiveField("git status", 0, is_block=True), "x" * 5000),),), (0,))
    store.add(key, 0, [1, 2], held)
    assert 5000 < store.metrics.nbytes < 6000


def test_only_what_is_new_is_stored():
    store, keys = store_of(), keys_of("a", "b")
    first = add(store, keys[0], 0, range(1000))
    before = store.metrics.nbytes
    second = add(store, keys[1], 1, range(1010), parent=first)
    assert (len(second.delta), tuple(second.tokens())) == (10, tuple(range(1010)))
    assert store.metrics.nbytes - before < 1000


def test_a_parent_that_is_no_beginning_is_not_built_on():
    store, keys = store_of(), keys_of("a", "b")
    first = add(store, keys[0], 0, [1, 2])
    other = add(store, keys[1], 1, [1, 3, 4], parent=first)
    assert (other.parent, tuple(other.tokens())) == (None, (1, 3, 4))


def test_the_same_tokens_again_are_the_same_variant():
    store, keys = store_of(), keys_of("a")
    assert add(store, keys[0], 0, [1, 2]) is add(store, keys[0], 0, [1, 2])
    assert store.metrics.variants == 1


# ------------------------------------------------------------------------------------------------- variants


def two_thoughts() -> tuple[TranscriptStore, tuple[CanonicalKey, ...]]:
    """One visible reply, thought of in two ways, by two sessions."""
    store, keys = store_of(), keys_of("question", "answer", "next")
    question = add(store, keys[0], 0, [1])
    add(store, keys[1], 1, [1, 10, 5], parent=question, thought=b"first", session="one")
    add(store, keys[1], 1, [1, 20, 5], parent=question, thought=b"second", session="two")
    return store, keys


@pytest.mark.parametrize(("thought", "token"), [(b"first", 10), (b"second", 20)])
def test_an_echoed_thought_gets_its_own_tokens(thought, token):
    store, keys = two_thoughts()
    assert found(store, keys, [None, thought, None])[0] == (1, (1, token, 5))


@pytest.mark.parametrize(("session", "token"), [("one", 10), ("two", 20), ("three", 20)])
def test_without_an_echo_the_same_session_comes_first_and_then_the_newest(session, token):
    store, keys = two_thoughts()
    assert found(store, keys, session=session)[0] == (1, (1, token, 5))


def test_a_thought_that_nobody_had_is_content():
    store, keys = two_thoughts()
    assert found(store, keys, [None, b"edited", None]) == [(0, (1,))]


def test_what_builds_on_another_thought_is_not_found_either():
    store, keys = two_thoughts()
    (first, second) = store._nodes[keys[1]]
    add(store, keys[2], 2, [1, 10, 5, 7], before=[None, b"first"], parent=first)
    assert found(store, keys, [None, b"second", None])[0] == (1, (1, 20, 5))
    assert found(store, keys, [None, b"first", None])[0] == (2, (1, 10, 5, 7))
    assert second.children == 0


def test_a_node_keeps_the_newest_four_that_nothing_builds_on():
    store, keys = store_of(), keys_of("a", "b")
    oldest = add(store, keys[0], 0, [0], thought=b"0")
    add(store, keys[1], 1, [0, 1], parent=oldest)
    for number in range(1, 7):
        add(store, keys[0], 0, [number], thought=bytes([number]))
    assert [tuple(one.tokens()) for one in store._nodes[keys[0]]] == [(0,), (4,), (5,), (6,)]


# ----------------------------------------------------------------------------------- nobody harms another one


def test_a_branch_and_a_side_request_leave_the_main_conversation_alone():
    """The strict-append guard: whatever is written, what was there is found as before."""
    store, main = store_of(), keys_of("system", "question", "answer")
    last: Variant | None = None
    for depth in range(3):
        last = add(store, main[depth], depth, range(depth + 1), parent=last, session="s")
    before = found(store, main, session="s")
    for texts in (("system", "another question"), ("title prompt",), ("system", "question", "other answer")):
        keys = keys_of(*texts)
        add(store, keys[-1], len(texts) - 1, [0, 9, 9], session="s")
    assert found(store, main, session="s") == before


# ------------------------------------------------------------------------------------------------ forgetting


def test_what_was_used_least_recently_goes_first_and_never_what_others_build_on():
    room = Limits(most_bytes=4 * 450)
    store, kept, other = store_of(room), keys_of("a", "b"), keys_of("x")
    first = add(store, kept[0], 0, range(10))
    add(store, kept[1], 1, range(20), parent=first)
    add(store, other[0], 0, range(10))
    assert found(store, kept)[0][0] == 1
    for number in range(20):
        add(store, keys_of(f"new {number}")[0], 0, range(10))
        assert found(store, kept)[0][0] == 1, "it is used all the time"
        assert store.metrics.nbytes <= room.most_bytes
    assert found(store, other) == []
    assert store.metrics.forgotten > 0


def test_what_is_not_used_for_too_long_goes():
    store = store_of(Limits(most_bytes=10**9, unused_s=10))
    old = keys_of("old")
    add(store, old[0], 0, [1])
    for number in range(10):
        add(store, keys_of(f"{number}")[0], 0, [1])
    assert found(store, old) == []


def test_without_an_age_nothing_gets_too_old():
    store = store_of()
    old = keys_of("old")
    add(store, old[0], 0, [1])
    for number in range(50):
        add(store, keys_of(f"{number}")[0], 0, [1])
    assert found(store, old) == [(0, (1,))]


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(0, 2)), max_size=25
    )
)
def test_everything_that_is_found_was_added_and_is_counted(added):
    """Against a plain dict, with too little memory for all of it."""
    store, known = store_of(Limits(most_bytes=5 * 450)), dict[CanonicalKey, set[tuple[int, ...]]]()
    for texts, seed in added:
        keys, last = keys_of(*texts), None
        tokens: list[int] = []
        for depth, text in enumerate(texts):
            tokens += [ord(text), seed]
            last = add(store, keys[depth], depth, tokens, parent=last)
            known.setdefault(keys[depth], set()).add(tuple(tokens))
        for depth, there in found(store, keys):
            assert there in known[keys[depth]]
    variants = [one for kept in store._nodes.values() for one in kept]
    assert store.metrics.variants == len(variants)
    assert store.metrics.nbytes == sum(one.nbytes for one in variants)
    assert all(one.children == sum(other.parent is one for other in variants) for one in variants)
    assert all(any(one.parent is other for other in variants) for one in variants if one.parent)
