"""What the index finds, beside a search through everything."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.engine.draft_index import MATCHES, Draft, DraftIndex

FEW = st.lists(st.integers(0, 3), max_size=60)


def search(tokens: list[int], most: int) -> Draft | None:
    """The longest class of match, and the latest place of it."""
    best: tuple[int, int] | None = None
    for place in range(1, len(tokens) - 1):
        lengths = [
            match
            for match, length in enumerate(MATCHES)
            if length <= place + 1 and tokens[place + 1 - length : place + 1] == tokens[-length:]
        ]
        if lengths and (best is None or lengths[-1] >= best[0]):
            best = lengths[-1], place
    if best is None:
        return None
    match, place = best
    followed = tokens[place + 1 : place + 1 + most]
    while len(followed) < most:
        followed.append(followed[place + 1 - len(tokens)])
    return Draft(tuple(followed), match)


@given(FEW, st.integers(1, 9))
def test_it_finds_what_a_search_finds_among_the_latest_places(tokens: list[int], most: int):
    draft, expected = DraftIndex(tokens).find(most), search(tokens, most)
    assert (draft is None) == (expected is None)
    if draft and expected and tokens.count(tokens[-1]) < 16:
        assert draft == expected


@given(FEW, FEW, st.integers(1, 9))
def test_another_sequence_finds_in_it_what_it_would_find_itself(before: list[int], now: list[int], most: int):
    """But for what it repeats of itself, and for the end, which nothing follows."""
    index = DraftIndex()
    index.add(before)
    draft = index.find_behind(DraftIndex(now).tail, most)
    places = [
        (match, place)
        for place in range(1, len(before) - 1)
        for match, length in enumerate(MATCHES)
        if length <= min(place + 1, len(now)) and before[place + 1 - length : place + 1] == now[-length:]
    ]
    if draft:
        match, place = max(places)
        assert draft.match == match
        if before.count(now[-1]) < 16:
            assert draft.tokens == tuple(before[place + 1 : place + 1 + most])
    elif len(before) < 16:
        ends = [length for length in MATCHES if len(now) >= length and before[-length:] == now[-length:]]
        assert not places or ends


@given(FEW, FEW)
def test_it_is_the_same_however_it_has_grown(first: list[int], later: list[int]):
    grown = DraftIndex(first)
    for token in later:
        grown.extend([token])
    assert grown.find(5) == DraftIndex([*first, *later]).find(5)

    assert len(grown) == len(first) + len(later)


@given(st.lists(st.integers(1, 400), max_size=12), st.integers(2, 9))
def test_it_is_the_same_in_whatever_pieces_it_has_grown(pieces: list[int], different: int):
    tokens = [place * place % different for place in range(sum(pieces))]
    grown, rest = DraftIndex(), tokens
    for piece in pieces:
        grown.extend(rest[:piece])
        rest = rest[piece:]
    assert grown.find(9) == DraftIndex(tokens).find(9)


def test_growing_beyond_its_heads_loses_nothing():
    chance = random.Random(2)
    tokens = [chance.randrange(40) for _ in range(5000)]
    grown, finds = DraftIndex(tokens[:900]), 0
    for at in range(900, len(tokens)):
        grown.extend([tokens[at]])
        if at % 97 == 0:
            whole = DraftIndex(tokens[: at + 1])
            assert grown.find(4) == whole.find(4)
            finds += 1
    assert finds > 40


def test_what_ends_the_sequence_goes_on_as_it_repeated_itself():
    draft = DraftIndex([7, 1, 2, 3, 1, 2, 3, 1, 2]).find(7)
    assert draft and draft.tokens == (3, 1, 2, 3, 1, 2, 3)


def test_other_texts_are_found_and_end_where_they_end():
    index = DraftIndex([1, 2, 3, 30, 31], texts=[[30, 31, 32, 33], [50, 51]])
    assert len(index) == 5
    assert index.find(6) == Draft((32, 33), 0)
    index.extend([50, 51])
    assert index.find(6) is None


def test_what_was_never_said_is_not_found():
    index = DraftIndex(range(2000))
    assert index.find(4) is None
    assert DraftIndex().find(4) is None


@pytest.mark.parametrize("tokens", [100_000, 131_072, 131_073])
def test_it_takes_at_most_twenty_bytes_a_token(tokens: int):
    chance = random.Random(1)
    index = DraftIndex([chance.randrange(150_000) for _ in range(tokens)])
    assert index.nbytes <= 20 * tokens


def test_a_lookup_is_fast_where_everything_is_alike():
    """The bound is twenty times what is usual, so that a busy machine does not break it."""
    index = DraftIndex([5] * 100_000)
    began = time.process_time()
    for _ in range(100):
        index.find(15)
    assert (time.process_time() - began) / 100 < 1e-3
