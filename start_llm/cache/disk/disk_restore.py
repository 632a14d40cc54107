"""Restore prompts from the disk tier.

The files of a prompt are read into the caches of a new sequence cache, which is idle when they are there.
From it the prompt is then opened like any other. Owned by the engine thread; the disk thread fills the
buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING

from start_llm.cache.buffers import Incoming
from start_llm.cache.disk.disk_plan import DiskPlan, PageChain, is_worth_it, may_be_worth_it, plan_from_disk
from start_llm.cache.disk.disk_reads import DiskRead, DiskWait, FilePart
from start_llm.cache.disk.disk_tier import DiskAccess
from start_llm.cache.disk.restore_pace import RestorePace
from start_llm.cache.disk.running_restore import DiskRestore, FromDisk, JoinedRestore
from start_llm.cache.disk.shared_restore import RestoreWish
from start_llm.cache.pages import Page, SequenceCache
from start_llm.cache.prompt_lookup import PromptMatch
from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.disk.disk_index import CachedFile
    from start_llm.cache.layers import Layers
    from start_llm.cache.restore import Restorer

_MOST_AHEAD_BYTES = 256 * 2**20
"""Of a prompt, that are read and not yet copied, where files are read beside the caches."""


@owned_by(ENGINE)
class DiskRestorer:
    """Begins restores, and completes them when their files are read.

    Args:
        clock: the engine's, in seconds.
        keep: stores a sequence cache that holds these tokens and that nobody uses.
        keep_pages: takes a sequence cache whose state is unknown; the tokens that it holds are right.
    """

    def __init__(
        self,
        access: DiskAccess,
        layers: Layers,
        restorer: Restorer,
        *,
        clock: Callable[[], float],
        keep: Callable[[SequenceCache, list[int]], None],
        keep_pages: Callable[[SequenceCache, list[int]], None],
    ) -> None:
        self._tier = access.tier
        self._peers = access.peers
        self._is_shared = access.is_shared
        self._clock = clock
        self._shape = access.shape
        self._is_in_place = access.is_in_place
        self._layers = layers
        self._restorer = restorer
        self._keep = keep
        self._keep_pages = keep_pages
        self._running: list[DiskRestore] = []
        self._pace = RestorePace()

    def begin(
        self,
        match: PromptMatch,
        salt: bytes,
        *,
        room: int,
        may_look: bool,
        speed: float,
        is_idle_work: bool = False,
    ) -> DiskWait | None:
        """Begin to restore what memory does not have of a prompt.

        Returns what the prompt has to wait for: a restore, or something after which to ask again. None if
        the disk has nothing for it.

        Args:
            salt: the prompt's.
            room: tokens that its caches can hold before they grow.
            may_look: headers of files may be read first.
            speed: tokens that are computed in a second.
            is_idle_work: nobody asked for it yet, so that neither files nor pages count as used.
        """
        tier, restorable = self._tier, match.plan.length
        if tier.is_hanging() or not tier.is_on or not may_be_worth_it(match.ids, restorable):
            return None
        if not tier.worker.scanned.is_over:
            return tier.worker.scanned
        plan = self._plan(match, may_look=may_look)
        if isinstance(plan, list):
            return tier.look(plan)
        if not is_worth_it(plan, restorable):
            return None
        saves = plan.length - restorable
        if self._pace.is_slower(sum(file.nbytes for file in plan.files), saves / speed):
            tier.metrics.computed_instead += 1
            for file in plan.files:
                file.is_passed_over = True
            return None
        wish = RestoreWish.of(plan, match.ids, salt, room, is_idle_work=is_idle_work)
        return self._join(plan, saves) or self._read(wish, plan, match.root, saves)

    def leave(self, wait: DiskWait) -> None:
        """Note that a prompt waits no longer. As long as the disk owes the answer, no other one waits.

        A restore for which another prompt still waits says nothing of the disk: it may take longer, and go
        well.
        """
        self._tier.metrics.late += 1
        wait.give_up()
        restore = wait.restore if isinstance(wait, JoinedRestore) else wait
        if not isinstance(restore, DiskRestore):
            self._tier.note_silence(restore)
        elif restore.read.is_given_up:
            # Of several ranks any may owe the answer; then the restore is over once all have answered.
            self._tier.note_silence(restore if self._peers.are_there else restore.read)

    def _join(self, plan: DiskPlan, saves: int) -> JoinedRestore | None:
        """Wait for a restore that reads the beginning of this plan, and not much else."""
        for restore in self._running:
            same = sum(mine is other for mine, other in zip(plan.files, restore.plan.files, strict=False))
            if not restore.read.is_given_up and 2 * same >= len(restore.plan.files):
                restore.joined.append(JoinedRestore(restore=restore, saves=saves))
                return restore.joined[-1]
        return None

    def length(self, match: PromptMatch) -> int:
        """Return how many tokens of a prompt memory and disk have, as far as is known without reading."""
        plan, restorable = self._plan(match, may_look=False), match.plan.length
        return plan.length if isinstance(plan, DiskPlan) and is_worth_it(plan, restorable) else restorable

    def depth(self, match: PromptMatch) -> int:
        """Return how many full pages of a prompt memory and disk have, as far as is known without reading.

        A state may be missing at their end. Of several ranks each has a disk of its own, and all have to
        stop at the same places, so there memory alone counts.
        """
        return len(match.matched) if self._is_shared else len(self._chain(match).keys) - 1

    def _chain(self, match: PromptMatch) -> PageChain:
        ids = match.ids[:-1]
        return PageChain.of(
            self._tier.index, match.root, match.matched, ids, self._restorer.store.tree.page_size
        )

    def _plan(self, match: PromptMatch, *, may_look: bool) -> DiskPlan | list[CachedFile]:
        return plan_from_disk(
            self._tier.index,
            self._chain(match),
            match.ids,
            has_state=self._layers.has_state,
            may_look=may_look,
        )

    def _read(self, wish: RestoreWish, plan: DiskPlan, root: Page, saves: int) -> DiskRestore:
        restore = self.prepare(wish, plan.path, root)
        restore.saves = saves
        self.read(restore, plan, root)
        restore.number = self._peers.begin_restore(wish, self._clock())
        self._running.append(restore)
        return restore

    def prepare(self, wish: RestoreWish, path: tuple[Page, ...], root: Page) -> DiskRestore:
        """Return a restore with its buffers, for which nothing is read yet.

        Args:
            path: the pages in memory.
            root: of its salt.
        """
        size = self._restorer.store.tree.page_size
        end = size * (wish.path + wish.pages)
        needed = max(end + len(wish.last), len(wish.ids))
        nothing, room = self._shape.nothing(), max(wish.room, needed)
        seq_cache = self._restorer.buffers(path, nothing, root, wish.ids, room)
        seq_cache.is_idle_work = wish.is_idle_work
        buffers = Incoming(self._layers, seq_cache.caches, is_in_place=self._is_in_place)
        plan, began = DiskPlan(len(wish.ids), path), time.perf_counter()
        return DiskRestore(
            wish=wish, plan=plan, seq_cache=seq_cache, buffers=buffers, read=DiskRead(), began=began
        )

    def read(self, restore: DiskRestore, plan: DiskPlan, root: Page) -> None:
        """Read the files of a restore.

        Args:
            plan: has the files: all that the wish takes, or the first of them.
        """
        restore.plan, buffers = plan, restore.buffers
        with self._restorer.store.rollback_on_error(restore.seq_cache):
            parts = list(self._parts(restore.wish, plan, root, buffers))
            most_ahead = _most_ahead(parts) if buffers.takes_early else None
            restore.read = DiskRead(is_over=not parts, parts=parts, most_ahead=most_ahead)
            if not restore.wish.is_idle_work:
                begin = plan.path[-1].end if plan.path else 0
                starts = accumulate((len(part.tokens) for part in parts), initial=begin)
                self._tier.touch(zip((part.file for part in parts), starts, strict=False))
        if parts:
            self._tier.read(restore.read)

    def _parts(self, wish: RestoreWish, plan: DiskPlan, root: Page, buffers: Incoming) -> Iterator[FilePart]:
        """Yield the files of a plan, with what they must say and where they are read to."""
        end, parent = (plan.path[-1].end, plan.path[-1].key) if plan.path else (0, root.key)
        size = self._restorer.store.tree.page_size
        for file in plan.pages:
            yield self._page_part(file, parent, wish.ids[end : end + size], end, buffers)
            parent, end = file.key, end + size
        if plan.last:
            yield self._page_part(plan.last, parent, wish.last, end, buffers)
        if plan.state:
            tokens, state = wish.ids[end:], [layout for _, layout in wish.state or ()]
            kv = self._shape.tensors(len(tokens))
            tail, rest = buffers.page(end, len(tokens)), buffers.state(state)
            layouts = (*kv.values(), *state)
            yield FilePart(plan.state, parent, tokens, layouts, lambda: [*tail(), *rest])

    def _page_part(
        self, file: CachedFile, parent: bytes, tokens: tuple[int, ...], start: int, buffers: Incoming
    ) -> FilePart:
        layouts = self._shape.page(start, len(tokens))
        is_packed = self._shape.is_packed(start)
        targets = buffers.packed_page(start, layouts) if is_packed else buffers.page(start, len(tokens))
        return FilePart(file, parent, tokens, tuple(layouts.values()), targets)

    def collect(self) -> None:
        """Take what is read, complete the restores whose files are read, and let go of what was written."""
        self._tier.release_written()
        with ExitStack() as each:  # even if another one raises
            for restore in reversed(self._running):
                each.callback(self._collect, restore)

    def _collect(self, restore: DiskRestore) -> None:
        if not restore.read.is_over:
            self.take(restore)
        elif (files := self._agreed(restore)) is not None:
            self._running.remove(restore)
            self._peers.end_restore(restore.number, files, self._clock())
            self._end(restore, files)

    def _agreed(self, restore: DiskRestore) -> int | None:
        """Return how many files of a restore all ranks have read; None if one still reads.

        What one of them lacks is worth nothing to the others: it goes, and is written again with it.
        """
        own = restore.read.done
        least = self._peers.least_restored(restore.number, own)
        if least is not None and least < own:
            self._tier.drop(restore.plan.files[least])
        return least

    def finish(self, patience_s: float) -> None:
        """Read no further, and complete every restore whose file is read in this time."""
        self.end_reading()
        self._tier.traffic.wait_until(
            lambda: all(restore.read.is_over for restore in self._running), patience_s
        )
        self.collect()

    def end_reading(self) -> None:
        """Read no further, for whomever it is, so that no read stays paused."""
        for restore in self._running:
            restore.end_reading()
            self._tier.take(restore.read, restore.read.taken)

    def take(self, restore: DiskRestore) -> None:
        """Copy what is read so far, where it is read beside the caches."""
        if restore.read.parts and restore.buffers.takes_early and not restore.is_over:
            self._take(restore)

    def _take(self, restore: DiskRestore) -> None:
        """Copy what is read so far. If that fails, the restore is over, and nothing of it is kept."""
        done, began = restore.read.done, time.perf_counter()
        with ExitStack() as failed, self._restorer.store.rollback_on_error(restore.seq_cache):
            failed.callback(self._abandon, restore, done)
            restore.buffers.take(done)
            failed.pop_all()
        restore.copying_s += time.perf_counter() - began
        self._tier.take(restore.read, done)

    def _abandon(self, restore: DiskRestore, done: int) -> None:
        """End a restore whose buffers stay until its read is over, so that this thread lets go of them."""
        restore.end_reading()
        self._tier.take(restore.read, done)
        self._tell_over(restore)

    def _tell_over(self, restore: DiskRestore) -> None:
        restore.is_over = True
        for joiner in restore.joined:
            joiner.is_over = True
        restore.joined.clear()  # each refers to the restore, and that to the caches

    def _end(self, restore: DiskRestore, files: int) -> None:
        if restore.is_over:
            restore.hand_over()  # to nobody
        else:
            self.complete(restore, files)

    def complete(self, restore: DiskRestore, files: int) -> None:
        """Keep what the first files of a restore have given."""
        plan, read = restore.plan, restore.read
        before = plan.path[-1].end if plan.path else 0
        done = [part.file for part in read.parts[:files]]
        read_tokens = sum(len(part.tokens) for part in read.parts[:files])
        length = min(before + read_tokens, plan.length)
        is_whole = files == restore.wish.files
        nbytes = sum(file.nbytes for file in done)
        seq_cache, buffers = restore.hand_over()
        self._tell_over(restore)
        tokens = list(restore.wish.ids[:length])
        with self._restorer.store.rollback_on_error(seq_cache):
            began = time.perf_counter()
            buffers.finish(files, length, restore.wish.counted_state if is_whole else ())
            restore.copying_s += time.perf_counter() - began
            if self._layers.has_state and not is_whole:
                self._keep_pages(seq_cache, tokens)
                return
            self._keep(seq_cache, tokens)
        self._note(restore, length - before, nbytes)

    def _note(self, restore: DiskRestore, tokens: int, nbytes: int) -> None:
        restore.got = FromDisk(tokens, time.perf_counter() - restore.began)
        self._pace.note(nbytes, restore.read.seconds + restore.copying_s)
        metrics = self._tier.metrics
        metrics.hits += tokens > 0
        metrics.restored_tokens += tokens
        metrics.restored_bytes += nbytes
        metrics.restored_s += restore.got.seconds


def _most_ahead(parts: Sequence[FilePart]) -> int:
    largest = max([1, *(sum(tensor.nbytes for tensor in part.tensors) for part in parts)])
    return max(2, _MOST_AHEAD_BYTES // largest)
