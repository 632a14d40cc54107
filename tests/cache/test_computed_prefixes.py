"""It remembers what was computed, although nothing of it may be left."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from start_llm.cache.computed_prefixes import ComputedPrefixIndex
from start_llm.cache.pages import Page, PageTree
from start_llm.core.common_beginning import common_length
from tests.cache.fakes import run

SIZE = 4
TOKENS = st.lists(st.integers(1, 2), max_size=14)
SALTS = st.sampled_from([b"one", b"other"])


class Book:
    """A ledger, and a tree that gives it its pages."""

    def __init__(self, max_bytes: int = 10**6) -> None:
        self.computed_prefixes = ComputedPrefixIndex(SIZE, max_bytes)
        self.tree = PageTree(SIZE)

    def path(self, tokens: Sequence[int], salt: bytes = b"") -> list[Page]:
        """The root, and the full pages of these tokens."""
        path = [self.tree.root(salt)]
        for start in range(0, len(tokens) - SIZE + 1, SIZE):
            block = tuple(tokens[start : start + SIZE])
            path.append(self.tree.insert(path[-1], block, run(block, path[-1].end), 0))
        return path

    def note(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        """These tokens were computed."""
        _, *pages = path = self.path(tokens, salt)
        self.computed_prefixes.note_pages(pages)
        self.computed_prefixes.note_tail(path[-1], tokens[path[-1].end :])

    def known(self, ids: Sequence[int], *, salt: bytes = b"", pages: int = 0) -> int:
        """`pages`: so many of the first ones were found in the tree."""
        return self.computed_prefixes.known(self.path(ids, salt)[pages], ids)


@given(noted=st.lists(st.tuples(SALTS, TOKENS), max_size=8), asked=TOKENS, salt=SALTS, data=st.data())
def test_known_is_the_longest_prefix_that_was_noted_to_the_token(noted, asked, salt, data):
    book = Book()
    for other, tokens in noted:
        book.note(tokens, other)
    known = book.known(asked, salt=salt)
    assert known == max((common_length(asked, tokens) for other, tokens in noted if other == salt), default=0)
    pages = data.draw(st.integers(0, known // SIZE))
    assert book.known(asked, salt=salt, pages=pages) == known


@given(noted=st.lists(TOKENS, max_size=8), limit=st.integers(0, 2000))
def test_it_takes_no_more_memory_than_it_may_and_then_knows_less(noted, limit):
    book, whole = Book(limit), Book()
    for tokens in noted:
        book.note(tokens)
        whole.note(tokens)
        assert book.computed_prefixes.nbytes <= limit
    assert all(book.known(tokens) <= whole.known(tokens) for tokens in noted)


def test_a_prompt_that_grows_within_a_page_takes_the_place_of_its_beginning():
    book, once = Book(), Book()
    for length in (1, 3, 2):
        book.note(range(length))
    once.note(range(3))
    assert book.computed_prefixes.nbytes == once.computed_prefixes.nbytes > 0
    assert book.known(range(3)) == 3


def test_the_same_tokens_after_other_ones_are_not_known():
    book = Book()
    book.note([1, 1, 1, 1, 5, 5, 5, 5])
    assert book.known([2, 2, 2, 2, 5, 5, 5, 5]) == 0
    assert book.known([5, 5, 5, 5]) == 0


def test_what_was_found_in_the_tree_is_known_although_it_was_never_noted():
    book = Book()
    assert book.known(range(10), pages=2) == 8


def test_the_oldest_are_forgotten_and_what_is_noted_again_is_young():
    entry = Book()
    entry.note([0] * SIZE)
    book = Book(max_bytes=3 * entry.computed_prefixes.nbytes)
    first, second, third, fourth = ([n] * SIZE for n in range(4))
    for tokens in (first, second, third, first[:2], fourth):
        book.note(tokens)
    assert [book.known(entry) for entry in (first, second, third, fourth)] == [SIZE, 0, SIZE, SIZE]


def test_what_lies_after_something_forgotten_is_not_known():
    single = Book()
    single.note([0] * SIZE)
    book = Book(max_bytes=2 * single.computed_prefixes.nbytes)
    book.note(range(12))
    assert book.known(range(12)) == 0
    assert book.known(range(12), pages=1) == 12
