"""The text of a reply tells when its reasoning is open, however tokens cut it."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.engine_request import ReasoningLimit
from start_llm.core.events import Finished
from start_llm.engine.reasoning_budget import ReasoningBudget
from start_llm.engine.reply_writer import ReplyWriter
from tests.engine.harness import engine_request

CLOSING = (70, 71, 72)
END = 99


def limit(max_reasoning_tokens: int, **changes: Any) -> ReasoningLimit:
    plain = ReasoningLimit(
        max_reasoning_tokens=max_reasoning_tokens,
        starts_open=False,
        opening="<t>",
        closing="</t>",
        closing_tokens=CLOSING,
    )
    return replace(plain, **changes)


def closed_after(pieces: Sequence[str], reasoning: ReasoningLimit) -> list[int]:
    """The lengths of the reply, in tokens, at which the reasoning had to be closed."""
    watch = ReasoningBudget(reasoning)
    results = [(length, watch.feed(piece)) for length, piece in enumerate(pieces, 1)]
    assert all(tokens in ((), CLOSING) for _, tokens in results)
    return [length for length, tokens in results if tokens]


def test_reasoning_is_closed_when_it_has_had_its_tokens():
    assert closed_after(["<t>", "a", "b", "c", "d"], limit(3)) == [3]


def test_reasoning_that_the_prompt_opened_is_closed_too():
    assert closed_after(["a", "b", "c", "d"], limit(3, starts_open=True)) == [3]


def test_reasoning_may_be_closed_after_its_first_token():
    assert closed_after(["<t>", "a"], limit(1)) == [1]
    assert closed_after(["a", "b"], limit(1, starts_open=True)) == [1]


@pytest.mark.parametrize("length", [3, 4])
def test_reasoning_that_closes_itself_by_the_limit_is_left_alone(length):
    assert closed_after(["<t>", "a", "</t>", "b", "c"], limit(length)) == []


def test_reasoning_that_would_close_itself_one_token_later_is_closed():
    assert closed_after(["<t>", "a", "b", "</t>", "c"], limit(3)) == [3]


def test_half_a_closing_mark_closes_nothing():
    assert closed_after(["<t>", "a", "</", "t>"], limit(3)) == [3]


def test_a_reply_without_reasoning_is_left_alone():
    assert closed_after(["No", " <t>", " thought"], limit(1)) == []


def test_reasoning_that_opens_after_other_text_is_no_reasoning():
    assert closed_after(["Hm. ", "<t>", "a", "b"], limit(2)) == []


def test_space_before_reasoning_counts_as_tokens_of_the_reply():
    assert closed_after(["\n", " \n", "<t>", "a", "b", "c"], limit(5)) == [5]


def test_reasoning_that_opens_past_the_limit_is_closed_at_once():
    assert closed_after(["\n", "\n", "\n", "<", "t>", "a"], limit(2)) == [5]


def test_what_only_begins_like_the_opening_is_no_reasoning():
    assert closed_after(["<", "t", "able>", "a", "b"], limit(1)) == []


def test_tokens_without_text_count():
    assert closed_after(["<t>", "", "", "a"], limit(3)) == [3]


def test_a_second_reasoning_is_left_alone():
    assert closed_after(["<t>", "</t>", "<t>", "a", "b"], limit(3)) == []
    assert closed_after(["<t>", "a", "</t>", "<t>", "a", "b"], limit(2)) == [2]


def test_a_mark_inside_one_token_is_seen():
    assert closed_after(["\n<t>a", "b</t>c", "d"], limit(2)) == []
    assert closed_after(["<t></t>", "d"], limit(1)) == []


def test_one_text_may_be_the_mark_on_both_sides():
    assert closed_after(["**", "a", "b"], limit(2, opening="**", closing="**")) == [2]
    assert closed_after(["**", "*", "*", "b"], limit(3, opening="**", closing="**")) == []


def test_a_mark_may_begin_with_letters_that_are_not_its_own():
    assert closed_after(["<t>", "<", "<", "/t", ">", "a"], limit(5)) == []


def chunkings(text: str) -> Iterator[list[str]]:
    """Every way to cut `text` into pieces."""
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        places = [0, *(place for place, cut in enumerate(cuts, 1) if cut), len(text)]
        yield [text[start:end] for start, end in itertools.pairwise(places)]


def is_open(text: str, reasoning: ReasoningLimit) -> bool:
    """True if a reply that has come this far is in its reasoning, read from the whole of it."""
    if not reasoning.starts_open:
        if not text.lstrip().startswith(reasoning.opening):
            return False
        text = text.lstrip().removeprefix(reasoning.opening)
    return reasoning.closing not in text


def due(pieces: Sequence[str], reasoning: ReasoningLimit) -> list[int]:
    """The first length from the limit on at which the reasoning is open."""
    lengths = range(reasoning.max_reasoning_tokens, len(pieces) + 1)
    return [length for length in lengths if is_open("".join(pieces[:length]), reasoning)][:1]


@pytest.mark.parametrize("text", ["\n<t>ab", " <t>a</t>b", "<t><</t>", "<</t>a<t>", "< t>a</t>", "a</t><t>"])
@pytest.mark.parametrize("starts_open", [False, True])
def test_every_chunking_closes_where_the_whole_text_says(text, starts_open):
    for pieces in chunkings(text):
        for max_reasoning_tokens in range(1, len(pieces) + 1):
            reasoning = limit(max_reasoning_tokens, starts_open=starts_open)
            assert closed_after(pieces, reasoning) == due(pieces, reasoning), pieces


marks = st.text("<t/>", min_size=1, max_size=4)


@given(
    st.lists(st.text("<t/> a\n", max_size=4), min_size=1, max_size=12),
    marks,
    marks,
    st.booleans(),
    st.integers(1, 12),
)
def test_any_pieces_and_any_marks_close_where_the_whole_text_says(pieces, opening, closing, starts, most):
    reasoning = limit(most, opening=opening, closing=closing, starts_open=starts)
    assert closed_after(pieces, reasoning) == due(pieces, reasoning)


@pytest.mark.parametrize("piece", [" ", "a", "<"])
@pytest.mark.parametrize("starts_open", [False, True])
def test_a_long_reply_is_not_kept(piece, starts_open):
    watch = ReasoningBudget(limit(10_000, starts_open=starts_open))
    for _ in range(1000):
        watch.feed(piece)
        assert len(watch._tail) < len("</t>")


# ------------------------------------------------------------------------------------ inside the reply writer


def dictations(tokens: list[bytes | int], reasoning: ReasoningLimit, **options: Any) -> list[list[int]]:
    """Return the tokens forced after each token of a reply; a number is a token id without bytes."""
    names = {index: token for index, token in enumerate(tokens) if isinstance(token, bytes)}
    asked = engine_request((1, 2, 3), 100, reasoning=reasoning, **options)
    writer = ReplyWriter(asked, lambda token: names.get(token, b""), frozenset({END}))
    forced = []
    for index, token in enumerate(tokens):
        events = writer.feed(index if isinstance(token, bytes) else token)
        forced.append(list(writer.forced_tokens))
        writer.forced_tokens.clear()
        if events and isinstance(events[-1], Finished):
            break
    return forced


def test_a_reply_dictates_the_closing_tokens_once():
    assert dictations([b"<t>", b"a", b"b", b"c"], limit(2)) == [[], list(CLOSING), [], []]


def test_marks_are_read_from_characters_that_tokens_cut():
    fish = "🐟".encode()
    reasoning = limit(5, opening="🐟", closing="🐟🐟")
    assert (
        dictations([fish[:1], fish[1:], fish[:3], fish[3:] + fish[:2], fish[2:], b"a"], reasoning) == [[]] * 6
    )


def test_reasoning_is_not_closed_within_a_character():
    fish = "🐟".encode()
    assert dictations([b"a", fish[:1], fish[1:3], fish[3:], b"b"], limit(2, starts_open=True)) == [
        [], [], [], list(CLOSING), [],
    ]  # fmt: skip


def test_an_end_token_in_reasoning_ends_the_reply():
    assert dictations([b"<t>", b"a", END], limit(3)) == [[], [], []]


def test_a_reply_without_a_limit_dictates_nothing():
    writer = ReplyWriter(engine_request((1, 2, 3)), lambda token: b"<t>", frozenset())
    writer.feed(1)
    assert not writer.forced_tokens
