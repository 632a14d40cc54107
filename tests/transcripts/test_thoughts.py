"""A thought is found by its whole conversation, as long as there is room for it."""

from start_llm.core.canonical import CanonicalKey
from start_llm.transcripts.thoughts import ThoughtStore

HERE, THERE, NOWHERE = (CanonicalKey.of(name) for name in (b"here", b"there", b"nowhere"))
ROOM_FOR_TWO = 2 * 250


def test_a_thought_is_kept_by_its_conversation():
    store = ThoughtStore(ROOM_FOR_TWO)
    store.keep(HERE, "Hm.")
    assert (store.get(HERE), store.get(THERE)) == ("Hm.", None)


def test_the_newest_thought_of_a_reply_counts():
    store = ThoughtStore(ROOM_FOR_TWO)
    store.keep(HERE, "Hm.")
    size = store.nbytes
    store.keep(HERE, "Ha!")
    assert (store.get(HERE), store.nbytes) == ("Ha!", size)


def test_what_was_used_least_recently_is_forgotten_first():
    store = ThoughtStore(ROOM_FOR_TWO)
    store.keep(HERE, "Hm.")
    store.keep(THERE, "Ha!")
    store.get(HERE)
    store.keep(NOWHERE, "Ah.")
    assert [store.get(key) for key in (HERE, THERE, NOWHERE)] == ["Hm.", None, "Ah."]
    assert store.nbytes <= ROOM_FOR_TWO


def test_a_thought_that_is_too_long_is_not_kept():
    store = ThoughtStore(ROOM_FOR_TWO)
    store.keep(HERE, "Hm." * ROOM_FOR_TWO)
    assert (store.get(HERE), store.nbytes) == (None, 0)
