"""List the ends of conversations, and drop a conversation from its end back to what others need.

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
        yield from (state for state in self._store.checkpoints if not _leads_on(state, [state]))
        yield from (page for page in self._store.tree.pages() if page.has_nothing_after)

    def items(self, end: ConversationEnd, spare: Callable[[CacheItem], bool]) -> list[CacheItem]:
        """Return what ends with `end`, without what is needed elsewhere or what `spare` protects.

        The beginning comes first.
        """
        items, below = [end], end
        while True:
            page, behind = page_before(below), [below]
            for state in page.checkpoints.beginnings_of(_tail(below, page)):  # the longest comes first
                if spare(state) or _leads_on(state, [state, *behind]):
                    break
                behind.append(state)
            items += [state for state in behind if state is not below]
            if page.parent is None or spare(page) or any(item not in behind for item in _following(page, ())):
                return items[::-1]
            items.append(page)
            below = page

    def drop(self, end: ConversationEnd, spare: Callable[[CacheItem], bool]) -> None:
        """Drop a conversation back to what is needed elsewhere or what `spare` protects."""
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


def page_before(item: CacheItem) -> Page:
    """Return the page before an item, perhaps the root.

    Raises:
        ValueError: it is a root.
    """
    match item:
        case Page():
            if item.parent is None:
                raise ValueError("a root has nothing before it")
            return item.parent
        case Checkpoint():
            return item.page
        case SequenceCache():
            return item.end_page


def _tail(item: CacheItem, page: Page) -> tuple[int, ...]:
    """Return the tokens of an item after the page before it."""
    match item:
        case Page():
            return item.tokens
        case Checkpoint():
            return item.tail
        case SequenceCache():
            return page.tail_of(item)


def _following(page: Page, tail: tuple[int, ...]) -> Iterator[CacheItem]:
    """Yield the items that go on with these tokens after a page, or end with them."""
    yield from page.checkpoints.beginning_with(tail)
    yield from page.seq_caches.beginning_with(tail)
    yield from page.by_tokens.beginning_with(tail)


def _leads_on(state: Checkpoint, behind: list[CacheItem]) -> bool:
    """Return whether anything but these goes on from a state."""
    return any(item not in behind for item in _following(state.page, state.tail))
