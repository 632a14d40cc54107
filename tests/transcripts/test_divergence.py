"""Where a request leaves the one that its client names: pure comparisons, and what is remembered for them."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from start_llm.core.canonical import CanonicalKey, CanonicalMessage, Conversation, Root
from start_llm.core.prompt import Boundary
from start_llm.core.prompt_report import Divergence
from start_llm.transcripts.divergence import AnsweredRequest, AnsweredRequests, diverges
from start_llm.transcripts.recent import ComputedRequest
from tests.transcripts.fakes import ROOT, conversation_of

RULES, QUESTION, REPLY = "rules", "question", "reply"
IDS = tuple(range(100))
"""Rules up to 40, the question up to 90, the rest is the reply."""


def conversation(*texts: str, root: Root = ROOT, **more: Any) -> Conversation:
    roles = ["system" if text.startswith(RULES) else "user" for text in texts]
    messages = (CanonicalMessage(text.encode()) for text in texts)
    return replace(conversation_of(*messages, role=roles, **more), root=root)


def answered(*texts: str, reply: str = REPLY, ids: tuple[int, ...] = IDS, **more: Any) -> AnsweredRequest:
    computed = ComputedRequest(
        conversation=conversation(*texts, **more),
        ids=array("I", ids),
        boundaries=(Boundary(0, 40), Boundary(1, 90)),
        reasoning_digests=(),
        note_tokens=(),
        reply=(CanonicalMessage(reply.encode()),) if reply else (),
    )
    return AnsweredRequest("model", computed)


type Asked = tuple[str, Conversation, tuple[int, ...], int]


def asked(*texts: str, ids: tuple[int, ...], end: int, model: str = "model", **more: Any) -> Asked:
    return model, conversation(*texts, **more), ids, end


def parted(at: int, length: int = 130) -> tuple[int, ...]:
    """Tokens that leave those of the earlier request there."""
    return (*range(at), *range(1000, 1000 + length - at))


def test_a_conversation_that_goes_on_leaves_nothing():
    before = answered(RULES, QUESTION)
    more = asked(RULES, QUESTION, REPLY, "more", ids=tuple(range(130)), end=120)
    assert diverges(before, *more) is None


def test_another_end_token_behind_the_reply_is_no_divergence():
    before = answered(RULES, QUESTION)
    assert diverges(before, *asked(RULES, QUESTION, REPLY, "more", ids=parted(99), end=120)) is None
    divergence = diverges(before, *asked(RULES, QUESTION, "other", "more", ids=parted(90), end=120))
    assert divergence == Divergence("messages", 9)


def test_the_generation_prompt_of_one_without_a_reply_is_not_compared():
    before = answered(RULES, QUESTION, reply="")
    assert diverges(before, *asked(RULES, QUESTION, REPLY, "more", ids=parted(90), end=120)) is None


def test_what_comes_behind_the_end_of_the_messages_or_in_a_note_is_not_compared():
    before = answered(RULES, QUESTION)
    assert diverges(before, *asked(RULES, QUESTION, ids=parted(90), end=90)) is None


def test_the_first_place_that_differs_counts():
    before, others = answered(RULES, QUESTION), Root(ROOT.options, CanonicalKey.of(b"tools"))
    ids, end = parted(10), 120
    changed: dict[str, Asked] = {
        "model": asked("rules 2", "x", ids=ids, end=end, root=others, model="other"),
        "system": asked("rules 2", "x", ids=ids, end=end, root=others),
        "tools": asked(RULES, "x", ids=ids, end=end, root=others),
        "messages": asked(RULES, "x", ids=ids, end=end),
        "other": asked(RULES, QUESTION, ids=ids, end=end),
    }
    for place, request in changed.items():
        divergence = diverges(before, *request)
        assert divergence is not None
        assert (divergence.place, divergence.missed) == (place, 99 if place == "model" else 89)


def test_a_system_text_that_comes_or_goes_has_changed():
    with_rules, without = answered(RULES, QUESTION), answered(QUESTION, "more")
    for before, texts in ((with_rules, (QUESTION,)), (without, (RULES, QUESTION, "more"))):
        divergence = diverges(before, *asked(*texts, ids=parted(0), end=120))
        assert divergence is not None
        assert divergence.place == "system"


def test_messages_that_are_missing_have_changed():
    divergence = diverges(answered(RULES, QUESTION), *asked(RULES, ids=parted(30), end=40))
    assert divergence == Divergence("messages", 10)


# ------------------------------------------------------------------------------------------------- the memory


def test_a_reply_is_found_by_whose_it_is_alone():
    requests, request = AnsweredRequests(), answered(RULES)
    requests.note(b"mine", "name", request)
    assert requests.find(b"mine", "name") is request
    assert requests.find(b"yours", "name") is None
    assert requests.find(b"mine", "another") is None


def test_the_oldest_are_forgotten_by_number_and_by_size():
    request = answered(RULES)
    requests = AnsweredRequests(most=3)
    for number in range(5):
        requests.note(b"", str(number), request)
    assert [bool(requests.find(b"", str(number))) for number in range(5)] == [False, False, True, True, True]
    small = AnsweredRequests(max_bytes=2 * request.computed.nbytes)
    for number in (0, 1, 2, 3, 3, 3):
        small.note(b"", str(number), request)
    assert [bool(small.find(b"", str(number))) for number in range(4)] == [False, False, True, True]


def test_the_newest_stays_however_large_it_is():
    requests, request = AnsweredRequests(max_bytes=1), answered(RULES)
    requests.note(b"", "large", request)
    assert requests.find(b"", "large") is request
