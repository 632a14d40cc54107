"""Only who shows that tokens are its own goes on from them, if they say anything that it does not say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from start_llm.core.canonical import (
    CanonicalKey,
    CanonicalMessage,
    Conversation,
    Field,
    Ignored,
    Kind,
    OmittedText,
    exact_after,
)
from start_llm.transcripts.conversation_names import ConversationNames
from start_llm.transcripts.guard import Guard, difference
from start_llm.transcripts.recorded_details import Claims, MessageDetails, NotedValue, RecordedDetails
from tests.transcripts.fakes import conversation_of

MINE, OTHERS = "mine", "another"
ID = "minted"
CERTAIN, LIKELY = 64.0, 63.9
QUESTION, REPLY, NEXT_QUESTION, NEXT_REPLY = range(4)


@dataclass(eq=False)
class Tokens:
    """Of messages, after those of the parent."""

    depth: int
    details: Sequence[MessageDetails]
    parent: RecordedDetails | None = None
    claims: Claims = field(default_factory=Claims)


def tokens(*details: MessageDetails, claims: Claims | None = None) -> Tokens:
    """The claims are those of the first reply."""
    last: Tokens | None = None
    for depth, reading in enumerate(details):
        shown = claims if claims and depth == REPLY else Claims()
        last = Tokens(depth, [reading], last, shown)
    assert last
    return last


def asked(*omitted: Sequence[OmittedText], call: str = "", **more: Any) -> Conversation:
    """Two questions with a reply to each, of which keys leave this out; the first reply has a call."""
    omissions = [*map(tuple, omitted), (), (), (), ()][:4]
    ids = [frozenset({call} - {""}) if depth == REPLY else frozenset[str]() for depth in range(4)]
    messages = [CanonicalMessage(bytes([depth]), texts) for depth, texts in enumerate(omissions)]
    return conversation_of(*messages, ids=ids, **more)


def admits(conversation: Conversation, recorded: RecordedDetails, **more: bool) -> bool:
    """If its name proves that it is this conversation."""
    options = {"takes_proof": True, "keeps_reasoning": True} | more
    return Guard(conversation, conversation.name, **options).admits(recorded)


def block(text: str, place: int = 0) -> OmittedText:
    return OmittedText("git status", "block", place, text, text)


def own(text: str) -> OmittedText:
    return OmittedText("message id", "own", 0, text, text)


def space(text: str) -> OmittedText:
    return OmittedText("white space", "space", 9, text)


def clock(text: str, place: int = 0) -> OmittedText:
    return OmittedText("today's date", "live", place, text, text, is_clock=True)


def note_tokens(*noted: NotedValue) -> MessageDetails:
    return MessageDetails((), noted=noted, note_tokens=9)


def of_clock(text: str, message: int = QUESTION) -> NotedValue:
    return Field("today's date", message, "live"), text


def named(name: str = MINE) -> Claims:
    return Claims({name: None}, is_delivered=True)


def minted(*names: str) -> Claims:
    return Claims(dict.fromkeys(names), is_delivered=True, ids={ID: None})


PLAIN = MessageDetails(())


# -------------------------------------------------------------------------------------- what differs, and how


BEFORE, AFTER = [block("on main"), own("1"), space("\n")], [block("on a branch"), own("2"), space("")]


@pytest.mark.parametrize("value", [*BEFORE, clock("friday")])
def test_what_is_equal_is_admitted(value):
    assert admits(asked([value]), tokens(MessageDetails((value,)), PLAIN))


@pytest.mark.parametrize(("read", "now"), [*zip(BEFORE, AFTER, strict=True)])
def test_what_differs_needs_a_proof(read, now):
    recorded = tokens(MessageDetails((read,)), PLAIN, claims=named())
    assert not admits(asked([now]), recorded)
    assert admits(asked([now], name=MINE), recorded)


@pytest.mark.parametrize("value", [*BEFORE, clock("friday")])
def test_what_is_gone_or_new_needs_a_proof(value):
    there, gone = (
        tokens(MessageDetails((value,)), PLAIN, claims=named()),
        tokens(PLAIN, PLAIN, claims=named()),
    )
    assert not admits(asked(), there) and not admits(asked([value]), gone)
    assert admits(asked(name=MINE), there) and admits(asked([value], name=MINE), gone)


@pytest.mark.parametrize("make", [block, clock])
def test_what_has_moved_is_never_admitted(make):
    recorded = tokens(MessageDetails((make("as before", 0),)), PLAIN, claims=minted(MINE))
    assert not admits(asked([make("as before", 5)], name=MINE, call=ID), recorded)


def test_two_lines_that_changed_places_have_moved():
    assert difference((clock("friday"), block("on main")), (block("on main"), clock("friday"))) == "place"


def test_of_several_pieces_each_has_its_place():
    read = (clock("friday", 1), clock("friday", 5))
    assert difference(read, (clock("friday", 1), clock("saturday", 5))) == "clock"
    assert difference(read, (clock("friday", 1), clock("friday", 6))) == "place"
    assert difference(read, (clock("friday", 1),)) == "place"


def test_what_stands_before_another_line_may_go():
    assert difference((clock("friday"), block("on main")), (block("on main"),)) == "value"


def test_a_clock_beside_what_else_differs_is_no_clock():
    assert difference((clock("friday"), own("1")), (clock("saturday"), own("2"))) == "value"
    assert difference((clock("friday"), own("1")), (clock("saturday"), own("1"))) == "clock"


@pytest.mark.parametrize("kind", ["live", "own", "block"])
def test_a_line_that_is_no_clock_is_a_value(kind: Kind):
    read, now = (OmittedText("a line", kind, 0, text, text) for text in ("before", "after"))
    assert difference((read,), (now,)) == "value"


# ------------------------------------------------------------------------------------------------- the proofs


DIFFERENT = MessageDetails((block("on main"),))


def proves(claims: Claims, reasoning: bytes | None = None, **more: Any) -> bool:
    """It may go on from tokens with a block that it has otherwise, and with these claims after them."""
    reply = MessageDetails((), reasoning, is_ours=True)
    return admits(asked([block("on a branch")], **more), tokens(DIFFERENT, reply, claims=claims))


def test_without_any_claim_nothing_is_proven():
    assert not proves(Claims(is_delivered=True), name=MINE, call=ID)


def test_the_name_of_the_conversation_that_was_given_is_a_proof():
    assert proves(named(), name=MINE)
    assert not proves(named(), name=OTHERS)
    assert not proves(named())


def test_a_name_that_means_several_is_none():
    recorded = tokens(DIFFERENT, PLAIN, claims=named())
    conversation = asked([block("on a branch")], name=MINE)
    assert not Guard(conversation, None, takes_proof=True, keeps_reasoning=True).admits(recorded)


def test_a_name_of_tokens_that_nobody_was_given_is_none():
    """The conversation of that name only read this reply: it was written by somebody else."""
    assert not proves(Claims({MINE: None}), name=MINE)


def test_an_id_that_was_made_for_a_call_is_a_proof():
    assert proves(minted(), call=ID)
    assert not proves(minted(), call="own")


def test_64_bits_of_chance_are_a_proof():
    assert proves(Claims(is_delivered=True, reply_surprisal_bits=CERTAIN))
    assert not proves(Claims(is_delivered=True, reply_surprisal_bits=LIKELY))


def test_chance_in_reasoning_counts_for_who_sends_it():
    claims, echo = (
        Claims(is_delivered=True, reply_surprisal_bits=4, reasoning_surprisal_bits=60),
        [None, b"some reasoning", None, None],
    )
    assert proves(claims, b"some reasoning", echoed=echo)
    assert not proves(claims, b"some reasoning")


def test_another_name_speaks_against_chance_and_not_against_an_id():
    assert not proves(Claims({OTHERS: None}, is_delivered=True, reply_surprisal_bits=CERTAIN), name=MINE)
    assert proves(minted(OTHERS), name=MINE, call=ID)


def test_a_name_that_means_several_still_speaks_against_chance():
    recorded = tokens(
        DIFFERENT, PLAIN, claims=Claims({OTHERS: None}, is_delivered=True, reply_surprisal_bits=CERTAIN)
    )
    for name, is_admitted in ((MINE, False), (OTHERS, True), (None, True)):
        guard = Guard(asked(name=name), None, takes_proof=True, keeps_reasoning=True)
        assert guard.admits(recorded) == is_admitted


def test_nothing_speaks_against_chance_if_nobody_gave_a_name():
    assert proves(Claims(is_delivered=True, reply_surprisal_bits=CERTAIN), name=MINE)


def test_a_reply_of_several_conversations_is_shown_by_each():
    claims = named()
    claims.add(minted(OTHERS))
    claims.add(Claims())
    assert proves(claims, name=MINE) and proves(claims, name=OTHERS) and proves(claims, call=ID)


def test_of_equal_replies_the_one_with_most_chance_counts():
    claims = Claims(is_delivered=True, reply_surprisal_bits=CERTAIN)
    claims.add(Claims(is_delivered=True, reply_surprisal_bits=LIKELY))
    assert proves(claims)


def test_of_very_many_who_received_it_the_first_are_forgotten():
    claims = named()
    for number in range(64):
        claims.add(named(f"{number}"))
    assert not proves(claims, name=MINE)
    assert proves(claims, name="0") and proves(claims, name="63")


# --------------------------------------------------------------------------------------- how far a proof goes


def with_block_after(reply: Claims, then: Claims) -> Tokens:
    """A block that differs stands after the first reply, and before the second one."""
    read = tokens(PLAIN, PLAIN, DIFFERENT, claims=reply)
    return Tokens(NEXT_REPLY, [PLAIN], read, then)


def test_a_proof_goes_no_further_than_its_reply():
    conversation = asked([], [], [block("on a branch")], name=MINE)
    recorded = with_block_after(named(), Claims(is_delivered=True))
    assert admits(conversation, with_block_after(Claims(is_delivered=True), named()))
    assert not admits(conversation, recorded)
    guard = Guard(conversation, MINE, takes_proof=True, keeps_reasoning=True)
    assert guard.proven(recorded) == REPLY


def test_what_nobody_has_replied_to_is_not_proven():
    before = tokens(DIFFERENT, PLAIN, claims=named())
    assert before.parent
    conversation = asked([block("on a branch")], name=MINE)
    assert admits(conversation, before) and not admits(conversation, before.parent)


def test_each_of_several_messages_that_end_in_one_place_is_looked_at():
    conversation = asked([], [], [block("on a branch")], name=MINE)
    assert not admits(conversation, Tokens(NEXT_QUESTION, [PLAIN, PLAIN, DIFFERENT], claims=Claims()))
    assert admits(conversation, Tokens(NEXT_REPLY, [PLAIN, PLAIN, DIFFERENT, PLAIN], claims=named()))


def test_what_is_asked_first_changes_nothing():
    recorded, conversation = tokens(DIFFERENT, PLAIN, PLAIN, claims=named()), asked(name=MINE)
    path: list[RecordedDetails] = [recorded]
    while path[0].parent:
        path.insert(0, path[0].parent)
    guard, other = (Guard(conversation, MINE, takes_proof=True, keeps_reasoning=True) for _ in range(2))
    assert [guard.admits(part) for part in path] == [False, True, True]
    assert [other.admits(part) for part in reversed(path)] == [True, True, False]


def test_who_takes_no_proof_takes_nothing_that_differs():
    conversation = asked([space(" ")], name=MINE, call=ID)
    for read in ((), (space("\n"),), (clock("friday"),)):
        recorded = tokens(MessageDetails(read), PLAIN, claims=minted(MINE))
        assert admits(conversation, recorded) and not admits(conversation, recorded, takes_proof=False)
    assert admits(conversation, tokens(MessageDetails((space(" "),)), PLAIN), takes_proof=False)


@pytest.mark.parametrize(
    "recorded", [tokens(MessageDetails((clock("friday"),)), PLAIN), tokens(PLAIN, PLAIN)]
)
def test_who_takes_no_proof_takes_no_other_clock_either(recorded):
    assert not admits(asked([clock("saturday")]), recorded, takes_proof=False)


# ------------------------------------------------------------------------------------------ clocks, and notes


FRIDAY = MessageDetails((clock("friday"),))
SATURDAY = asked([clock("saturday")])


def test_a_clock_may_differ_without_a_proof():
    assert admits(SATURDAY, tokens(FRIDAY, PLAIN))


def test_what_a_clock_was_said_to_be_is_admitted_once_if_it_is_so():
    recorded = tokens(FRIDAY, PLAIN, note_tokens(of_clock("saturday")))
    assert admits(SATURDAY, recorded)
    assert not admits(SATURDAY, Tokens(NEXT_REPLY, [note_tokens(of_clock("saturday"))], recorded))


FOREIGN_NOTES: dict[str, NotedValue] = {
    "another day": of_clock("sunday"),
    "a clock of another message": of_clock("saturday", NEXT_QUESTION),
    "a clock that is gone": (Field("today's date", QUESTION, "live"), None),
    "no clock": (Field("git status", QUESTION, "block"), "on main"),
    "what nobody says any more": (Field("git status", QUESTION, "block"), None),
}


@pytest.mark.parametrize("noted", FOREIGN_NOTES.values(), ids=FOREIGN_NOTES)
def test_a_note_of_something_else_needs_a_proof(noted):
    for notes in ([noted], [of_clock("saturday"), noted]):
        recorded = tokens(FRIDAY, PLAIN, note_tokens(*notes))
        assert not admits(SATURDAY, recorded)
        assert not admits(asked([clock("friday")]), recorded)


def test_a_note_of_more_than_clocks_needs_a_proof_even_if_it_is_so():
    both = [clock("friday"), block("on main")]
    noted = Field("git status", QUESTION, "block"), "on main"
    assert not admits(asked(both), tokens(MessageDetails((*both,)), PLAIN, note_tokens(noted)))


def test_a_note_of_a_clock_with_several_pieces_tells_all_of_them():
    now = asked([clock("saturday", 1), clock("noon", 5)])
    read = MessageDetails((clock("friday", 1), clock("noon", 5)))
    assert admits(now, tokens(read, PLAIN, note_tokens(of_clock("saturday\nnoon"))))
    assert not admits(now, tokens(read, PLAIN, note_tokens(of_clock("noon"))))


def test_a_note_of_a_clock_that_reads_the_same_is_no_foreign_one():
    assert admits(asked([clock("friday")]), tokens(FRIDAY, PLAIN, note_tokens(of_clock("friday"))))


def proven_after(*details: MessageDetails) -> Tokens:
    return Tokens(NEXT_REPLY, [PLAIN], tokens(*details), named())


def test_after_a_proof_there_may_be_any_notes_and_clocks():
    mine = asked([clock("saturday")], name=MINE)
    assert admits(
        mine, proven_after(FRIDAY, note_tokens(of_clock("sunday")), note_tokens(of_clock("monday")))
    )


def test_notes_before_a_proof_do_not_count_with_those_after_it():
    mine = asked([clock("saturday")], name=MINE)
    first = tokens(FRIDAY._replace(noted=(of_clock("saturday"),)), PLAIN, claims=named())
    assert admits(mine, Tokens(NEXT_QUESTION, [note_tokens(of_clock("saturday"))], first))
    assert not admits(SATURDAY, Tokens(NEXT_QUESTION, [note_tokens(of_clock("saturday"))], first))


# -------------------------------------------------------------------------------------------------- reasoning


REASONING, REASONED = b"some reasoning", MessageDetails((), b"some reasoning", is_ours=True)


def echoing(reasoning: bytes | None, *omitted: Sequence[OmittedText], **more: Any) -> Conversation:
    return asked(*omitted, echoed=[None, reasoning, None, None], **more)


def showing(reasoning: bytes | None, **more: Any) -> Conversation:
    return asked(shown=[None, reasoning, None, None], **more)


def test_reasoning_that_the_client_sends_is_admitted():
    assert admits(echoing(REASONING), tokens(PLAIN, REASONED._replace(is_ours=False)))


def test_reasoning_that_the_client_sends_otherwise_is_never_admitted():
    recorded = tokens(PLAIN, REASONED, claims=minted(MINE))
    assert not admits(echoing(b"edited", name=MINE, call=ID), recorded)


def test_reasoning_that_the_client_left_out_is_admitted_where_all_is_equal():
    assert admits(asked(), tokens(PLAIN, REASONED, claims=Claims(is_delivered=True)))
    assert admits(asked([block("on main")]), tokens(DIFFERENT, REASONED, claims=Claims(is_delivered=True)))


def test_reasoning_that_the_client_left_out_is_not_admitted_if_names_speak_against_it():
    recorded = tokens(PLAIN, REASONED, claims=named(OTHERS))
    assert not admits(asked(name=MINE), recorded)
    assert admits(asked(name=OTHERS), recorded) and admits(asked(), recorded)
    assert admits(asked(name=MINE), tokens(PLAIN, REASONED))


def test_a_name_that_means_several_speaks_against_reasoning_too():
    guard = Guard(asked(name=MINE), None, takes_proof=True, keeps_reasoning=True)
    assert not guard.admits(tokens(PLAIN, REASONED, claims=named(OTHERS)))


def test_reasoning_that_another_client_sent_needs_a_proof():
    recorded = tokens(PLAIN, REASONED._replace(is_ours=False))
    assert not admits(asked(name=MINE), recorded)
    assert admits(asked(name=MINE), Tokens(NEXT_QUESTION, [PLAIN], recorded, named()))


@pytest.mark.parametrize(
    "recorded",
    [
        tokens(FRIDAY, REASONED, claims=Claims(is_delivered=True)),
        tokens(MessageDetails((clock("saturday"),)), REASONED, note_tokens(of_clock("saturday"))),
    ],
    ids=["another clock", "a note"],
)
def test_beside_another_clock_reasoning_that_the_client_left_out_needs_a_proof(recorded):
    assert not admits(SATURDAY, recorded)
    assert admits(echoing(REASONING, [clock("saturday")]), recorded)
    mine = asked([clock("saturday")], name=MINE)
    assert admits(mine, Tokens(recorded.depth + 1, [PLAIN], recorded, named()))


def test_reasoning_that_is_proven_stays_beside_a_clock_that_differs_after_the_proof():
    recorded = Tokens(NEXT_QUESTION, [FRIDAY], tokens(PLAIN, REASONED, claims=named()))
    now = [clock("saturday")]
    assert admits(asked([], [], now, name=MINE), recorded) and not admits(asked([], [], now), recorded)


def test_reasoning_that_is_shown_is_not_hidden():
    hidden = tokens(PLAIN, PLAIN, claims=minted(MINE))
    assert not admits(showing(REASONING, name=MINE, call=ID), hidden)


def test_reasoning_that_is_shown_may_be_held_whoever_sent_it():
    assert admits(showing(REASONING), tokens(PLAIN, REASONED._replace(is_ours=False)))


def test_reasoning_that_is_no_longer_shown_stays_only_if_reasoning_are_kept():
    recorded = tokens(PLAIN, REASONED, claims=Claims(is_delivered=True))
    assert not admits(echoing(REASONING), recorded, keeps_reasoning=False)
    assert admits(showing(REASONING), recorded, keeps_reasoning=False)


# ------------------------------------------------------------------------------------------------------ names


ON_MAIN, ON_A_BRANCH, NOWHERE = (
    asked(omitted, name=MINE) for omitted in ([block("on main")], [block("on a branch")], ())
)


def noting(*conversations: Conversation, most: int = 9) -> ConversationNames:
    """Each of them begins."""
    names = ConversationNames(most)
    for conversation in conversations:
        names.note(conversation, -1)
    return names


def test_a_name_proves_one_conversation():
    names = noting(ON_MAIN, ON_MAIN)
    assert names.proving(ON_MAIN) == MINE
    assert names.proving(asked([block("on main")])) is None


def test_two_beginnings_under_one_name_prove_nothing():
    names = noting(ON_MAIN, ON_A_BRANCH)
    assert names.proving(ON_MAIN) is names.proving(ON_A_BRANCH) is names.proving(NOWHERE) is None
    names.note(ON_MAIN, -1)
    assert names.proving(ON_MAIN) is None, "and never again"


@pytest.mark.parametrize("beginnings", [(NOWHERE, ON_MAIN), (ON_MAIN, NOWHERE)])
def test_a_beginning_with_a_block_and_one_without_are_two(beginnings):
    assert noting(*beginnings).proving(ON_MAIN) is None


def test_two_that_say_the_same_of_other_messages_are_two():
    later = asked([], [], [block("on main")], name=MINE)
    assert noting(ON_MAIN, later).proving(ON_MAIN) is None


def test_a_conversation_that_goes_on_keeps_its_name():
    begun = conversation_of(ON_MAIN.canonical[QUESTION], name=MINE)
    names = noting(begun, ON_A_BRANCH)
    assert begun.keys[QUESTION] == ON_A_BRANCH.keys[QUESTION]
    assert names.proving(ON_A_BRANCH) == names.proving(begun) == MINE


def test_a_name_proves_nothing_of_what_goes_on_from_two_beginnings():
    begun = [conversation_of(talk.canonical[QUESTION], name=MINE) for talk in (ON_MAIN, ON_A_BRANCH)]
    assert noting(*begun).proving(ON_MAIN) is None


def test_one_name_may_prove_what_begins_otherwise():
    names = noting(ON_MAIN, ON_A_BRANCH)
    assert names.proving(conversation_of(CanonicalMessage(b"something else"), name=MINE)) == MINE
    assert names.proving(asked([block("on main")], name=OTHERS)) == OTHERS


@pytest.mark.parametrize("make", [clock, space])
def test_clocks_and_white_space_make_no_two_beginnings(make):
    conversation, other = (asked([make(text)], name=MINE) for text in (" ", "\n"))
    assert noting(conversation, other, NOWHERE).proving(conversation) == MINE


def test_what_is_proven_is_no_beginning():
    names = noting(ON_MAIN)
    names.note(ON_A_BRANCH, len(ON_A_BRANCH.keys) - 1)
    assert names.proving(ON_MAIN) == MINE


def test_two_that_part_after_what_both_have_proven_are_two():
    names = ConversationNames()
    for text in ("on main", "on a branch"):
        names.note(asked([], [], [], [block(text)], name=MINE), 1)
    assert names.proving(asked([], [], [], [block("on main")], name=MINE)) is None


def test_of_very_many_beginnings_the_first_are_forgotten():
    others = [asked([block("on main")], name=f"{number}") for number in range(9)]
    names = noting(ON_MAIN, *others)
    assert len(names._begun) == 9
    names.note(ON_A_BRANCH, -1)
    assert names.proving(ON_A_BRANCH) == MINE


def under(name: str, beginning: int = 0) -> tuple[Conversation, Conversation]:
    """Two conversations of one name and beginning."""
    root = CanonicalKey.of(bytes([beginning]))
    first, other = (asked([block(text)], name=name, root=root) for text in ("on main", "on a branch"))
    return first, other


def test_that_a_name_means_several_is_remembered_longer_than_any_beginning():
    names = noting(ON_MAIN, ON_A_BRANCH, *(under(f"{number}")[0] for number in range(20)), most=4)
    assert names.proving(ON_MAIN) is None
    assert len(names._begun) == 4


def test_of_a_name_with_too_many_beginnings_of_several_nothing_proves():
    often = [talk for beginning in range(9) for talk in under("often", beginning)]
    names = noting(*under("once"), *often, most=4)
    assert {names.proving(talk) for talk in (*often, *under("once"), under("often", 99)[0])} == {None}
    assert names.proving(under("once", 99)[0]) == "once"
    assert sum(map(len, names._of_several.values())) <= 4


def test_where_too_many_names_mean_several_none_proves():
    names = noting(*(talk for number in range(4) for talk in under(f"{number}")), most=4)
    assert names.proving(under("alone")[0]) == "alone"
    for number in range(4, 9):
        for talk in under(f"{number}"):
            names.note(talk, -1)
    assert {names.proving(under(name)[0]) for name in ("0", "8", "alone")} == {None}
    assert len(names._of_several) == 5


# ------------------------------------------------------------------------------------------------ own is own

ROLES = ["user", "assistant", "user", "assistant"]
HINT = own("id of the last question")


def two_turns(*, question: Claims, reply: Claims | None) -> Tokens:
    """A question, a reply, and a second question with a hint, which lasts for this one request."""
    first = tokens(PLAIN, PLAIN, claims=reply)
    return Tokens(NEXT_QUESTION, [MessageDetails((HINT,))], first, question)


OF_MINE = Claims({MINE: None})


@pytest.mark.parametrize("roles", [ROLES, [*ROLES[:3], "user"]])
def test_a_question_that_was_asked_under_this_name_and_answered_is_its_own(roles):
    """Its reply was not recorded, so nothing behind the question proves anything."""
    recorded = two_turns(question=OF_MINE, reply=named())
    assert admits(asked(name=MINE, role=roles), recorded) == (roles == ROLES)


@pytest.mark.parametrize(
    ("question", "reply", "name"),
    [
        (OF_MINE, None, MINE),
        (Claims({OTHERS: None}), named(), MINE),
        (OF_MINE, named(), None),
        (OF_MINE, named(OTHERS), MINE),
    ],
    ids=["no reply before it", "asked under another name", "no name", "reply to another"],
)
def test_a_question_alone_is_nobodys(question, reply, name):
    assert not admits(asked(name=name, role=ROLES), two_turns(question=question, reply=reply))


TODAY, TOMORROW = clock("friday"), clock("saturday")
DELIVERED = Claims(is_delivered=True)


@pytest.mark.parametrize(
    ("read", "claims", "name", "is_own", "is_foreign"),
    [
        (TODAY, named(), MINE, True, False),
        (TODAY, DELIVERED, None, True, False),
        (TODAY, Claims(), None, False, False),
        (TODAY, named(OTHERS), MINE, False, False),
        (TOMORROW, named(), MINE, True, False),
        (TOMORROW, named(OTHERS), MINE, False, True),
        (TOMORROW, DELIVERED, None, False, True),
    ],
)
def test_what_is_equal_or_proven_is_own_and_another_clock_is_foreign(read, claims, name, is_own, is_foreign):
    guard = Guard(asked([TODAY], name=name), name, takes_proof=True, keeps_reasoning=True)
    recorded = tokens(MessageDetails((read,)), PLAIN, claims=claims)
    assert (guard.is_own(recorded), guard.is_foreign(recorded)) == (is_own, is_foreign)


# -------------------------------------------------------------------------------------- transient messages


def carrier(words: bytes) -> tuple[Ignored, ...]:
    return (Ignored("internal context", "transient", words),)


def test_a_reply_behind_a_carrier_is_equal_to_no_other():
    reply = CanonicalMessage(b"OK")
    bare = exact_after(asked(), reply)
    names = {exact_after(asked(transient=carrier(words)), reply) for words in (b"alpha", b"beta")}
    assert len(names | {bare}) == 3


def test_a_name_of_two_beginnings_that_only_their_carriers_tell_apart_is_none():
    names = ConversationNames()
    for words in (b"alpha", b"beta"):
        assert names.proving(asked(name=MINE)) == MINE
        names.note(asked(name=MINE, transient=carrier(words)), -1)
    assert names.proving(asked(name=MINE)) is None


def test_carriers_of_a_conversation_whose_reply_is_proven_may_differ():
    names = ConversationNames()
    for words in (b"alpha", b"beta"):
        names.note(asked(name=MINE, transient=carrier(words)), REPLY)
    assert names.proving(asked(name=MINE)) == MINE
