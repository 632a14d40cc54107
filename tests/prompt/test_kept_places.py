"""The places up to which a client asks to keep a prompt: exactly there, or not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.chat import KeptPlace, Message
from start_llm.core.prompt import KeptPrefix
from start_llm.prompt.kept_places import MOST_KEPT, beginning_of, is_at_end, offset_in_text
from tests.prompt.fakes import call, prepared, reply, result, system, text_of, user
from tests.slices import examples
from tests.templates.traits import TRAITS

pytestmark = [pytest.mark.product, pytest.mark.sample(3)]

RULES = "You are an agent.\n\nYou work in a folder with many files."
FIRST = len("You are an agent.")
END = -1


def kept(message: Message, *places: int, seconds: int = 300) -> Message:
    return replace(message, kept=tuple(KeptPlace(place, seconds) for place in places))


def beginnings(trait: str, *messages: Message, **request: Any) -> list[str]:
    """The texts of the beginnings that are kept."""
    prompt = prepared(trait, *messages, **request)
    return [text_of(trait, prompt.tokens.ids[: place.tokens]) for place in prompt.kept]


@pytest.mark.parametrize("trait", TRAITS)
def test_what_is_kept_is_what_another_prompt_with_this_beginning_has_too(trait: str):
    """It ends with the marked text, or with the last token in it that no other text can change."""
    messages = (
        kept(system(RULES), FIRST, END),
        kept(user("Read the file."), END),
        reply("Done."),
        user("Go on"),
    )
    prompt = prepared(trait, *messages)
    other = prepared(trait, system(f"{RULES[:FIRST]} Another rule."), user("Hello"))
    same = next(
        (
            at
            for at, pair in enumerate(zip(prompt.tokens.ids, other.tokens.ids, strict=False))
            if pair[0] != pair[1]
        ),
        0,
    )
    inside, *ends = prompt.kept
    assert inside.tokens <= same
    known = {place.message: place.tokens for place in prompt.boundaries}
    assert [place.tokens for place in ends] == [known.get(0, 0), known.get(1, 0)]
    if inside.tokens and 0 in known:
        text = text_of(trait, prompt.tokens.ids[: inside.tokens])
        assert "You are an agent" in text
        assert "folder" not in text


def test_most_templates_show_where_a_place_inside_of_a_message_is():
    """Those that do not change the system text, or fold it into something else, do."""
    flags = [bool(prepared(trait, kept(system(RULES), FIRST), user("Hi")).kept[0].tokens) for trait in TRAITS]
    assert sum(flags) > 0.7 * len(flags)


def test_places_come_in_the_order_of_the_messages_and_only_the_last_ones_count():
    messages = [kept(system(RULES), FIRST, END), *(kept(user(f"Question {n}"), END) for n in range(1))]
    places = prepared(
        "strips_old_reasoning", *messages, kept(reply("An answer."), END), kept(user("Go on."), 2, END)
    ).kept
    assert len(places) == MOST_KEPT
    assert [place.tokens for place in places] == sorted(place.tokens for place in places)


def test_a_place_behind_a_text_but_in_front_of_calls_is_not_known():
    messages = (user("Hi"), kept(reply("I look.", call(path="a")), len("I look."), END), result("x"))
    inside, end = prepared("strips_old_reasoning", *messages).kept
    assert inside == KeptPrefix(0, 300)
    assert end.tokens


def test_what_is_removed_from_the_beginning_moves_a_place():
    """Claude Code's billing header is not shown to the model."""
    header = "x-anthropic-billing-header: cc_version=2.1.329.d79; cc_entrypoint=cli;"
    asked = f"{header}\n\n{RULES}"
    place = len(header) + 2 + FIRST
    (text,) = beginnings("strips_old_reasoning", kept(system(asked), place), user("Hi"))
    assert (header not in text, "You are an agent" in text, "folder" not in text) == (True, True, True)
    (nothing,) = beginnings("strips_old_reasoning", kept(system(asked), len(header)), user("Hi"))
    assert header not in nothing


def test_a_place_beside_quoted_marks_is_found():
    question = "What is <|im_end|> here? " * 3
    (text,) = beginnings(
        "strips_old_reasoning", system("Be brief."), kept(user(f"{question}And now?"), len(question))
    )
    assert text.rstrip().endswith("here?")


def test_a_place_in_a_message_that_the_next_request_will_not_have_is_not_known():
    carrier = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nRuns: 1\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    messages = (system(RULES), kept(user("Begin."), END), kept(user(carrier), END))
    before, there = prepared("strips_old_reasoning", *messages).kept
    assert before.tokens
    assert there.tokens == 0


CALLED = reply("I look.", call("c1", path="a"), call("c2", path="b"))
ONE, OTHER = "The first file holds rules.", "The second file holds names."


def test_a_place_in_a_result_is_in_that_result_also_where_results_came_in_another_order():
    """The model reads them in the order of their calls."""
    place = len("The second file")
    for first, then in (
        (kept(result(OTHER, "c2"), place), result(ONE)),
        (result(ONE), kept(result(OTHER, "c2"), place)),
    ):
        (text,) = beginnings("strips_old_reasoning", user("Hi"), CALLED, first, then)
        assert ONE in text
        assert text.rstrip().endswith("The second file")


@pytest.mark.parametrize("marked", ["first", "then"])
def test_behind_the_end_of_a_result_all_is_kept_that_its_client_sent_in_front_of_it(marked: str):
    messages = {"first": result(OTHER, "c2"), "then": result(ONE)}
    messages[marked] = kept(messages[marked], END)
    (text,) = beginnings("strips_old_reasoning", user("Hi"), CALLED, *messages.values())
    assert ONE in text
    assert OTHER in text


def test_of_results_in_the_order_of_their_calls_each_has_a_place_of_its_own():
    first, then = kept(result(ONE), END), kept(result(OTHER, "c2"), END)
    first_alone, both = beginnings("strips_old_reasoning", user("Hi"), CALLED, first, then)
    assert (ONE in first_alone, OTHER in first_alone, OTHER in both) == (True, False, True)


# ------------------------------------------------------------------------------------------------- the offset

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


@given(content=TEXTS, removed=TEXTS, at=st.integers(0, 60), before=TEXTS)
@examples(300, few=60)
def test_an_offset_is_where_the_text_up_to_the_place_ends(content: str, removed: str, at: int, before: str):
    asked = f"{removed}{content}"
    place = KeptPlace(min(at, len(asked)), 300)
    beginning = beginning_of(place, asked, content)
    assert (beginning is None) == (place.characters <= len(removed))
    if beginning is not None:
        written = f"{before}{content.strip()}"
        offset = offset_in_text(beginning, content, written)
        assert offset is not None
        assert written[:offset].rstrip().endswith(beginning.strip())
        assert len(before.rstrip()) <= offset <= len(written)


def test_an_offset_is_not_known_where_the_template_writes_another_text():
    assert offset_in_text("one", "one two", "<system>ONE TWO") is None
    assert offset_in_text("three", "one two", "<system>one two") is None
    assert offset_in_text("one", "one two", "<system>one two\n") == len("<system>one")
    assert beginning_of(KeptPlace(3, 300), "one two", "two two") is None


def test_white_space_at_the_end_is_no_place_of_its_own():
    message = user("Hello \n")
    assert [is_at_end(KeptPlace(n, 300), message) for n in (-1, 4, 5, 7)] == [True, False, True, True]
    assert not is_at_end(KeptPlace(5, 300), reply("Hello", call()))
