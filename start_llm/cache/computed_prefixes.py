"""Remember which prompt prefixes were ever computed, even if they have been evicted.

This tells how many tokens a prompt unavoidably costs, and why it cost more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from start_llm.cache.pages import Page, page_key

_MAX_KEYS = 32_000
"""About 4 MB. With pages of 256 tokens, this is eight million tokens."""


class ComputedPrefixIndex:
    """The keys of page ends and message ends. Beyond `max_keys` the oldest are forgotten."""

    def __init__(self, page_size: int, max_keys: int = _MAX_KEYS) -> None:
        self._page_size = page_size
        self._max_keys = max_keys
        self._keys: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def note_pages(self, pages: Iterable[Page]) -> None:
        """Record that these pages were computed."""
        for page in pages:
            self._note(page.key)

    def note_boundary(self, page: Page, tail: Sequence[int]) -> None:
        """Record that a message was computed that ends `tail` tokens after `page`."""
        if tail:
            self._note(page_key(page.key, tail))

    def _note(self, key: bytes) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._max_keys:
            del self._keys[next(iter(self._keys))]

    def known(self, page: Page, ids: Sequence[int], boundaries: Sequence[int]) -> int:
        """Return how many tokens of `ids` were ever computed, up to the end of a page or of a message.

        Args:
            page: a page whose prefix, itself included, matches `ids`; the search starts at its end.
        """
        end, key = page.end, page.key
        while end + self._page_size <= len(ids):
            next_key = page_key(key, ids[end : end + self._page_size])
            if next_key not in self._keys:
                break
            end, key = end + self._page_size, next_key
        near = [one for one in boundaries if end < one < end + self._page_size and one <= len(ids)]
        return max((one for one in near if page_key(key, ids[end:one]) in self._keys), default=end)
