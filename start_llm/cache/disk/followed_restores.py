"""Restores that rank 0 has begun, on another rank: it reads its own files, and keeps what all have read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.disk.disk_restore import DiskRestorer
    from start_llm.cache.disk.disk_tier import DiskTier
    from start_llm.cache.disk.running_restore import DiskRestore
    from start_llm.cache.disk.shared_restore import RestoreWish
    from start_llm.cache.page_store import PageStore
    from start_llm.cache.pages import Page
    from start_llm.cache.prompt_lookup import PromptLookup


@owned_by(ENGINE)
class FollowedRestores:
    """Follows restores by the numbers that they have on rank 0."""

    def __init__(
        self, lookup: PromptLookup, restorer: DiskRestorer, store: PageStore, tier: DiskTier
    ) -> None:
        self._lookup = lookup
        self._restorer = restorer
        self._store = store
        self._tier = tier
        self._unread: dict[int, tuple[DiskRestore, Page]] = {}
        self._reading: dict[int, DiskRestore] = {}
        self._read: dict[int, DiskRestore] = {}

    def begin(self, number: int, wish: RestoreWish) -> None:
        """Make the buffers of a restore.

        Raises:
            ValueError: memory does not have the pages that it begins with.
        """
        root = self._lookup.root(wish.salt)
        path = tuple(self._store.tree.match(root, wish.ids[: wish.path * self._store.tree.page_size]))
        if len(path) != wish.path:
            raise ValueError(f"a restore begins with {wish.path} pages in memory, and {len(path)} are here")
        self._unread[number] = self._restorer.prepare(wish, path, root), root

    def go_on(self) -> dict[int, int]:
        """Read what can be read. Returns how many files of each restore have been read, once for each."""
        if self._tier.worker.scanned.is_over:
            for number, (restore, root) in self._unread.items():
                plan = restore.wish.plan(
                    self._tier.index, restore.plan.path, root, self._store.tree.page_size
                )
                self._restorer.read(restore, plan, root)
                self._reading[number] = restore
            self._unread.clear()
        for restore in self._reading.values():
            self._restorer.take(restore)
        over = [number for number, restore in self._reading.items() if restore.read.is_over]
        for number in over:
            self._read[number] = self._reading.pop(number)
        return {number: self._read[number].read.done for number in over}

    def complete(self, number: int, files: int) -> None:
        """Keep what the first files of a restore have given, of which this rank has read as many or more."""
        self._restorer.complete(self._read.pop(number), files)
