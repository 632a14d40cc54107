"""What clients ask to keep, and how much of the cache: a share for each key, and one for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from start_llm.cache.pages import Checkpoint, Page, PageRun

if TYPE_CHECKING:
    from start_llm.cache.page_store import PageStore
    from start_llm.cache.pages import SequenceCache

_SHARE_OF_A_KEY, _SHARE_OF_ALL = 0.25, 0.5
"""Of the budget. More than two keys have equal parts of the second one."""


def note_kept(seq_cache: SequenceCache) -> None:
    """Note on a sequence's pages and checkpoints until when they are to stay, as far as its tokens reach."""
    for tokens, until in seq_cache.kept:
        if tokens > len(seq_cache.tokens):
            continue
        before = seq_cache.root
        for page in seq_cache.path:
            if page.start < tokens:
                page.kept_until = max(page.kept_until, until)
            if page.end <= tokens:
                before = page
        for checkpoint in before.checkpoints.equal_to(tuple(seq_cache.tokens[before.end : tokens])):
            checkpoint.kept_until = max(checkpoint.kept_until, until)


def beyond_their_share(
    store: PageStore, budget_bytes: float, checkpoint_bytes: float, now: float
) -> set[Page | Checkpoint]:
    """Return what clients ask to keep beyond what their keys may: what was not used for the longest time.

    What follows a page that is beyond it is so too.

    Args:
        budget_bytes, checkpoint_bytes: limits of everything that is kept, and of states.
        now: seconds on the cache's clock.
    """
    asked = [_asked_below(root, now) for root in store.tree.roots()]
    asked = [(pages, checkpoints) for pages, checkpoints in asked if pages or checkpoints]
    share = min(_SHARE_OF_A_KEY, _SHARE_OF_ALL / max(len(asked), 1))
    beyond = set[Page | Checkpoint]()
    for pages, checkpoints in asked:
        beyond |= _beyond(_as_used(pages), share * budget_bytes, lambda page: _bytes_of(page, store))
        states = sorted(checkpoints, key=lambda kept: (-kept.last_used, kept.position))
        beyond |= _beyond(states, share * checkpoint_bytes, lambda kept: kept.state.nbytes)
    return beyond


def _bytes_of(page: Page, store: PageStore) -> int:
    """Return the bytes that a page takes where it is: in a run it may be quantised."""
    if isinstance(page.holder, PageRun):
        return page.holder.stored.bytes_of(page.start, page.end)
    return len(page.tokens) * store.token_bytes


def _asked_below(root: Page, now: float) -> tuple[list[Page], list[Checkpoint]]:
    pages = [root, *root.below()]
    checkpoints = (checkpoint for page in pages for checkpoint in page.checkpoints)
    return (
        [page for page in pages if page.kept_until > now],
        [checkpoint for checkpoint in checkpoints if checkpoint.kept_until > now],
    )


def _as_used(pages: Iterable[Page]) -> list[Page]:
    """Return pages, those that were used last first. A page is as old as the youngest one after it, and is
    never without those before it.
    """
    used = {page: page.last_used for page in pages}
    for page in sorted(used, key=lambda page: -page.end):
        if page.parent in used:
            used[page.parent] = max(used[page.parent], used[page])
    return sorted(used, key=lambda page: (-used[page], page.end))


def _beyond[T: (Page, Checkpoint)](items: Iterable[T], most: float, bytes_of: Callable[[T], int]) -> set[T]:
    """Return what does not fit into `most` bytes together with all before it."""
    beyond = set[T]()
    total = 0
    for item in items:
        total += bytes_of(item)
        if total > most:
            beyond.add(item)
    return beyond
