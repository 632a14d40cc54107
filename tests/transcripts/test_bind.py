"""Recorded tokens take the place of fresh ones, exactly up to where a message ends."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.canonical import CanonicalMessage, Conversation, Field, OmittedText
from start_llm.core.prompt import Boundary
from start_llm.transcripts.bind import BoundPrompt, PromptBinder, fresh, record_prompt
from start_llm.transcripts.guard import Guard
from start_llm.transcripts.recorded_details import Claims, MessageDetails
from start_llm.transcripts.transcript_store import PrefixNode, TranscriptStore, Variant
from tests.transcripts.fakes import conversation_of

CLOSER, NOTE, TAIL = 0, 98, 99


def store() -> TranscriptStore:
    return TranscriptStore(max_bytes=10**9, clock=itertools.count(1).__next__)


def rendered(messages: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[Boundary, ...]]:
    """Each message's own tokens, its closer, and a tail that makes the model answer."""
    ids: list[int] = []
    ends: list[Boundary] = []
    for index, message in enumerate(messages):
        ids += message
        ends.append(Boundary(index, len(ids)))
        ids.append(CLOSER)
    return (*ids, TAIL), tuple(ends)


def conversation(
    messages: Sequence[Sequence[int]],
    visible: Sequence[bytes] | None = None,
    first: Sequence[OmittedText] = (),
    **more: Any,
) -> Conversation:
    """`first` is what the key of the first message leaves out."""
    texts = visible or [bytes(message) for message in messages]
    omitted = [tuple(first), *[()] * (len(texts) - 1)]
    return conversation_of(*map(CanonicalMessage, texts, omitted), **more)


def bind(
    kept: TranscriptStore,
    asked: Conversation,
    ids: tuple[int, ...],
    boundaries: Sequence[Boundary],
    *,
    note: int = 1,
) -> BoundPrompt | None:
    """A note has so many tokens for each line that it tells."""
    guard = Guard(asked, asked.name, takes_proof=True, keeps_reasoning=True)
    return PromptBinder(kept, asked, guard, lambda text: [NOTE] * note * text.count("[")).bind(
        ids, boundaries
    )


def bound_to(kept: TranscriptStore, asked: Conversation, messages: Sequence[Sequence[int]]) -> BoundPrompt:
    bound = bind(kept, asked, *rendered(messages))
    assert bound
    return bound


def asked_for(kept: TranscriptStore, asked: Conversation, messages: Sequence[Sequence[int]]) -> BoundPrompt:
    bound = bound_to(kept, asked, messages)
    record_prompt(kept, asked, bound)
    return bound


def served(
    kept: TranscriptStore, messages: Sequence[Sequence[int]], visible: Sequence[bytes] | None = None
) -> BoundPrompt:
    return asked_for(kept, conversation(messages, visible), messages)


def wrote(
    kept: TranscriptStore,
    asked: Conversation,
    tokens: Sequence[int],
    *details: MessageDetails,
    claims: Claims | None = None,
    **more: Any,
) -> Variant:
    """The last of these messages is a reply."""
    depth, whole = len(details) - 1, array("I", tokens)
    place = PrefixNode(asked.keys[depth], depth, len(whole))
    return kept.add(place, whole, details, claims=claims or Claims(is_delivered=True), **more)


MESSAGES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=5)


@given(MESSAGES, st.data())
def test_without_drift_what_is_bound_is_the_fresh_rendering(messages, data):
    kept = store()
    served(kept, messages[: data.draw(st.integers(1, len(messages)))])
    again = served(kept, messages)
    assert (again.ids, again.boundaries) == rendered(messages)
    assert again.prefix is not None


def test_a_reply_goes_on_with_its_reasoning_although_the_client_took_it_out():
    kept, question, reasoning, answer = store(), [1, 2], [7, 7], [3]
    first = served(kept, [question])
    reply = conversation([question, answer])
    tokens = (*first.ids, *reasoning, *answer)  # the tail, then what the model wrote, without its stop token
    prompt = bound_to(kept, reply, [question, answer]).prefix
    wrote(
        kept,
        reply,
        tokens,
        MessageDetails(()),
        MessageDetails((), b"some reasoning", is_ours=True),
        parent=prompt,
    )
    second = served(kept, [question, answer, [5]])
    assert second.ids == (*tokens, CLOSER, 5, CLOSER, TAIL)
    assert second.boundaries == (Boundary(0, 2), Boundary(1, len(tokens)), Boundary(2, len(tokens) + 2))


def test_what_drifted_is_read_as_it_was_first_and_the_rest_as_it_is_now():
    kept = store()
    served(kept, [[1, 1], [2]], [b"system", b"question"])
    bound = served(kept, [[8, 8, 8], [2], [4]], [b"system", b"question", b"more"])
    assert bound.ids == (1, 1, CLOSER, 2, CLOSER, 4, CLOSER, TAIL)
    assert bound.boundaries == (Boundary(0, 2), Boundary(1, 4), Boundary(2, 6))


def test_what_is_new_is_never_bound():
    kept = store()
    served(kept, [[1], [2]])
    bound = served(kept, [[1], [3]])
    assert bound.ids == rendered([[1], [3]])[0]
    assert bound.prefix is not None and bound.prefix.depth == 0


def test_a_message_whose_end_is_not_known_ends_no_prefix():
    kept, messages = store(), [[1, 1], [2], [3]]
    served(kept, messages)
    ids, boundaries = rendered(messages)
    bound = bind(kept, conversation(messages), ids, boundaries[:1])
    assert bound and bound.prefix and bound.prefix.depth == 0
    assert bound.ids == ids


@given(st.lists(MESSAGES, min_size=1, max_size=6))
def test_whatever_was_served_before_a_prompt_holds_what_the_request_says(requests):
    """Without drift no history changes what a model reads."""
    kept = store()
    for messages in requests:
        assert served(kept, messages).ids == rendered(messages)[0]


def test_reasoning_that_would_be_shown_is_not_hidden():
    """It was dropped when these messages were read last; now it stands in the rendering."""
    kept, messages = store(), [[1], [2], [3]]
    served(kept, messages)
    asked = conversation(messages, shown=[None, b"some reasoning", None])
    bound = bound_to(kept, asked, messages)
    assert bound.prefix is not None and bound.prefix.depth == 0


# ----------------------------------------------------------------------------- what a message has of its own


TALK = [[1], [2], [3]]


def own(text: str) -> OmittedText:
    return OmittedText("message id", "own", 0, text, text)


def test_what_a_message_has_of_its_own_is_read_as_it_is_sent():
    kept = store()
    asked_for(kept, conversation(TALK, first=[own("first")]), TALK)
    assert bound_to(kept, conversation(TALK, first=[own("second")]), TALK).prefix is None


def replied_to(first: Sequence[OmittedText], **asked: Any) -> tuple[TranscriptStore, Conversation]:
    """Of a conversation whose first message said so when it was replied to."""
    kept, later = store(), conversation(TALK, first=[own("second")], name="mine", **asked)
    claims = Claims(later.names, is_delivered=True)
    wrote(kept, later, [9, CLOSER, 2], MessageDetails(tuple(first)), MessageDetails(()), claims=claims)
    return kept, later


def test_once_it_was_replied_to_it_stays_as_it_was():
    kept, later = replied_to([own("first")])
    assert bound_to(kept, later, TALK).ids[:2] == (9, CLOSER)


def test_what_it_says_now_is_noted_after_the_last_message_that_asks():
    kept, later = replied_to([own("first")], can_hold_note=[True, False, True])
    assert bound_to(kept, later, TALK).ids == (9, CLOSER, 2, CLOSER, 3, NOTE, CLOSER, TAIL)


def test_of_what_it_said_then_nothing_is_noted_that_is_gone():
    kept, later = replied_to([own("first\nsecond")])
    assert bound_to(kept, later, TALK).ids == (9, CLOSER, 2, CLOSER, 3, CLOSER, TAIL)


# ----------------------------------------------------------------------------------------------------- notes


def clock(text: str) -> OmittedText:
    return OmittedText("today's date", "live", 0, text, text, is_clock=True)


def zone(text: str) -> OmittedText:
    return OmittedText("time zone", "live", 0, text, text, is_clock=True)


def dated(day: str, messages: Sequence[Sequence[int]], **more: Any) -> Conversation:
    return conversation(messages, first=[clock(day)], **more)


def test_a_clock_is_noted_after_the_last_message_that_asks_and_recorded_with_it():
    kept, (can_hold_note, field) = store(), ([True, False, True], Field("today's date", 0, "live"))
    asked_for(kept, dated("friday", TALK[:2]), TALK[:2])
    bound = asked_for(kept, dated("saturday", TALK, can_hold_note=can_hold_note), TALK)
    assert bound.ids == (1, CLOSER, 2, CLOSER, 3, NOTE, CLOSER, TAIL)
    assert (bound.note_tokens, bound.boundaries[-1]) == (1, Boundary(2, 6))
    assert bound.details == (
        MessageDetails((clock("friday"),), is_ours=True),
        MessageDetails((), is_ours=True),
        MessageDetails((), is_ours=True, noted=((field, "saturday"),), note_tokens=1),
    )
    again = bound_to(kept, dated("saturday", TALK, can_hold_note=can_hold_note), TALK)
    assert (again.ids, again.note_tokens, again.boundaries) == (bound.ids, 0, bound.boundaries)


def test_others_go_on_before_a_note():
    """For them the state of a network is kept there."""
    kept, can_hold_note = store(), [True, False, True]
    assert list(asked_for(kept, dated("friday", TALK[:2]), TALK[:2]).resume_positions()) == [1, 3]
    bound = asked_for(kept, dated("saturday", TALK, can_hold_note=can_hold_note), TALK)
    assert [boundary.tokens for boundary in bound.boundaries] == [1, 3, 6]
    assert list(bound.resume_positions()) == [1, 3, 5]


def test_what_changes_once_more_is_noted_after_the_note_that_is_there():
    kept, first = store(), ([clock("friday"), zone("UTC")], [clock("monday"), zone("UTC")])
    for omitted in first:
        bound = asked_for(kept, conversation(TALK, first=omitted), TALK)
    bound = bound_to(kept, conversation(TALK, first=[clock("monday"), zone("CET")]), TALK)
    assert bound.ids == (1, CLOSER, 2, CLOSER, 3, NOTE, NOTE, CLOSER, TAIL)
    date, area = Field("today's date", 0, "live"), Field("time zone", 0, "live")
    assert (bound.details[2].noted, bound.details[2].note_tokens) == (((date, "monday"), (area, "CET")), 2)


def test_where_nothing_asks_after_what_changed_nothing_is_bound():
    kept = store()
    asked_for(kept, dated("friday", TALK), TALK)
    bound = bound_to(kept, dated("saturday", TALK, can_hold_note=[False] * 3), TALK)
    assert (bound.ids, bound.prefix) == (rendered(TALK)[0], None)


def test_what_is_recorded_is_not_taken_if_a_note_costs_more_than_that_saves():
    kept, (ids, boundaries) = store(), rendered(TALK)
    asked_for(kept, dated("friday", TALK), TALK)
    assert bind(kept, dated("saturday", TALK), ids, boundaries, note=4)
    assert bind(kept, dated("saturday", TALK), ids, boundaries, note=5) is None


@pytest.mark.parametrize(("note", "depth"), [(3, 1), (5, 0)])
def test_those_tokens_are_taken_that_leave_least_to_compute(note, depth):
    """After the shorter prefix there is no note; the longer one saves four tokens more."""
    kept, messages = store(), [[1] * 3, [2] * 3]
    for asked in (dated("friday", messages), dated("saturday", messages[:1])):
        record_prompt(kept, asked, fresh(asked, *rendered(messages[: len(asked.keys)])))
    bound = bind(kept, dated("saturday", messages), *rendered(messages), note=note)
    assert bound and bound.prefix and bound.prefix.depth == depth


def test_however_many_notes_are_too_long_what_needs_none_is_bound():
    """Before the clock nothing has changed."""
    kept, messages = store(), [[1] * 9, *[[2]] * 9]
    friday, saturday = (
        conversation_of(*(CanonicalMessage(b"", (clock(now),) if n == 1 else ()) for n in range(10)))
        for now in ("friday", "saturday")
    )
    asked_for(kept, friday, messages)
    bound = bind(kept, saturday, *rendered(messages), note=1000)
    assert bound and bound.prefix and bound.prefix.depth == 0


@pytest.mark.parametrize("zones", [("UTC", "CET"), ("CET", "UTC")])
def test_a_note_that_is_too_long_hides_no_shorter_one_after_the_same_words(zones):
    """Two lines have changed under the one, and a single line under the other."""
    kept, messages = store(), [[1] * 15]
    for area in zones:
        asked = conversation(messages, first=[clock("friday"), zone(area)])
        record_prompt(kept, asked, fresh(asked, *rendered(messages)))
    now = conversation(messages, first=[clock("saturday"), zone("CET")])
    bound = bind(kept, now, *rendered(messages), note=10)
    assert bound and bound.note_tokens == 10


# ------------------------------------------------------------------------------------------ what is recorded


def recorded(kept: TranscriptStore, asked: Conversation, depth: int) -> Variant:
    (variant,) = kept.at(asked.keys[depth])
    return variant


def test_tokens_that_were_asked_for_have_the_name_of_the_conversation_and_were_sent_to_nobody():
    kept, asked = store(), conversation(TALK, name="mine")
    asked_for(kept, asked, TALK)
    assert recorded(kept, asked, 2).claims == Claims({"mine": None})


def test_who_goes_on_from_tokens_of_another_gets_no_claim_to_them():
    kept, mine, other = store(), conversation(TALK, name="mine"), conversation(TALK, name="another")
    asked_for(kept, mine, TALK[:2])
    asked_for(kept, other, TALK)
    assert [list(recorded(kept, other, depth).claims.names) for depth in range(3)] == [
        ["mine"],
        ["mine"],
        ["another"],
    ]


@pytest.mark.parametrize(("sent", "is_ours"), [(b"some reasoning", False), (None, True)])
def test_reasoning_that_the_client_sent_is_not_the_models(sent, is_ours):
    kept, asked = store(), echoing(sent, shown=[None, b"some reasoning", None])
    asked_for(kept, asked, TALK)
    assert recorded(kept, asked, 1).details == (MessageDetails((), b"some reasoning", is_ours=is_ours),)


# -------------------------------------------------------------------------------------------------- reasoning


def two_reasoning() -> tuple[TranscriptStore, dict[bytes, Variant]]:
    """One visible reply, reasoning of in two ways, by two sessions."""
    kept, asked = store(), conversation(TALK)
    question = wrote(kept, asked, [1], MessageDetails(()), claims=Claims())
    variants = {
        reasoning: wrote(
            kept,
            asked,
            [1, token, 2],
            MessageDetails(()),
            MessageDetails((), reasoning, is_ours=True),
            parent=question,
            session=session,
        )
        for reasoning, token, session in ((b"first", 10, "one"), (b"second", 20, "two"))
    }
    return kept, variants


def echoing(reasoning: bytes | None, **more: Any) -> Conversation:
    return conversation(TALK, echoed=[None, reasoning, None], **more)


@pytest.mark.parametrize(("reasoning", "token"), [(b"first", 10), (b"second", 20)])
def test_an_echoed_reasoning_gets_its_own_tokens(reasoning, token):
    kept, _ = two_reasoning()
    assert bound_to(kept, echoing(reasoning), TALK).ids[:3] == (1, token, 2)


@pytest.mark.parametrize(("session", "token"), [("one", 10), ("two", 20), ("three", 20)])
def test_without_an_echo_the_same_session_comes_first_and_then_the_newest(session, token):
    kept, _ = two_reasoning()
    assert bound_to(kept, echoing(None, session=session), TALK).ids[:3] == (1, token, 2)


def test_what_was_bound_last_is_the_newest():
    kept, _ = two_reasoning()
    asked_for(kept, conversation(TALK[:2], echoed=[None, b"first"]), TALK[:2])
    assert bound_to(kept, echoing(None), TALK).ids[:3] == (1, 10, 2)


def test_reasoning_that_nobody_had_is_content():
    kept, _ = two_reasoning()
    bound = bound_to(kept, echoing(b"edited"), TALK)
    assert (bound.ids, bound.replaced_tokens) == (rendered(TALK)[0], 1)


def test_what_builds_on_another_reasoning_is_not_found_either():
    kept, variants = two_reasoning()
    wrote(
        kept,
        conversation(TALK),
        [1, 10, 2, 7],
        MessageDetails(()),
        MessageDetails((), b"first", is_ours=True),
        MessageDetails(()),
        parent=variants[b"first"],
    )
    assert bound_to(kept, echoing(b"second"), TALK).ids[:3] == (1, 20, 2)
    assert bound_to(kept, echoing(b"first"), TALK).ids[:4] == (1, 10, 2, 7)
    assert variants[b"second"].children == {}


# ----------------------------------------------------------------------------------------- own before foreign


def of_day(text: str) -> OmittedText:
    return OmittedText("today's date", "live", 0, text, text, is_clock=True)


LONG_TALK = [[1] * 200, [2], [3] * 50, [4], [5] * 20]
TODAY, TOMORROW = of_day("friday"), of_day("saturday")


def answered_on(
    kept: TranscriptStore,
    day: OmittedText,
    messages: Sequence[Sequence[int]],
    *blocks: OmittedText,
    **more: Any,
) -> None:
    """A question and its reply, again and again, computed on this day without anything from before."""
    talk, (ids, ends) = conversation(messages, first=[day, *blocks], **more), rendered(messages)
    details = [MessageDetails(message.omitted) for message in talk.messages]
    last: Variant | None = None
    for depth, end in enumerate(ends):
        last = kept.add(
            PrefixNode(talk.keys[depth], depth, end.tokens),
            array("I", ids),
            details,
            parent=last,
            claims=Claims(talk.names, is_delivered=depth % 2 == 1),
        )


@pytest.mark.parametrize(
    ("mine", "others"), [({"name": "b"}, {"name": "a"}), ({}, {})], ids=["names", "no names"]
)
def test_ones_own_tokens_come_before_those_of_others_that_reach_deeper(mine, others):
    kept = store()
    answered_on(kept, TOMORROW, LONG_TALK[:4], **others)
    answered_on(kept, TODAY, LONG_TALK[:2], **mine)
    bound = bound_to(kept, conversation(LONG_TALK, first=[TODAY], **mine), LONG_TALK)
    assert bound.prefix
    assert (bound.prefix.depth, bound.note_tokens) == (1, 0)


def test_who_has_no_tokens_goes_on_from_those_of_others_and_learns_it():
    kept = store()
    answered_on(kept, TOMORROW, LONG_TALK[:4], name="a")
    bound = bound_to(kept, conversation(LONG_TALK, first=[TODAY], name="b"), LONG_TALK)
    assert bound.prefix
    assert (bound.prefix.depth, bound.note_tokens) == (3, 1)


def test_who_cannot_take_its_own_tokens_goes_on_from_those_of_others():
    """Two of its blocks have changed: a note of both would be too long."""
    kept = store()
    before, now = ([OmittedText(f"block {n}", "block", n, text, text) for n in (1, 2)] for text in "ab")
    answered_on(kept, TODAY, LONG_TALK[:2], *before, name="b")
    answered_on(kept, TOMORROW, LONG_TALK[:2], *now, name="a")
    asked = conversation(LONG_TALK, first=[TODAY, *now], name="b")
    bound = bind(kept, asked, *rendered(LONG_TALK), note=150)
    assert bound and bound.prefix
    assert (bound.prefix.depth, bound.note_tokens) == (1, 150)


def test_equal_tokens_are_nobodys_and_the_deepest_are_taken():
    kept = store()
    answered_on(kept, TODAY, LONG_TALK[:4], name="a")
    answered_on(kept, TODAY, LONG_TALK[:2], name="b")
    bound = bound_to(kept, conversation(LONG_TALK, first=[TODAY], name="b"), LONG_TALK)
    assert bound.prefix
    assert bound.prefix.depth == 3
