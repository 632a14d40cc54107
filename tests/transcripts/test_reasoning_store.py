"""Reasoning is found by its whole conversation, or by who received it, as long as there is room for it."""

from __future__ import annotations

from typing import Any

from start_llm.core.canonical import CanonicalMessage, Conversation, OmittedText
from start_llm.transcripts.reasoning_store import ReasoningStore, RecordedReasoning
from start_llm.transcripts.recorded_details import Claims
from tests.transcripts.fakes import conversation_of

ROOM_FOR_TWO = 2 * 450
REPLY = CanonicalMessage(b"Done.")


def asked(question: str = "here", day: str = "", **more: Any) -> Conversation:
    """A question, beside which a day may stand, and the reply to it."""
    omitted = (OmittedText("today's date", "live", 0, day, day, is_clock=True),) if day else ()
    return conversation_of(CanonicalMessage(question.encode(), omitted), REPLY, **more)


def keep(store: ReasoningStore, conversation: Conversation, text: str, claims: Claims | None = None) -> None:
    store.keep(
        conversation.keys[1], RecordedReasoning(text, conversation.messages[1].exact, claims or Claims())
    )


def known(store: ReasoningStore, conversation: Conversation, *, name: str | None = None) -> str | None:
    return store.get(conversation, 1, name)


def one_kept(conversation: Conversation, claims: Claims | None = None) -> ReasoningStore:
    store = ReasoningStore(ROOM_FOR_TWO)
    keep(store, conversation, "Hm.", claims)
    return store


HERE, THERE, NOWHERE = asked("here"), asked("there"), asked("nowhere")


def test_reasoning_is_kept_by_its_conversation():
    store = one_kept(HERE)
    assert (known(store, HERE), known(store, THERE)) == ("Hm.", None)


def test_the_newest_reasoning_of_a_reply_counts():
    store = one_kept(HERE)
    keep(store, HERE, "Ha!")
    assert known(store, HERE) == "Ha!"


def test_reasoning_that_is_had_again_takes_no_place_of_another():
    store = ReasoningStore(10**6)
    keep(store, asked(day="first"), "Ha!")
    for name in "abcdefghij":
        keep(store, HERE, "Hm.", Claims({name: None}, is_delivered=True))
    assert known(store, asked(day="first")) == "Ha!"
    assert known(store, asked(day="another", name="a"), name="a") == "Hm.", "whoever received it"


def test_of_a_reply_the_last_eight_are_kept():
    store = ReasoningStore(10**6)
    for number in range(9):
        keep(store, asked(day=f"day {number}"), f"Hm {number}.")
    assert known(store, asked(day="day 0")) is None
    assert [known(store, asked(day=f"day {number}")) for number in (1, 8)] == ["Hm 1.", "Hm 8."]


def test_what_was_used_least_recently_is_forgotten_first():
    store = one_kept(HERE)
    keep(store, THERE, "Ha!")
    store.use([HERE.keys[1]])
    keep(store, NOWHERE, "Ah.")
    assert [known(store, conversation) for conversation in (HERE, THERE, NOWHERE)] == ["Hm.", None, "Ah."]
    assert store.nbytes <= ROOM_FOR_TWO


def test_reasoning_that_is_too_long_is_not_kept():
    store = ReasoningStore(ROOM_FOR_TWO)
    keep(store, HERE, "Hm." * ROOM_FOR_TWO)
    assert (known(store, HERE), store.nbytes) == (None, 0)


# ---------------------------------------------------------------------------------------------- whose it is


def test_reasoning_is_not_given_to_who_says_something_else_beside_the_words():
    store = one_kept(asked(day="friday"))
    assert known(store, asked(day="saturday")) is None
    assert known(store, asked(day="friday")) == "Hm."


def test_each_of_two_who_got_the_same_reply_gets_the_own_reasoning():
    store = one_kept(asked(day="friday"))
    keep(store, asked(day="saturday"), "Ha!")
    assert [known(store, asked(day=day)) for day in ("friday", "saturday")] == ["Hm.", "Ha!"]


def test_who_has_the_name_of_who_received_it_gets_the_reasoning():
    store = one_kept(asked(day="friday"), Claims({"mine": None}, is_delivered=True))
    later = asked(day="saturday", name="mine")
    assert known(store, later, name="mine") == "Hm."
    assert known(store, later, name=None) is None, "a name of several proves nothing"


def test_who_sends_an_id_that_was_made_for_the_reply_gets_the_reasoning():
    store = one_kept(asked(day="friday"), Claims(is_delivered=True, ids={"minted": None}))
    ids = [frozenset[str](), frozenset({"minted"})]
    assert known(store, asked(day="saturday", ids=ids)) == "Hm."


def test_chance_that_nobody_received_proves_nothing():
    """The reasoning itself is what the client has left out."""
    store = one_kept(
        asked(day="friday"), Claims(is_delivered=True, reply_surprisal_bits=63, reasoning_surprisal_bits=1000)
    )
    assert known(store, asked(day="saturday")) is None


def test_a_conversation_of_another_name_gets_no_reasoning_even_if_it_says_the_same():
    store = one_kept(HERE, Claims({"mine": None}, is_delivered=True))
    assert known(store, asked(name="another")) is None
    assert known(store, HERE) == "Hm.", "without a name nothing speaks against it"


def test_the_reasoning_of_just_these_words_comes_before_a_newer_one_of_the_same_name():
    """Both are proven by the name. The newer one was reasoning on another day."""
    claims = Claims({"mine": None}, is_delivered=True)
    store = one_kept(asked(day="friday"), claims)
    keep(store, asked(day="saturday"), "Ha!", claims)
    assert known(store, asked(day="friday", name="mine"), name="mine") == "Hm."
