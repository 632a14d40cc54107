"""Find and drop conversations: what leads to an end, back to the first page that is needed elsewhere.

Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import CacheItem, Checkpoint, ConversationEnd, Page, SequenceCache
from start_llm.core.thread_owners import ENGINE, owned_by


@owned_by(ENGINE)
class Conversations:
    """The conversations in a store."""

    def __init__(self, store: PageStore) -> None:
        self._store = store

    def ends(self) -> Iterator[ConversationEnd]:
        """Yield the ends of all conversations."""
        yield from (seq_cache for seq_cache in self._store.seq_caches if not seq_cache.is_active)
        yield from (page for page in self._store.tree.pages() if not page.children and not page.seq_caches)

    def items(self, end: ConversationEnd, spare: Callable[[Page], bool]) -> list[CacheItem]:
        """Return what ends with `end`, without what is needed elsewhere or what `spare` protects.

        The beginning comes first.
        """
        items: list[CacheItem] = [end] if isinstance(end, SequenceCache) else []
        below, page = end, end.end_page if isinstance(end, SequenceCache) else end
        while page.parent is not None and _has_only(page, below) and not spare(page):
            items += [*page.checkpoints, page]
            below, page = page, page.parent
        return items[::-1]

    def drop(self, end: ConversationEnd, spare: Callable[[Page], bool]) -> None:
        """Drop a conversation back to the first page that is needed elsewhere or that `spare` protects."""
        for item in reversed(self.items(end, spare)):
            match item:
                case SequenceCache():
                    self._store.forget(item)
                case Checkpoint():
                    self._store.checkpoints.drop(item)
                case Page():
                    if self._store.tree.has(item):
                        self._store.tree.remove(item)
        if isinstance(end, SequenceCache):
            self._store.give_up(end)


def _has_only(page: Page, below: ConversationEnd) -> bool:
    """Return whether nothing but this is after a page, besides checkpoints."""
    return all(child is below for child in (*page.children.values(), *page.seq_caches))
