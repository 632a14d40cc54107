"""The last computed requests: which conversation a request is compared with, and which are forgotten."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from start_llm.core.canonical import CanonicalMessage, Conversation, Ignored, OmittedText
from start_llm.transcripts.recent import ComputedRequest, RecentConversations
from start_llm.transcripts.recorded_details import Claims
from tests.transcripts.fakes import conversation_of


def conversation(*texts: str, **more: Any) -> Conversation:
    return conversation_of(*(CanonicalMessage(text.encode()) for text in texts), **more)


def computed(
    *texts: str, reply: str = "", tokens: int = 4, claims: Claims | None = None, **more: Any
) -> ComputedRequest:
    return ComputedRequest(
        conversation=conversation(*texts, **more),
        ids=array("I", range(tokens)),
        boundaries=(),
        reasoning_digests=(),
        note_tokens=(),
        reply=(CanonicalMessage(reply.encode()),) if reply else (),
        claims=claims,
    )


def kept(*all_computed: ComputedRequest, max_bytes: int = 10**6) -> RecentConversations:
    recent = RecentConversations(max_bytes)
    for request in all_computed:
        recent.note(request)
    return recent


# ------------------------------------------------------------------------------------------- which is meant


def test_of_one_session_the_one_with_most_messages_in_common_is_meant():
    mine: dict[str, Any] = {"session": "s", "name": "s"}
    title, chat = (
        computed("name it", "hello", **mine),
        computed("be brief", "hello", reply="hi", **mine),
    )
    recent = kept(chat, title)
    assert recent.nearest(conversation("be brief", "hello", "hi", "go on", **mine), "s") is chat
    assert recent.nearest(conversation("name it", "another", **mine), "s") is title


def test_without_a_session_any_conversation_that_it_goes_on_from_is_meant():
    first, other = computed("be brief", "hello", session="a"), computed("be long", "hello", session="b")
    recent = kept(first, other)
    assert recent.nearest(conversation("be long", "hello", "yes", session="c"), None) is other
    assert recent.nearest(conversation("be short", "nothing", session="c"), None) is None


def test_of_two_that_it_goes_on_from_the_longer_one_is_meant():
    short, long = computed("be brief", session="a"), computed("be brief", "hello", session="b")
    assert kept(long, short).nearest(conversation("be brief", "hello", "yes", session="c"), None) is long


def test_a_session_that_is_named_is_compared_with_itself_even_if_all_has_changed():
    mine = computed("be brief", session="mine", name="mine")
    recent = kept(computed("be long", session="other", name="other"), mine)
    assert recent.nearest(conversation("be long", session="mine", name="mine"), "mine") is mine


def test_nobody_is_compared_with_another_tenant():
    recent = kept(computed("be brief", session="s", name="s", tenant=b"one"))
    assert recent.nearest(conversation("be brief", session="s", name="s", tenant=b"two"), "s") is None


# ------------------------------------------------------------------------------------------- whose they are


def test_nobody_is_compared_with_what_only_begins_in_the_same_words():
    recent = kept(computed("be brief", "a secret", session="s"))
    assert recent.nearest(conversation("be brief", "hello", session="s"), None) is None


def test_another_name_is_another_conversation_though_it_begins_alike():
    first = computed("a", name="anns", session="anns")
    assert kept(first).nearest(conversation("a", "b", name="bobs", session="bobs"), "bobs") is None


def test_a_name_of_several_shows_nothing():
    recent = kept(computed("be brief", "a secret", session="s", name="s"))
    assert recent.nearest(conversation("be brief", "hello", session="s", name="s"), None) is None


def test_nobody_is_compared_with_what_says_something_else_beside_the_same_words():
    status = OmittedText("git status", "block", 0, "a secret")
    theirs = conversation_of(CanonicalMessage(b"be brief", (status,)))
    recent = kept(
        ComputedRequest(
            conversation=theirs, ids=array("I"), boundaries=(), reasoning_digests=(), note_tokens=()
        )
    )
    assert recent.nearest(conversation("be brief"), None) is None


def test_who_sends_another_reply_is_not_who_received_this_one():
    """Two conversations without a name may begin alike; neither is shown what the other was answered."""
    theirs = computed("be brief", "hello", reply="a secret")
    recent = kept(theirs)
    assert recent.nearest(conversation("be brief", "hello", "hi", "go on"), None) is None
    assert recent.nearest(conversation("be brief", "hello", "a secret", "go on"), None) is theirs
    assert recent.nearest(conversation("be brief", "hello"), None) is theirs, "it is asked again"


def test_who_thought_otherwise_did_not_receive_this_reply():
    theirs = replace(computed("hello", reply="hi"), reasoning_digests=(None, b"a secret"))
    recent = kept(theirs)

    def sent(reasoning: bytes | None) -> Conversation:
        return conversation("hello", "hi", "go on", echoed=[None, reasoning, None])

    assert recent.nearest(sent(b"Hm."), None) is None
    assert [recent.nearest(sent(same), None) for same in (None, b"a secret")] == [theirs, theirs]


def test_what_was_asked_beside_a_message_that_is_gone_is_shown_to_who_has_it_too():
    first, other = (Ignored("internal context", "transient", text) for text in (b"a secret", b"another"))
    theirs = computed("hello", reply="hi", transient=(first,))
    recent = kept(theirs)
    assert recent.nearest(conversation("hello", transient=(first,)), None) is theirs
    assert recent.nearest(conversation("hello", transient=(other,)), None) is None
    assert recent.nearest(conversation("hello", "hi", "go on"), None) is None


def goes_on_from_the_reply(claims: Claims, *, ids: str = "", **more: Any) -> bool:
    """A request that asks on after the reply is compared with the one that got the reply."""
    mine = computed("be brief", "hello", reply="hi", claims=claims)
    sent = [frozenset({"of another call"}), frozenset({ids} - {""}), frozenset[str]()]
    return kept(mine).nearest(conversation("be long", "hi", "go on", ids=sent, **more), None) is mine


def test_a_reply_that_others_may_get_too_shows_nothing():
    assert not goes_on_from_the_reply(Claims(is_delivered=True))
    assert not goes_on_from_the_reply(
        Claims(is_delivered=True, reply_surprisal_bits=63, reasoning_surprisal_bits=64)
    )


def test_who_sends_a_reply_that_nobody_gets_by_accident_received_it():
    assert goes_on_from_the_reply(Claims(is_delivered=True, reply_surprisal_bits=64))
    assert not goes_on_from_the_reply(
        Claims({"another": None}, is_delivered=True, reply_surprisal_bits=64), name="mine"
    )


def test_who_sends_an_id_that_was_made_for_the_reply_received_it():
    claims = Claims({"another": None}, is_delivered=True, ids={"minted": None})
    assert goes_on_from_the_reply(claims, ids="minted", name="mine")
    assert not goes_on_from_the_reply(claims, ids="own", name="mine")
    assert not goes_on_from_the_reply(Claims(is_delivered=True, ids={"of another call": None}))


# --------------------------------------------------------------------------------------------- which are kept


def test_what_goes_on_takes_the_place_of_what_it_goes_on_from():
    first = computed("be brief", "hello", reply="hi", session="s")
    later = computed("be brief", "hello", "hi", "go on", session="s")
    recent = kept(first, later)
    assert recent._computed == [later]


def test_of_two_that_begin_alike_neither_takes_the_place_of_the_other():
    mine, theirs = (computed("be brief", "hello", reply=reply, session="s") for reply in ("hi", "yes"))
    assert kept(mine, theirs)._computed == [mine, theirs]
    later = computed("be brief", "hello", "yes", "go on", session="s")
    assert kept(mine, theirs, later)._computed == [mine, later]


def test_a_reply_that_is_given_again_takes_the_place_of_the_first():
    first, again = (computed("hello", reply="hi", session="s") for _ in range(2))
    assert kept(first, again)._computed == [again]


def test_a_prompt_and_its_reply_are_one():
    recent, asked = RecentConversations(), computed("hello", session="s")
    recent.note(asked)
    answered = computed("hello", reply="hi", session="s")
    recent.note(answered, instead_of=asked)
    assert recent._computed == [answered]


def test_of_one_session_the_last_four_are_kept_and_32_in_all():
    recent = kept(*(computed(f"chat {number}", session="s") for number in range(9)))
    assert [request.conversation.canonical[0].data for request in recent._computed] == [
        f"chat {number}".encode() for number in (5, 6, 7, 8)
    ]
    recent = kept(*(computed(f"chat {number}", session=f"s{number}") for number in range(50)))
    assert len(recent._computed) == 32
    assert recent.nearest(conversation("chat 17", session="s17"), None) is None
    assert recent.nearest(conversation("chat 18", session="s18"), None)


def test_beyond_its_bytes_the_oldest_go_and_the_newest_stays():
    room = 2 * computed("x", tokens=100).nbytes
    recent = kept(*(computed("x", tokens=100, session=f"s{n}") for n in range(5)), max_bytes=room)
    assert [request.conversation.session for request in recent._computed] == ["s3", "s4"]
    recent.note(computed("x", tokens=10_000, session="large"))
    assert [request.conversation.session for request in recent._computed] == ["large"]


def test_another_tenant_with_the_same_session_id_pushes_nothing_out():
    mine = computed("first", tenant=b"mine", session="main")
    recent = kept(mine, *(computed(f"{number}", tenant=b"another", session="main") for number in range(9)))
    assert recent.nearest(conversation("first", "more", tenant=b"mine", session="main"), None) is mine
