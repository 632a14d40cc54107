"""Tokens become the events of one reply, and the reply ends where it should."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import Event, Finished, ScoredToken, Text, TokenLogprobs, Usage
from start_llm.engine.reply_writer import ReplyWriter
from tests.engine.harness import engine_request

END = 99
PROMPT = (1, 2, 3)


@dataclass
class ReplyEvents:
    """The events of one reply, added up."""

    events: list[Event]

    @property
    def pieces(self) -> list[Text]:
        return [event for event in self.events if isinstance(event, Text)]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def scored(self) -> list[int]:
        """Tokens whose log-probability was reported."""
        return [entry.chosen.token for piece in self.pieces for entry in piece.logprobs]

    @property
    def end(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last


def score(token: int) -> TokenLogprobs:
    return TokenLogprobs(ScoredToken(token, -1.0), ())


def write(tokens: list[bytes | int], max_tokens: int = 100, **options) -> ReplyEvents:
    """A reply of these tokens; a number is a token id without bytes. Nothing is fed after the end."""
    names = {index: token for index, token in enumerate(tokens) if isinstance(token, bytes)}
    writer = ReplyWriter(
        engine_request(PROMPT, max_tokens, **options), lambda token: names.get(token, b""), frozenset({END})
    )
    events: list[Event] = []
    for index, token in enumerate(tokens):
        number = index if isinstance(token, bytes) else token
        events += writer.feed(number, score(number))
        if isinstance(events[-1] if events else None, Finished):
            break
    return ReplyEvents(events)


def usage(completion: int) -> Usage:
    return Usage(prompt=len(PROMPT), cached=0, completion=completion)


def test_an_end_token_ends_the_reply_and_counts_but_adds_no_text():
    reply = write([b"Hello", b" you", END])
    assert reply.text == "Hello you"
    assert reply.tokens == [0, 1, END]
    assert reply.end == Finished("stop", usage(3))


def test_the_limit_ends_the_reply():
    reply = write([b"a", b"b", b"c"], max_tokens=2)
    assert (reply.text, reply.tokens, reply.end) == ("ab", [0, 1], Finished("length", usage(2)))


def test_an_end_token_at_the_limit_is_a_stop():
    assert write([b"a", END], max_tokens=2).end.reason == "stop"


def test_a_limit_in_the_middle_of_a_character_tells_a_replacement_character():
    fish = "🐟".encode()
    reply = write([b"a", fish[:2], fish[2:]], max_tokens=2)
    assert (reply.text, reply.end.reason, reply.tokens) == ("a\ufffd", "length", [0, 1])


def test_an_end_token_in_the_middle_of_a_character_tells_a_replacement_character():
    assert write([b"a", "é".encode()[:1], END]).text == "a\ufffd"


def test_tokens_wait_for_the_text_they_belong_to():
    fish = "🐟".encode()
    reply = write([b"a", fish[:2], fish[2:], END])
    assert [(piece.text, piece.tokens) for piece in reply.pieces] == [
        ("a", (0,)),
        ("🐟", (1, 2)),
        ("", (END,)),
    ]


def test_logprobs_are_those_of_the_text_and_not_of_the_end_token():
    reply = write([b"a", b"b", END], top_logprobs=0)
    assert reply.scored == [0, 1]


def test_the_leading_space_of_a_sentencepiece_text_is_dropped():
    assert write([b" Hello", b" you", END], trims_leading_space=True).text == "Hello you"


def test_a_first_end_token_makes_an_empty_reply():
    reply = write([END])
    assert (reply.text, reply.tokens, reply.end) == ("", [END], Finished("stop", usage(1)))


def test_a_prompt_that_is_cut_before_its_reply_says_nothing():
    """A text would say that the prompt is read (lesson 345)."""
    (end,) = ReplyWriter(engine_request(PROMPT, 9), lambda _: b"", frozenset({END})).cut()
    assert end == Finished("length", usage(0), cut_by="deadline")


def test_no_event_follows_the_end_and_no_piece_is_empty_before_it():
    reply = write([b"", b"a", b"", b"b", END])
    assert [type(event) for event in reply.events] == [Text, Text, Text, Finished]
    assert [piece.text for piece in reply.pieces] == ["a", "b", ""]


letters = st.lists(st.sampled_from([b"a", b"b", b"ab", "é".encode(), b"\xc3", b"\xa9", b""]), max_size=20)


@given(letters)
def test_any_chunking_of_the_bytes_gives_the_same_reply(tokens):
    data = b"".join(tokens)
    one_by_one = write([*(bytes([byte]) for byte in data), END])
    assert write([*tokens, END]).text == write([data, END]).text == one_by_one.text


@given(letters, st.integers(1, 25))
def test_nothing_is_lost_and_nothing_doubled(tokens, limit):
    reply = write([*tokens, END], max_tokens=limit, top_logprobs=0)
    fed = [*range(len(tokens)), END][: reply.end.usage.completion]
    assert reply.tokens == fed
    assert reply.text == b"".join(tokens[: len(fed)]).decode(errors="replace")
    assert reply.scored == [token for token in fed if token != END]


@given(letters, st.integers(1, 25))
def test_the_end_is_reported_once_and_within_the_limit(tokens, limit):
    reply = write([*tokens, END], max_tokens=limit)
    assert [event for event in reply.events if isinstance(event, Finished)] == [reply.end]
    assert reply.end.usage == usage(len(reply.tokens))
    assert len(reply.tokens) <= limit


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_reply_of_exactly_the_limit_has_all_its_text(limit):
    assert write([b"x"] * 5, max_tokens=limit).text == "x" * limit
