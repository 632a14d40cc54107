"""Why a request is not known as far as its conversation is: the message, the token, the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from start_llm.core.chat import ChatRequest, Message
from start_llm.core.explanation import Difference, Explanation
from tests.prompt.fakes import reply, system, user
from tests.templates.traits import TRAITS
from tests.transcripts.test_drift import CALLERS, CALLING, RULES_TEXT, Named
from tests.transcripts.test_laws import ANSWER, TOOLS, Talk
from tests.transcripts.world import (
    BILLING,
    BLOCK,
    CARRIER,
    DATE,
    MOVING,
    OWN,
    Reply,
    Server,
    Shape,
    day,
    text_of,
)

pytestmark = pytest.mark.product

BOUND = [trait for trait in TRAITS if trait != MOVING]

type Change = Callable[[tuple[Message, ...]], tuple[Message, ...]]


def first_set(billing: str = "a1", date: str = "d1x", block: str = "b1x", rules: str = RULES_TEXT) -> Message:
    return system(BILLING.format(billing) + DATE.format(day(date)) + BLOCK.format(block) + rules)


def asked(own: str = "m1x", text: str = "v91x") -> Message:
    return user(OWN.format(own) + text)


class Known(Named):
    """A talk with a bit of everything that may change, one turn old."""

    def __init__(self, trait: str, *after: Message, shape: Shape = ANSWER, name: str | None = "mine") -> None:
        super().__init__(trait, name=name)
        self.messages = (first_set(), asked(), *after)
        self.ask(shape)
        self.read = self.server.model.read
        self.lasting = (*self.messages[:2], *self.messages[2 + len(after) :])

    def explained(self, *messages: Message, **changes: object) -> Explanation:
        return self.server.explain(replace(self.request(), messages=messages, **changes))

    def after(self, token: int) -> str:
        """Return the model's input from a token on."""
        return text_of(self.trait, self.read[token:])


class Planted(NamedTuple):
    """A change of one class, and what has to be said of it."""

    change: Change
    drift: str
    rule: str | None
    message: int
    computed: str = ""
    asked: str = ""


def at(index: int, message: Message) -> Change:
    return lambda messages: (*messages[:index], message, *messages[index + 1 :])


PLANTED = {
    "transport": Planted(at(0, first_set(billing="a2")), "transport", "billing header", 0),
    "live": Planted(at(0, first_set(date="d2x")), "live", "today's date", 0, "2", "3"),
    "block": Planted(at(0, first_set(block="b2x")), "block", "inbound context", 0, "1x", "2x"),
    "own": Planted(at(1, asked(own="m2x")), "own", "message metadata", 1, "1x", "2x"),
    "content of the system": Planted(
        at(0, first_set(rules=RULES_TEXT.replace("v90x", "v80x"))), "content", None, 0, "90x", "80x"
    ),
    "content of a question": Planted(at(1, asked(text="v81x")), "content", None, 1, "91x", "81x"),
    "content of a reply": Planted(at(2, reply("v87x")), "content", None, 2),
}


def one_difference(explanation: Explanation) -> Difference:
    (difference,) = explanation.differences
    assert explanation.cause == difference
    return difference


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(8)
def test_a_planted_change_is_named_by_message_rule_and_class(trait, planted):
    known = Known(trait)
    difference = one_difference(known.explained(*planted.change(known.lasting)))
    assert (difference.message, difference.drift, difference.rule) == (
        planted.message,
        planted.drift,
        planted.rule,
    )


@pytest.mark.parametrize("planted", [case for case in PLANTED.values() if case.computed])
@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(6)
def test_a_planted_change_is_shown_on_both_sides_from_its_first_token_on(trait, planted):
    known = Known(trait)
    difference = one_difference(known.explained(*planted.change(known.lasting)))
    assert difference.token is not None
    assert known.after(difference.token).startswith(planted.computed)
    assert planted.computed in difference.computed
    assert planted.asked in difference.asked
    assert planted.asked not in difference.computed


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(5)
def test_what_the_model_does_not_read_has_no_token(trait):
    known = Known(trait)
    assert one_difference(known.explained(*PLANTED["transport"].change(known.lasting))).token is None


@pytest.mark.parametrize("trait", BOUND)
def test_a_message_that_is_gone_is_named_with_the_end_of_what_stays(trait):
    known = Known(trait, user(CARRIER.format("c1x")))
    difference = one_difference(known.explained(*known.lasting))
    assert (difference.drift, difference.rule, difference.message) == ("transient", "internal context", 2)
    assert difference.what == "is gone"
    assert difference.token is not None
    assert "c1x" in known.after(difference.token)
    assert "v91x" not in known.after(difference.token)


@pytest.mark.parametrize("trait", BOUND)
def test_other_tools_and_options_stand_before_all_messages(trait):
    known = Known(trait)
    less = one_difference(known.explained(*known.lasting, tools=TOOLS[:-1]))
    assert (less.message, less.drift, less.what) == (None, "content", "have other tools")
    options = {"made_up": "yes"}
    other = one_difference(known.explained(*known.lasting, template_options=options))
    assert other.what == "have other options"


@pytest.mark.parametrize("trait", BOUND)
def test_where_nothing_has_changed_nothing_differs(trait):
    known = Known(trait)
    explanation = known.explained(*known.lasting)
    assert (explanation.differences, explanation.cause) == ((), None)
    assert explanation.bound_messages == 3
    assert explanation.against is not None
    assert explanation.against.messages == 3


@pytest.mark.parametrize("trait", BOUND)
def test_other_white_space_at_an_end_is_another_spelling(trait):
    known = Known(trait)
    explanation = known.explained(known.lasting[0], asked(text="v91x  "), *known.lasting[2:])
    assert [difference.drift for difference in explanation.differences] in ([], ["transport"])


@pytest.mark.parametrize("trait", BOUND)
def test_white_space_in_front_is_content(trait):
    known = Known(trait)
    question = user("\n" + known.lasting[1].content)
    difference = one_difference(known.explained(known.lasting[0], question, *known.lasting[2:]))
    assert (difference.message, difference.drift) == (1, "content")


@pytest.mark.parametrize("trait", BOUND)
def test_what_stops_is_the_cause_and_what_was_stated_in_a_note_is_not(trait):
    known = Known(trait)
    change = (first_set(date="d2x"), known.lasting[1], reply("v87x"), *known.lasting[3:])
    explanation = known.explained(*change)
    assert [difference.drift for difference in explanation.differences] == ["live", "content"]
    assert explanation.cause == explanation.differences[1]


@pytest.mark.parametrize("trait", BOUND)
def test_another_reasoning_is_content(trait):
    known = Known(trait)
    answer = replace(known.lasting[2], reasoning="t8x")
    difference = one_difference(known.explained(*known.lasting[:2], answer, *known.lasting[3:]))
    assert (difference.message, difference.drift, difference.what) == (2, "content", "has other reasoning")


def test_explaining_changes_nothing_and_generates_nothing():
    known = Known("chatml_tools_first" if "chatml_tools_first" in BOUND else BOUND[0])
    server, changed = known.server, PLANTED["content of a question"].change(known.lasting)
    model, metrics = server.model.read, server.transcripts.metrics
    before = (metrics.bound, metrics.fresh, metrics.stored.nodes, metrics.stored.variants, metrics.notes)
    first = known.explained(*changed)
    assert known.explained(*changed) == first
    assert server.model.read is model
    assert (
        metrics.bound,
        metrics.fresh,
        metrics.stored.nodes,
        metrics.stored.variants,
        metrics.notes,
    ) == before


def test_a_title_that_is_asked_for_in_the_same_session_loses_nothing():
    """It has the question in common with the conversation, and after another beginning."""
    known = Known(BOUND[0])
    title = known.explained(system("v50x Name it."), known.lasting[1], session_id=None)
    changed = known.explained(first_set(rules=f"v80x {RULES_TEXT}"), *known.lasting[1:])
    assert (title.again, title.lost) == (0, 0)
    assert changed.again > 0


@pytest.mark.parametrize("trait", BOUND)
def test_a_message_that_is_said_again_is_new_the_second_time(trait):
    """Claude Code puts the same words before each picture of one name; users say "go on" twice."""
    known = Known(trait)
    again = known.explained(*known.lasting, asked()).again
    assert again == known.explained(*known.lasting, asked(text="v92x")).again > 0


def test_nobody_learns_of_another_tenants_conversation():
    known = Known(BOUND[0])
    changed = PLANTED["live"].change(known.lasting)
    explanation = known.explained(*changed, tenant=b"somebody else")
    assert (explanation.against, explanation.differences) == (None, ())
    assert known.explained(*changed).against


def two_chats(names: str) -> Callable[[str], Explanation]:
    """Two with the same words but for one, and what is said of a third question in the one of a name.

    Args:
        names: whose names they have, a field of the request.
    """
    server = Server(BOUND[0], "true")

    def ask(name: str, text: str) -> ChatRequest:
        request = replace(Talk(server.trait, server=server).request(), **{names: name})
        return replace(request, messages=(system(RULES_TEXT), user(text)))

    for name, text in (("one", "v1x"), ("two", "v2x")):
        server.answer(ask(name, text), "v3x", Reply(ANSWER, (), ""))
    return lambda name: server.explain(ask(name, "v4x"))


def test_a_conversation_that_is_named_is_compared_with_itself():
    explained = two_chats("conversation_id")
    assert "1x" in one_difference(explained("one")).computed
    assert "2x" in one_difference(explained("two")).computed


def test_a_session_is_no_proof_and_nobody_learns_of_another_conversation_of_it():
    explanation = two_chats("session_id")("one")
    assert (explanation.against, explanation.differences) == (None, ())


# ------------------------------------------------------------------------------------ whose a conversation is


@pytest.mark.parametrize("name", [None, "other"])
@pytest.mark.parametrize(
    "planted", ["live", "block", "own", "content of the system", "content of a question"]
)
def test_what_is_said_otherwise_is_compared_with_nothing_that_is_not_proven_to_be_the_same(planted, name):
    known = Known(BOUND[0])
    known.name = name
    explanation = known.explained(*PLANTED[planted].change(known.lasting))
    assert (explanation.against, explanation.differences) == (None, ())


@pytest.mark.parametrize("trait", BOUND)
def test_what_a_request_wholly_contains_is_compared_without_a_proof(trait):
    known = Known(trait, name=None)
    assert known.explained(*known.lasting).against
    assert known.explained(*known.lasting[:2]).against, "asked again"


@pytest.mark.parametrize("name", [None, "mine"])
def test_a_name_alone_proves_that_another_reply_was_given(name):
    known = Known(BOUND[0], name=name)
    explanation = known.explained(*known.lasting[:2], reply("v87x"), *known.lasting[3:])
    whats = [difference.what for difference in explanation.differences]
    assert whats == ["is not the reply that was given"] * bool(name)
    assert bool(explanation.against) == bool(name)


def test_of_two_that_begin_alike_none_is_shown_what_the_other_was_answered():
    server = Server(BOUND[0], "true")
    request = Talk(server.trait, server=server).request()
    request = replace(request, messages=(system(RULES_TEXT), user("v1x")))
    _, mine = server.answer(request, "v3x", Reply(ANSWER, (), ""))
    server.answer(request, "v4x a secret", Reply(ANSWER, (), ""))
    explanation = server.explain(replace(request, messages=(*request.messages, mine, user("v5x"))))
    assert explanation.differences == ()
    assert explanation.against, "with its own"


@pytest.mark.parametrize("trait", CALLERS)
def test_who_sends_the_id_of_our_call_back_learns_what_differs(trait):
    known = Known(trait, shape=CALLING, name=None)
    difference = one_difference(known.explained(*PLANTED["block"].change(known.lasting)))
    assert (difference.drift, difference.rule) == ("block", "inbound context")
