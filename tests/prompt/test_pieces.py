"""Text is tokenised in pieces that are remembered, and the ids are those of the whole text."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from start_llm.core.chat import ChatRequest, Message
from start_llm.prompt.pieces import PieceEncoder
from start_llm.prompt.prepare import Preparer
from tests.prompt.fakes import (
    FakeTokenizer,
    WatchedTokenizer,
    call,
    family_of,
    function,
    preparer_of,
    reply,
    result,
    system,
    text_of,
    user,
)
from tests.templates.traits import TRAITS, trait_tokenizer

TEXT = "<a>one<b>two<b>three<a>"
CUTS = [0, 6, 12, 20]
"""Before the added tokens."""


def watched() -> WatchedTokenizer:
    return WatchedTokenizer(FakeTokenizer("", ("<a>", "<b>")))


def test_the_pieces_have_the_ids_of_the_whole():
    tokenizer = watched()
    encoded = PieceEncoder(tokenizer).encode(TEXT, CUTS)
    assert list(encoded.ids) == tokenizer.encode(TEXT, as_document=False)
    assert encoded.cuts == (0, 4, 8, 14)


@pytest.mark.parametrize(("text", "cuts"), [("", []), ("one", []), ("<a>", [0]), ("one<a>", [3])])
def test_a_text_may_have_no_cut_or_one_at_its_beginning(text, cuts):
    tokenizer = watched()
    encoded = PieceEncoder(tokenizer).encode(text, cuts)
    assert list(encoded.ids) == tokenizer.encode(text, as_document=False)
    assert encoded.cuts == tuple(cuts)


def test_a_piece_goes_through_the_tokenizer_once():
    tokenizer = watched()
    encoder = PieceEncoder(tokenizer)
    first = encoder.encode(TEXT, CUTS)
    tokenizer.encoded.clear()
    assert encoder.encode(TEXT, CUTS) == first
    assert tokenizer.encoded == []
    encoder.encode(f"{TEXT}four<b>", [*CUTS, len(TEXT) + 4])
    assert tokenizer.encoded == ["<a>four", "<b>"]
    assert encoder.encoded_characters == len(TEXT) + len("<a>four<b>")


def test_a_cut_changes_what_is_remembered_and_nothing_else():
    encoder = PieceEncoder(watched())
    assert encoder.encode(TEXT, []).ids == encoder.encode(TEXT, CUTS).ids == encoder.encode(TEXT, [6]).ids


def test_what_is_remembered_is_bounded_and_the_latest_stays():
    tokenizer = watched()
    encoder = PieceEncoder(tokenizer, max_bytes=900)  # two short ones
    encoder.encode("one", [])
    encoder.encode("two", [])
    encoder.encode("one", [])
    encoder.encode("three", [])
    tokenizer.encoded.clear()
    encoder.encode("one", [])
    assert tokenizer.encoded == []
    encoder.encode("two", [])
    assert tokenizer.encoded == ["two"]
    assert held(encoder) == encoder._known.size <= 900


def held(encoder: PieceEncoder) -> int:
    return sum(known.nbytes for known in encoder._known._values.values())


def test_a_short_piece_counts_with_what_it_takes_to_remember_it():
    encoder = PieceEncoder(watched(), max_bytes=100_000)
    for number in range(2000):
        encoder.encode(f"{number}", [])
    assert 150 < len(encoder._known._values) < 500


def test_a_piece_that_is_larger_than_the_memory_is_not_kept():
    tokenizer = watched()
    encoder = PieceEncoder(tokenizer, max_bytes=900)
    long = "abcdefghi" * 100
    assert list(encoder.encode(long, []).ids) == [ord(char) for char in long]
    assert encoder._known.size == 0
    assert not encoder._known._values


def test_threads_get_the_ids_of_their_own_texts():
    tokenizer = watched()
    encoder = PieceEncoder(tokenizer, max_bytes=20_000)
    together = threading.Barrier(8)

    def encode(number: int) -> bool:
        together.wait(timeout=10)
        texts = [f"<a>{number * step % 11}<b>{step % 7}" for step in range(200)]
        return all(
            encoder.encode(text, [0, text.index("<b>")]).ids
            == tuple(tokenizer.encode(text, as_document=False))
            for text in texts
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(encode, range(8)))
    assert held(encoder) == encoder._known.size <= 20_000


# ----------------------------------------------------------------------------------- conversations that grow

TOOLS = (function("write", path={"type": "string"}),)
LINE = "The quick brown fox jumps over the lazy dog. " * 4


def agents_talk(steps: int) -> list[Message]:
    """A question, and a call with its result for each step."""
    talk = [system(f"system {LINE}"), user(f"question {LINE}")]
    for step in range(steps):
        made = call(f"c{step}", path=f"path {step} {LINE}")
        talk += [reply(f"text {step} {LINE}", made), result(f"result {step} {LINE}", f"c{step}")]
    return talk


READ_AGAIN = {"plain": len(LINE) + 100}
"""Characters: nothing but a reply has an end to cut at, so a result is read again with the next reply."""


@pytest.mark.sample(24)
@pytest.mark.parametrize("trait", TRAITS)
def test_a_conversation_that_grew_is_tokenised_where_it_grew(trait):
    tokenizer = WatchedTokenizer(trait_tokenizer(trait))
    preparer = Preparer(tokenizer, family_of(trait))
    lengths, seen = list[int](), list[int]()
    for steps in range(1, 20):
        tokenizer.rendered.clear()
        prompt = preparer.prepare(ChatRequest(messages=tuple(agents_talk(steps)), tools=TOOLS))
        lengths.append(len(text_of(trait, prompt.tokens.ids)))
        seen.append(preparer._pieces.encoded_characters)
    new = [later - earlier for earlier, later in pairwise(lengths)]
    tokenised = [later - earlier for earlier, later in pairwise(seen)]
    assert all(read <= text + READ_AGAIN.get(trait, 0) for text, read in zip(new, tokenised, strict=True))


@pytest.mark.parametrize("trait", TRAITS)
def test_a_request_that_comes_again_is_not_tokenised(trait):
    preparer = preparer_of(trait)
    request = ChatRequest(messages=tuple(agents_talk(3)), tools=TOOLS)
    first = preparer.prepare(request)
    before = preparer._pieces.encoded_characters
    assert preparer.prepare(request) == first
    assert preparer._pieces.encoded_characters == before


def test_threads_prepare_the_same_prompts():
    preparer = preparer_of("opens_reasoning")
    requests = [ChatRequest(messages=tuple(agents_talk(steps)), tools=TOOLS) for steps in range(4)]
    expected = [preparer.prepare(request) for request in requests]
    fresh = Preparer(trait_tokenizer("opens_reasoning"), family_of("opens_reasoning"))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fresh.prepare, requests * 4)) == expected * 4
