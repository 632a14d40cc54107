"""Remember which prompt prefixes were ever computed, even if they have been evicted.

This tells how many tokens a prompt unavoidably costs, and why it cost more.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from start_llm.cache.pages import Page, page_key
from start_llm.core.common_beginning import common_length
from start_llm.core.thread_owners import ENGINE, owned_by

_MAX_BYTES = 16 * 2**20
"""With pages of 256 tokens, this is three and a half million tokens."""
_OVERHEAD_BYTES = 200
"""Bytes of a block beside its own: of the object, and of its places in a dictionary and in a list."""
_TOKEN_BYTES = 4


@owned_by(ENGINE)
class ComputedPrefixIndex:
    """The tokens that were computed after each page, as blocks of at most a page.

    A block is the key of the page before it and its tokens. The blocks are sorted, so the one with the most
    tokens in common with a prompt is beside the place where the prompt's own would be. No block is a prefix
    of another one. Beyond `max_bytes` the oldest are forgotten.

    Attributes:
        nbytes: bytes of memory, roughly.
    """

    def __init__(self, page_size: int, max_bytes: int = _MAX_BYTES) -> None:
        self._page_size = page_size
        self._max_bytes = max_bytes
        self.nbytes = 0
        self._by_age: dict[bytes, None] = {}
        self._sorted: list[bytes] = []

    def note_pages(self, pages: Iterable[Page]) -> None:
        """Record that these pages were computed."""
        for page in pages:
            if page.parent is not None:
                self._note(_block(page.parent.key, page.tokens))

    def note_tail(self, page: Page, tail: Sequence[int]) -> None:
        """Record that `tail`, less than a page, was computed after `page`."""
        if tail:
            self._note(_block(page.key, tail))

    def _note(self, block: bytes) -> None:
        place = bisect_left(self._sorted, block)
        if place < len(self._sorted) and self._sorted[place].startswith(block):
            block = self._sorted[place]
            del self._by_age[block]
        else:
            if place and block.startswith(self._sorted[place - 1]):
                place -= 1
                self._forget(place)
            self._sorted.insert(place, block)
            self.nbytes += len(block) + _OVERHEAD_BYTES
        self._by_age[block] = None
        while self.nbytes > self._max_bytes:
            self._forget(bisect_left(self._sorted, next(iter(self._by_age))))

    def _forget(self, place: int) -> None:
        block = self._sorted.pop(place)
        del self._by_age[block]
        self.nbytes -= len(block) + _OVERHEAD_BYTES

    def known(self, page: Page, ids: Sequence[int]) -> int:
        """Return how many tokens of `ids` were ever computed as the beginning of a prompt or of its reply.

        Args:
            page: a page whose prefix, itself included, matches `ids`; the search starts at its end.
        """
        end, key = page.end, page.key
        while rest := ids[end : end + self._page_size]:
            common = self._common(key, rest)
            end += common
            if common < self._page_size:
                break
            key = page_key(key, rest)
        return end

    def _common(self, key: bytes, tokens: Sequence[int]) -> int:
        """Return how many of these tokens were computed after the page with this key."""
        block = _block(key, tokens)
        place = bisect_left(self._sorted, block)
        beside = self._sorted[max(place - 1, 0) : place + 1]
        longest = max((common_length(block, known) for known in beside), default=0)
        return max(longest - len(key), 0) // _TOKEN_BYTES


def _block(key: bytes, tokens: Sequence[int]) -> bytes:
    return key + array("I", tokens).tobytes()
