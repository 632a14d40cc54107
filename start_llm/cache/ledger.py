"""Which beginnings of prompts were ever computed, whether or not anything is left of them.

So it can be said what a prompt had to cost, and why it cost more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from start_llm.cache.pages import Page, page_key

_MOST_KEYS = 32_000
"""About 4 MB. With pages of 256 tokens, eight million tokens."""


class Ledger:
    """Keys of ends of pages and of messages. Beyond `most_keys` the oldest are forgotten."""

    def __init__(self, page_size: int, most_keys: int = _MOST_KEYS) -> None:
        self._page_size = page_size
        self._most_keys = most_keys
        self._keys: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def note_pages(self, pages: Iterable[Page]) -> None:
        """Their tokens were computed."""
        for page in pages:
            self._note(page.key)

    def note_boundary(self, page: Page, tail: Sequence[int]) -> None:
        """A message ends `tail` behind `page`, and was computed."""
        if tail:
            self._note(page_key(page.key, tail))

    def _note(self, key: bytes) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._most_keys:
            del self._keys[next(iter(self._keys))]

    def known(self, page: Page, ids: Sequence[int], boundaries: Sequence[int]) -> int:
        """Tokens of `ids` that were computed before: up to the end of a page or of a message.

        Args:
            page: `ids` go along with it, and with all in front of it.
        """
        end, key = page.end, page.key
        while end + self._page_size <= len(ids):
            next_key = page_key(key, ids[end : end + self._page_size])
            if next_key not in self._keys:
                break
            end, key = end + self._page_size, next_key
        near = [one for one in boundaries if end < one < end + self._page_size and one <= len(ids)]
        return max((one for one in near if page_key(key, ids[end:one]) in self._keys), default=end)
