"""It remembers what was computed, although nothing of it may be left."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from start_llm.cache.computed_prefixes import ComputedPrefixIndex
from start_llm.cache.pages import Page, PageTree
from tests.cache.fakes import run

SIZE = 4
TOKENS = st.lists(st.integers(1, 2), max_size=14)
SALTS = st.sampled_from([b"one", b"other"])


class Book:
    """A ledger, and a tree that gives it its pages."""

    def __init__(self, max_keys: int = 1000) -> None:
        self.computed_prefixes = ComputedPrefixIndex(SIZE, max_keys)
        self.tree = PageTree(SIZE)

    def path(self, tokens: Sequence[int], salt: bytes = b"") -> list[Page]:
        """The root, and the full pages of these tokens."""
        path = [self.tree.root(salt)]
        for start in range(0, len(tokens) - SIZE + 1, SIZE):
            block = tuple(tokens[start : start + SIZE])
            path.append(self.tree.insert(path[-1], block, run(block, path[-1].end), 0))
        return path

    def note(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        """A message ends here, and was computed with all before it."""
        _, *pages = path = self.path(tokens, salt)
        self.computed_prefixes.note_pages(pages)
        self.computed_prefixes.note_boundary(path[-1], tokens[path[-1].end :])

    def known(self, ids: Sequence[int], *boundaries: int, salt: bytes = b"", pages: int = 0) -> int:
        """`pages`: so many of the first ones were found in the tree."""
        return self.computed_prefixes.known(self.path(ids, salt)[pages], ids, boundaries)


@given(
    noted=st.lists(st.tuples(SALTS, TOKENS), max_size=5),
    asked=TOKENS,
    salt=SALTS,
    boundaries=st.sets(st.integers(0, 20)),
    data=st.data(),
)
def test_known_is_up_to_the_last_end_of_a_page_or_of_a_message_that_was_noted(
    noted, asked, salt, boundaries, data
):
    book = Book()
    ends = {0}
    for other, tokens in noted:
        book.note(tokens, other)
        if other == salt:
            pages = range(SIZE, len(tokens) + 1, SIZE)
            ends |= {end for end in pages if tokens[:end] == asked[:end]}
            ends |= {len(tokens)} & boundaries if tokens == asked[: len(tokens)] else set()
    sorted_ends = sorted(boundaries)
    known = book.known(asked, *sorted_ends, salt=salt)
    assert known == max(ends)
    found = data.draw(st.integers(0, known // SIZE))
    assert book.known(asked, *sorted_ends, salt=salt, pages=found) == known


def test_the_end_of_a_message_is_known_only_where_the_prompt_has_one_too():
    book = Book()
    book.note(range(10))
    assert book.known(range(20), 10) == 10
    assert book.known(range(20), 9, 11) == 8
    assert book.known(range(20)) == 8
    book.note(range(11))
    assert book.known(range(20), 10, 11) == 11


def test_the_same_tokens_after_other_ones_are_not_known():
    book = Book()
    book.note([1, 1, 1, 1, 5, 5, 5, 5])
    assert book.known([2, 2, 2, 2, 5, 5, 5, 5]) == 0
    assert book.known([5, 5, 5, 5]) == 0


def test_what_was_found_in_the_tree_is_known_although_it_was_never_noted():
    book = Book()
    assert book.known(range(10), pages=2) == 8


def test_the_oldest_are_forgotten_and_what_is_noted_again_is_young():
    book = Book(max_keys=3)
    first, second, third, fourth = ([n] * SIZE for n in range(4))
    for tokens in (first, second, third, first, fourth):
        book.note(tokens)
        assert len(book.computed_prefixes) <= 3
    assert [book.known(one) for one in (first, second, third, fourth)] == [SIZE, 0, SIZE, SIZE]


def test_what_lies_after_something_forgotten_is_not_known():
    book = Book(max_keys=2)
    book.note(range(12))
    assert book.known(range(12)) == 0
    assert book.known(range(12), pages=1) == 12
