"""Nothing hidden, nothing foreign: what a model reads, whatever clients and model did before."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.chat import ChatRequest, KeptReasoning, Message, Thinking
from tests.prompt.fakes import call, reply, result, system, text_of, user
from tests.prompt.replies import EMPTY, TOOLS
from tests.slices import examples
from tests.templates.traits import TRAITS
from tests.transcripts.clients import World
from tests.transcripts.world import (
    MOVING,
    OWN,
    SHAPES,
    Reply,
    Server,
    Shape,
    form_of,
    without_reasoning,
    words,
)

pytestmark = pytest.mark.product

REQUESTS = 8
ANSWER = Shape(reasoning=False, text=True, calls=0)
REASONED = Shape(reasoning=True, text=True, calls=0)
POLICIES: tuple[KeptReasoning, ...] = ("true", "template", "false")
THINKERS = [trait for trait in TRAITS if form_of(trait, REASONED, on=True)]


@pytest.mark.sample(24)
@pytest.mark.parametrize("trait", TRAITS)
@examples(5, few=2)
@given(seed=st.integers(0, 2**32), kept=st.sampled_from(POLICIES), strict=st.booleans())
def test_nothing_is_hidden_and_nothing_is_foreign(
    trait: str, seed: int, kept: KeptReasoning, strict: bool
) -> None:
    """See `World`, which checks every prompt."""
    World(trait, kept, Random(seed), strict=strict).live(REQUESTS)


# ------------------------------------------------------------------------------------------------ the splice


class Talk:
    """One client that changes nothing, and a model that writes as its template does."""

    def __init__(self, trait: str, kept: KeptReasoning = "true", server: Server | None = None) -> None:
        self.server = server or Server(trait, kept)
        self.trait = trait
        self.messages: tuple[Message, ...] = (system("v90x"), user("v91x"))
        self.tenant = b""
        self.name: str | None = None
        self.written = ""

    def request(self, *, on: bool = True) -> ChatRequest:
        return ChatRequest(
            messages=self.messages,
            tools=TOOLS,
            thinking=Thinking(on=on),
            tenant=self.tenant,
            conversation_id=self.name,
        )

    def ask(self, shape: Shape, *, reasoning: str = "t1x", on: bool = True) -> str:
        """Return the model's input. The reply is in the conversation then, and what follows it."""
        request, calls = self.request(on=on), sum(len(tool_call.tool_calls) for tool_call in self.messages)
        form, count = form_of(self.trait, shape, on=on), len(self.messages)
        how = Reply(shape, tuple(f"v{count}{n}x" for n in range(3)), reasoning)
        assert form
        self.written = how.text(form, calls)
        read, answer = self.server.answer(request, self.written, how)
        named = [replace(tool_call, id=f"call{count}{tool_call.id}") for tool_call in answer.tool_calls]
        results = [result(f"v{count}{n}r", tool_call.id) for n, tool_call in enumerate(named)]
        self.messages += (replace(answer, tool_calls=tuple(named)), *(results or [user(f"v{count}9x")]))
        return read


@pytest.mark.sample(18)
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("trait", [trait for trait in TRAITS if trait != MOVING])
def test_without_drift_what_is_bound_is_the_fresh_rendering(trait: str, on: bool):
    """At every reply of a conversation; but for reasoning, where the model has any: a rendering drops
    them.
    """
    talk, written = Talk(trait), ""
    shapes = [shape for shape in SHAPES if form_of(trait, shape, on=on)]
    has_reasoning = trait in THINKERS if on else trait in EMPTY
    for shape in (*shapes, ANSWER):
        fresh = talk.server.fresh(talk.request(on=on))
        read = talk.ask(shape, on=on)
        assert without_reasoning(read) == without_reasoning(fresh)
        assert read == fresh or has_reasoning
        assert read.startswith(written)
        written = read + talk.written
    assert talk.server.transcripts.metrics.bound == len(shapes)


@pytest.mark.parametrize("trait", TRAITS)
def test_a_recorded_reply_ends_before_what_ends_it(trait: str):
    talk = Talk(trait)
    talk.ask(ANSWER)
    variants = [variant for kept in talk.server.transcripts.store._nodes.values() for variant in kept]
    (recorded,) = [variant for variant in variants if variant.claims.is_delivered]
    assert text_of(trait, recorded.tokens()).endswith(talk.written)
    assert not talk.written.endswith(TRAITS[trait].eos)


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("shape", [REASONED, Shape(reasoning=True, text=True, calls=2)])
@pytest.mark.parametrize("trait", ["numbered_actions", "open_and_close"])
def test_behind_a_reply_that_was_cut_anywhere_the_marks_around_its_answer_are_closed(
    trait: str, shape: Shape
):
    """Lesson 96."""
    form = form_of(trait, shape, on=True)
    assert form
    for cut in range(21):
        talk = Talk(trait)
        how = Reply(shape, ("v3x", "v4x", "v5x"), "t1x", cut=cut / 20)
        _, answer = talk.server.answer(talk.request(), how.text(form, 0), how)
        results = [result("v6x", tool_call.id) for tool_call in answer.tool_calls]
        talk.messages += (answer, *(results or [user("v7x")]))
        fresh = talk.server.fresh(talk.request())
        assert without_reasoning(talk.ask(ANSWER)) == without_reasoning(fresh)


# --------------------------------------------------------------------------------- replies with two reasoning


def twice(trait: str, kept: KeptReasoning = "true") -> tuple[Talk, Talk]:
    """Two clients get the same reply, for two reasons."""
    first = Talk(trait, kept)
    second = Talk(trait, kept, first.server)
    first.ask(REASONED, reasoning="t1x")
    second.ask(REASONED, reasoning="t2x")
    assert first.messages != second.messages
    return first, second


def with_reasoning(talk: Talk, reasoning: str | None) -> Talk:
    messages = (
        replace(item, reasoning=reasoning) if item.role == "assistant" else item for item in talk.messages
    )
    talk.messages = tuple(messages)
    return talk


@pytest.mark.parametrize("trait", THINKERS)
def test_an_echoed_reasoning_gets_the_tokens_that_it_came_with(trait: str):
    for talk, reasoning in zip(twice(trait), ("t1x", "t2x"), strict=True):
        assert words(talk.ask(ANSWER), "t") == [reasoning]


@pytest.mark.parametrize("trait", THINKERS)
def test_an_edited_reasoning_is_content(trait: str):
    talk = with_reasoning(twice(trait)[0], "t3x")
    fresh = talk.server.fresh(talk.request())
    assert words(talk.ask(ANSWER), "t") == words(fresh, "t")


@pytest.mark.parametrize("trait", THINKERS)
def test_reasoning_of_another_client_is_shown_to_nobody_else(trait: str):
    """The other one never sent any: it may get what the server reasoning, not what this one made of it."""
    talk = Talk(trait)
    talk.ask(REASONED, reasoning="t1x")
    other = Talk(trait, server=talk.server)
    other.messages = with_reasoning(talk, None).messages
    with_reasoning(talk, "t3x").ask(ANSWER)
    assert words(other.ask(ANSWER), "t") in (["t1x"], [])


@pytest.mark.parametrize("trait", THINKERS)
def test_reasoning_stays_with_its_tenant(trait: str):
    talk = Talk(trait)
    talk.ask(REASONED, reasoning="t1x")
    with_reasoning(talk, None).tenant = b"other"
    assert words(talk.ask(ANSWER), "t") == []


# ------------------------------------------------------------------------------------------- lines of its own


def with_id(talk: Talk, message_id: str) -> Talk:
    lines = OWN.format(message_id)
    talk.messages = tuple(
        user(lines + item.content[-4:]) if item.content.endswith("v91x") else item for item in talk.messages
    )
    return talk


def test_a_new_message_is_read_with_its_own_id_whoever_sent_the_same_before():
    first = with_id(Talk("kimi"), "m1x")
    first.ask(ANSWER)
    assert words(with_id(Talk("kimi", server=first.server), "m2x").ask(ANSWER), "m") == ["m2x"]


def test_an_old_message_keeps_the_id_that_it_was_read_with():
    talk = with_id(Talk("kimi"), "m1x")
    talk.name = "one"
    talk.ask(ANSWER)
    read = with_id(talk, "m2x").ask(ANSWER)
    assert words(read, "m") == ["m1x", "m2x"]
    assert read.index("[Changed in message metadata:") < read.index("m2x")


def test_nobody_else_reads_the_id_of_an_old_message():
    talk = with_id(Talk("kimi"), "m1x")
    talk.ask(ANSWER)
    assert words(with_id(talk, "m2x").ask(ANSWER), "m") == ["m2x"]


def test_what_moves_from_question_to_question_is_read_in_its_place_alone():
    server = Server(MOVING, "true")
    messages: tuple[Message, ...] = (user("v1x"),)
    for number in range(3):
        request = ChatRequest(messages=messages, tools=TOOLS)
        how = Reply(ANSWER, (f"v{number}2x",), "")
        read, answer = server.answer(request, how.text("v0x", 0), how)
        assert read == server.fresh(request)
        messages += (answer, user(f"v{number}3x"))


def test_where_tools_move_a_reply_is_bound_until_the_next_question():
    talk, calls = Talk(MOVING), Shape(reasoning=False, text=False, calls=1)
    bound: list[int] = []
    for shape in (calls, calls, ANSWER, calls, ANSWER):
        talk.ask(shape)
        bound.append(talk.server.transcripts.metrics.bound)
    assert bound == [0, 1, 2, 2, 3]


def test_reasoning_that_is_a_word_of_its_reply_is_not_taken_for_it():
    """Its first rendering drops the reasoning, and says the word all the same."""
    talk = Talk("strips_old_reasoning")
    calling = reply("", call("c1", path="t1x"), reasoning="t1x")
    loop = (user("v1x"), calling, result("v2x", "c1"))
    talk.messages = (*loop, reply("v3x"), user("v4x"))
    talk.ask(ANSWER)
    talk.messages = loop
    assert words(talk.ask(ANSWER), "t") == ["t1x", "t1x"]


def without_its_tokens(server: Server) -> Server:
    """It remembers the reasoning alone."""
    later = Server(server.trait, "true")
    for key, reasoning_texts in server.transcripts.reasoning_texts._reasoning_texts.items():
        for reasoning in reasoning_texts:
            later.transcripts.reasoning_texts.keep(key, reasoning)
    return later


def test_reasoning_is_distinguished_from_the_same_word_of_its_reply_where_the_client_leaves_it_out():
    """One rendering drops it, the next one of the same messages does not."""
    talk = Talk("strips_old_reasoning")
    talk.ask(Shape(reasoning=True, text=False, calls=1), reasoning="v21x")
    loop = tuple(replace(message, reasoning=None) for message in talk.messages)
    talk.server, talk.messages = without_its_tokens(talk.server), (*loop, reply("v31x"), user("v41x"))
    assert words(talk.ask(ANSWER), "v").count("v21x") == 1
    talk.messages = loop
    assert words(talk.ask(ANSWER), "v").count("v21x") == 2


@pytest.mark.parametrize("echoed", [True, False])
def test_a_conversation_goes_on_though_its_reply_says_what_was_reasoning(echoed: bool):
    talk = Talk("strips_old_reasoning")
    talk.ask(Shape(reasoning=True, text=False, calls=1), reasoning="v21x")
    if not echoed:
        talk.messages = tuple(replace(message, reasoning=None) for message in talk.messages)
    talk.server = without_its_tokens(talk.server)
    talk.ask(ANSWER)
    assert talk.server.explain(talk.request()).bound_messages == len(talk.messages) - 1


@pytest.mark.parametrize("reasoning", ['{"path": "v21x"}', "tool_call", "assistant"])
def test_reasoning_is_distinguished_from_markup_and_json_with_its_words(reasoning: str):
    """The first rendering drops it, and has its words all the same."""
    talk = Talk("strips_old_reasoning")
    calling = reply("", call("c1", path="v21x"), reasoning=reasoning)
    loop = (user("v1x"), calling, result("v2x", "c1"))
    talk.messages = (*loop, reply("v3x"), user("v4x"))
    talk.ask(ANSWER)
    talk.messages = loop
    assert f"<think>\n{reasoning}\n" in talk.ask(ANSWER)


def test_a_bound_prompt_that_memory_does_not_hold_is_rendered_fresh():
    talk = Talk("strips_old_reasoning")
    talk.ask(REASONED)
    service = talk.server._service
    service._model = replace(service._model, memory_window=service.count(talk.request()))
    fresh = talk.server.fresh(talk.request())
    assert talk.ask(ANSWER) == fresh
    assert talk.server.transcripts.metrics.refused == {"too_long": 1}
