"""A restore that several ranks do alike, each of its own files, and what they agree on (ADR 26).

Keys of files name the rank, so ranks tell each other tokens and numbers of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from start_llm.cache.disk.disk_plan import DiskPlan
from start_llm.cache.disk.page_file import TensorLayout
from start_llm.cache.pages import Page, page_key

if TYPE_CHECKING:
    from start_llm.cache.disk.disk_index import CachedFile, DiskIndex, FileName

type StateTensors = tuple[tuple[str, TensorLayout], ...]
"""Names and layouts, in the order of their data."""


@dataclass(frozen=True, slots=True)
class RestoreWish:
    """What is restored of a prompt.

    Attributes:
        ids: the tokens that it gives.
        salt: of the prompt.
        path: number of full pages in memory that the caches begin with.
        pages: number of full pages after them, of which each is a file.
        last: tokens of a page after these, a file too, whose beginning is what follows in the prompt; ()
            for none.
        state: the tensors of the state at the end, whose file has the tokens since the last full page as
            well; None for none.
        numbers: of that state; see `page_file.FileHeader`.
        room: tokens that the caches can hold before they grow.
        is_idle_work: nobody asked for it yet.
    """

    ids: tuple[int, ...]
    salt: bytes
    path: int
    pages: int
    last: tuple[int, ...]
    state: StateTensors | None
    numbers: tuple[tuple[int, ...], ...]
    room: int
    is_idle_work: bool

    @classmethod
    def of(
        cls, plan: DiskPlan, ids: tuple[int, ...], salt: bytes, room: int, *, is_idle_work: bool
    ) -> RestoreWish:
        """Return the wish that a plan fulfils. Headers of its last file and of its state are known."""
        last = plan.last.header if plan.last else None
        state = plan.state.header if plan.state else None
        return cls(
            ids=ids[: plan.length],
            salt=salt,
            path=len(plan.path),
            pages=len(plan.pages),
            last=last.tokens if last else (),
            state=tuple((name, form) for name, form in state.tensors.items() if name.startswith("state."))
            if state
            else None,
            numbers=state.numbers if state else (),
            room=room,
            is_idle_work=is_idle_work,
        )

    @property
    def files(self) -> int:
        """How many files it takes."""
        return self.pages + bool(self.last) + (self.state is not None)

    @property
    def counted_state(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """For each non-trimmable leaf the number of its arrays and its numbers."""
        names = [name for name, _ in self.state or ()]
        return tuple(
            (sum(name.startswith(f"state.{leaf}.") for name in names), numbers)
            for leaf, numbers in enumerate(self.numbers)
        )

    def plan(self, index: DiskIndex, path: tuple[Page, ...], root: Page, page_size: int) -> DiskPlan:
        """Return the files that a rank has of it, up to the first that it lacks."""
        files: list[CachedFile] = []
        for name in self._names(path[-1].key if path else root.key, page_size):
            file = index.get(*name)
            if file is None:
                break
            files.append(file)
        pages, rest = tuple(files[: self.pages]), files[self.pages :]
        last = rest.pop(0) if rest and self.last else None
        return DiskPlan(len(self.ids), path, pages, last, rest[0] if rest else None)

    def _names(self, key: bytes, page_size: int) -> Iterator[FileName]:
        end = self.path * page_size
        for _ in range(self.pages):
            key = page_key(key, self.ids[end : end + page_size])
            end += page_size
            yield "pages", key
        if self.last:
            yield "pages", page_key(key, self.last)
        if self.state is not None:
            yield "states", page_key(key, self.ids[end:])


class RestorePeers:
    """The ranks that restore what this one does. All of them keep what the one with the fewest files has.

    This class says what holds where there are none.

    Attributes:
        are_there: there are some.
    """

    are_there = False

    def begin_restore(self, wish: RestoreWish, at: float) -> int:
        """Let them begin, and return the number of the restore.

        Args:
            at: the plan's time.
        """
        del wish, at
        return 0

    def least_restored(self, number: int, own: int) -> int | None:
        """Return how many files all of them have read; None if one still reads.

        Args:
            own: files that were read here.
        """
        del number
        return own

    def end_restore(self, number: int, files: int, at: float) -> None:
        """Let them keep what the first `files` files have given."""
