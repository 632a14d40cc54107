"""The texts of a tenant's earlier conversations, in which drafts of its replies are searched too."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.draft_index import EARLIER, MATCHES, Draft, DraftIndex

_TENANTS = 8
_MOST_TOKENS = 2**17
"""Tokens of one tenant."""
_TOKEN_BYTES = 12
EARLIER_BYTES = _TENANTS * _MOST_TOKENS * _TOKEN_BYTES
"""The most memory that all of it takes."""


@owned_by(ENGINE)
class EarlierTexts:
    """The latest prompts and replies of each tenant, in an index of its own.

    How often drafts are right reveals what a text contains. So the texts of one tenant are never searched
    for another, and neither are texts under other adapters, which have another salt.

    The least recently used tenant goes first. A tenant with more text than there is room for loses the older
    half, once in so many tokens: that takes milliseconds, and adding a text 0.1 ms for a thousand tokens.
    """

    def __init__(self) -> None:
        self._indexes: OrderedDict[bytes, DraftIndex] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self._indexes.values())

    def add(self, salt: bytes, text: Sequence[int]) -> None:
        """Add the text of a conversation. Of a text that is too long, its end is kept."""
        kept = _MOST_TOKENS // 2
        index = self._indexes.pop(salt, None) or DraftIndex()
        text = text[1 - kept :]
        if len(index) + len(text) + 1 > _MOST_TOKENS:
            index = index.latest(kept)
        index.add(text)
        self._indexes[salt] = index
        if len(self._indexes) > _TENANTS:
            self._indexes.popitem(last=False)

    def find(self, salt: bytes, tail: array[int], most: int) -> Draft | None:
        """Return up to `most` tokens that followed the longest match with the last tokens of a reply.

        Args:
            salt: its tenant's.
        """
        index = self._indexes.get(salt)
        return index.find_behind(tail, most) if index else None

    def find_longest(self, salt: bytes, own: DraftIndex, most: int) -> Draft | None:
        """Return what followed the longest match in a sequence itself, or here if that one is longer."""
        draft = own.find(most)
        if draft and draft.match + 1 == len(MATCHES):
            return draft
        earlier = self.find(salt, own.tail, most)
        if earlier is None or (draft and draft.match >= earlier.match):
            return draft
        return Draft(earlier.tokens, EARLIER + earlier.match)
