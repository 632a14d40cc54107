"""Find, among many sequences of tokens, those that begin like a prompt."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

from start_llm.core.common_beginning import common_length

type Tokens = tuple[int, ...]


class TailIndex[Item]:
    """Items in the order of their tails, which are the tokens that each has after one page.

    In this order the tails that have most in common with a prompt are neighbours of its place, so that a
    search costs the same among ten items and among thousands. An item stays in the place of the tail
    that it had when it was added, and is removed from there, though its tail may have changed meanwhile.

    Args:
        tail_of: returns the tail of an item.
    """

    def __init__(self, tail_of: Callable[[Item], Tokens]) -> None:
        self._tail_of = tail_of
        self._tails: list[Tokens] = []
        self._items: list[Item] = []
        self._added: dict[int, Tokens] = {}

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def append(self, item: Item) -> None:
        tail = self._tail_of(item)
        place = bisect_right(self._tails, tail)
        self._tails.insert(place, tail)
        self._items.insert(place, item)
        self._added[id(item)] = tail

    def remove(self, item: Item) -> None:
        place = bisect_left(self._tails, self._added.pop(id(item)))
        while self._items[place] is not item:
            place += 1
        del self._tails[place], self._items[place]

    def by_common_length(self, tokens: Tokens) -> Iterator[tuple[Item, int]]:
        """Yield items and how many tokens they have in common with the beginning of `tokens`, most first."""
        right = bisect_right(self._tails, tokens)
        left = right - 1
        while left >= 0 or right < len(self._tails):
            before, after = self._common(left, tokens), self._common(right, tokens)
            if before >= after:
                yield self._items[left], before
                left -= 1
            else:
                yield self._items[right], after
                right += 1

    def _common(self, place: int, tokens: Tokens) -> int:
        if not 0 <= place < len(self._tails):
            return -1
        tail = self._tails[place]
        return common_length(tail, tokens)

    def beginnings_of(self, tokens: Tokens) -> Iterator[Item]:
        """Yield the items whose tail `tokens` begins with, the longest tail first."""
        place = bisect_right(self._tails, tokens)
        while place:
            tail = self._tails[place - 1]
            length = self._common(place - 1, tokens)
            if length == len(tail):
                place -= 1
                yield self._items[place]
            else:
                tokens = tokens[:length]
                place = bisect_right(self._tails, tokens, hi=place)

    def beginning_with(self, tokens: Tokens) -> Iterator[Item]:
        """Yield the items whose tail begins with `tokens`, the shortest of equal ones first."""
        place = bisect_left(self._tails, tokens)
        while place < len(self._tails) and self._tails[place][: len(tokens)] == tokens:
            yield self._items[place]
            place += 1

    def equal_to(self, tokens: Tokens) -> list[Item]:
        """Return the items with this very tail."""
        return self._items[bisect_left(self._tails, tokens) : bisect_right(self._tails, tokens)]
