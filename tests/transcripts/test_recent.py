"""What was computed last: which conversation a request is compared with, and which are forgotten."""

from __future__ import annotations

from array import array

from start_llm.core.canonical import CanonicalMessage, Conversation, chain
from start_llm.transcripts.recent import Computed, RecentConversations
from tests.transcripts.fakes import ROOT


def said(*texts: str, session: str = "", tenant: bytes = b"") -> Conversation:
    messages = [CanonicalMessage(text.encode()) for text in texts]
    nothing = [None] * len(texts)
    return Conversation(
        tenant=tenant,
        root=ROOT,
        roles=["user"] * len(texts),
        messages=messages,
        keys=chain(ROOT.key(tenant), messages),
        echoed=nothing,
        shown=nothing,
        own=nothing,
        live=[()] * len(texts),
        notable=[True] * len(texts),
        session=session,
        ignored=[()] * len(texts),
    )


def computed(
    *texts: str, reply: str = "", tokens: int = 4, session: str = "", tenant: bytes = b""
) -> Computed:
    return Computed(
        conversation=said(*texts, session=session, tenant=tenant),
        ids=array("I", range(tokens)),
        boundaries=(),
        thoughts=(),
        noted=(),
        reply=(CanonicalMessage(reply.encode()),) if reply else (),
    )


def kept(*all_computed: Computed, most_bytes: int = 10**6) -> RecentConversations:
    recent = RecentConversations(most_bytes)
    for one in all_computed:
        recent.note(one)
    return recent


def test_of_one_session_the_one_with_most_messages_in_common_is_meant():
    title, chat = (
        computed("name it", "hello", session="s"),
        computed("be brief", "hello", reply="hi", session="s"),
    )
    recent = kept(chat, title)
    assert recent.nearest(said("be brief", "hello", "hi", "go on", session="s")) is chat
    assert recent.nearest(said("name it", "another", session="s")) is title


def test_without_a_session_any_conversation_that_has_something_in_common_is_meant():
    one, other = computed("be brief", "hello", session="a"), computed("be long", "hello", "yes", session="b")
    recent = kept(one, other)
    assert recent.nearest(said("be long", "hello", session="c")) is other
    assert recent.nearest(said("be short", "nothing", session="c")) is None


def test_a_session_that_is_named_is_compared_with_itself_even_if_all_has_changed():
    mine = computed("be brief", session="mine")
    recent = kept(computed("be long", session="other"), mine)
    assert recent.nearest(said("be long", session="mine")) is mine


def test_nobody_is_compared_with_another_tenant():
    recent = kept(computed("be brief", session="s", tenant=b"one"))
    assert recent.nearest(said("be brief", session="s", tenant=b"two")) is None


def test_what_goes_on_takes_the_place_of_what_it_goes_on_from():
    first = computed("be brief", "hello", reply="hi", session="s")
    later = computed("be brief", "hello", "hi", "go on", session="s")
    recent = kept(first, later)
    assert recent._computed == [later]


def test_a_prompt_and_its_reply_are_one():
    recent, asked = RecentConversations(), computed("hello", session="s")
    recent.note(asked)
    answered = computed("hello", reply="hi", session="s")
    recent.note(answered, instead_of=asked)
    assert recent._computed == [answered]


def test_of_one_session_the_last_four_are_kept_and_32_in_all():
    recent = kept(*(computed(f"chat {number}", session="s") for number in range(9)))
    assert [one.conversation.messages[0].data for one in recent._computed] == [
        f"chat {number}".encode() for number in (5, 6, 7, 8)
    ]
    recent = kept(*(computed(f"chat {number}", session=f"s{number}") for number in range(50)))
    assert len(recent._computed) == 32
    assert recent.nearest(said("chat 17", session="s17")) is None
    assert recent.nearest(said("chat 18", session="s18"))


def test_beyond_its_bytes_the_oldest_go_and_the_newest_stays():
    recent = kept(*(computed("x", tokens=100, session=f"s{n}") for n in range(5)), most_bytes=1000)
    assert [one.conversation.session for one in recent._computed] == ["s3", "s4"]
    recent.note(computed("x", tokens=10_000, session="large"))
    assert [one.conversation.session for one in recent._computed] == ["large"]
