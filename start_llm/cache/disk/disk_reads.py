"""What prompts wait for of the disk tier. The disk thread reads; the engine thread follows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from start_llm.cache.buffers import Targets
    from start_llm.cache.disk.disk_index import CachedFile
    from start_llm.cache.disk.page_file import TensorLayout


@dataclass(slots=True)
class FilePart:
    """A file that is read for a prompt.

    Attributes:
        parent, tokens: what it must say of itself.
        tensors: the layouts that it must have.
        targets: returns the buffers for its tensors. Called on the disk thread.
    """

    file: CachedFile
    parent: bytes
    tokens: tuple[int, ...]
    tensors: tuple[TensorLayout, ...]
    targets: Callable[[], Targets]


@dataclass(eq=False, slots=True)
class DiskWait:
    """Something that a prompt waits for.

    Attributes:
        is_over: set by the disk thread; by the engine thread for a `DiskRestore` and those that joined it,
            and if the disk thread takes no more jobs.
        saves: tokens that it is to give beyond what memory has, if that is known.
        is_given_up: its prompt waits no longer; of a `DiskRead`, nobody does.
    """

    is_over: bool = False
    saves: int = 0
    is_given_up: bool = False

    def give_up(self) -> None:
        """Note that its prompt waits no longer."""
        self.is_given_up = True


@dataclass(eq=False, slots=True)
class DiskRead(DiskWait):
    """Files that are read one after the other, up to the first that cannot be used.

    Attributes:
        done: number of parts that were read and are right.
        taken: number of parts whose buffers are free again.
        most_ahead: parts that may be read without being taken, and the engine is notified of each; None: all
            of them, and it is notified at the end.
        seconds: spent on reading and checking.
    """

    parts: list[FilePart] = field(default_factory=list[FilePart])
    done: int = 0
    taken: int = 0
    most_ahead: int | None = None
    seconds: float = 0.0
    _is_paused: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pauses(self) -> bool:
        """Return whether no more may be read until something is taken. On the disk thread.

        What nobody waits for does not pause: it has to end.
        """
        with self._lock:
            is_full = self.most_ahead is not None and self.done - self.taken >= self.most_ahead
            self._is_paused = is_full and not self.is_given_up
            return self._is_paused

    def take(self, parts: int) -> bool:
        """Note how many parts are taken. Returns whether reading had paused, and has to go on now."""
        with self._lock:
            was_paused, self._is_paused, self.taken = self._is_paused, False, parts
            return was_paused
