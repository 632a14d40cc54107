"""A restore from the disk tier that is under way, those that wait for it, and what came of it.

Owned by the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from start_llm.cache.disk.disk_reads import DiskRead, DiskWait

if TYPE_CHECKING:
    from start_llm.cache.buffers import Incoming
    from start_llm.cache.disk.disk_plan import DiskPlan
    from start_llm.cache.disk.shared_restore import RestoreWish
    from start_llm.cache.pages import SequenceCache


class FromDisk(NamedTuple):
    """A prompt's share from the disk: tokens, and the seconds that it waited for them."""

    tokens: int = 0
    seconds: float = 0.0

    def after(self, earlier: FromDisk) -> FromDisk:
        """Return what both have given together."""
        return FromDisk(self.tokens + earlier.tokens, self.seconds + earlier.seconds)


@dataclass(eq=False, slots=True, kw_only=True)
class DiskRestore(DiskWait):
    """A restore that is under way. Once it is over, its caches are kept, or their pages alone.

    If its prompt waits no longer, the buffers stay until the disk has answered. A prompt that comes to the
    front later still refers to it, so it refers to neither caches nor buffers once they are handed over.

    Attributes:
        wish: what is restored, which all ranks have alike.
        plan: the files; of a rank that follows those that it has.
        seq_cache, buffers: active, and its caches as what the disk thread fills. `hand_over` ends both.
        number: under which other ranks know it.
        got: what came of it; set with `is_over`.
        copying_s: seconds that the engine spent on it.
        joined: over with it: what others wait for that need the same files.
    """

    wish: RestoreWish
    plan: DiskPlan
    seq_cache: SequenceCache = field(repr=False)
    buffers: Incoming = field(repr=False)
    read: DiskRead
    began: float
    number: int = 0
    joined: list[JoinedRestore] = field(default_factory=list["JoinedRestore"])
    got: FromDisk = field(default_factory=FromDisk)
    copying_s: float = 0.0

    def give_up(self) -> None:
        """Note that its prompt waits no longer. It goes on as long as another one does."""
        self.is_given_up = True
        self.end_unless_awaited()

    def end_unless_awaited(self) -> None:
        if self.is_given_up and all(joiner.is_given_up for joiner in self.joined):
            self.end_reading()

    def end_reading(self) -> None:
        """Read no further. What was read is kept."""
        self.read.give_up()

    def hand_over(self) -> tuple[SequenceCache, Incoming]:
        """Return the caches and the buffers, once their read is over.

        The restore has them no longer: else they would take memory for as long as anybody refers to it.
        """
        seq_cache, buffers = self.seq_cache, self.buffers
        del self.seq_cache, self.buffers
        self.read.parts.clear()  # they refer to the buffers
        return seq_cache, buffers


@dataclass(eq=False, slots=True, kw_only=True)
class JoinedRestore(DiskWait):
    """Waits for a restore that another prompt has begun, which needs the same files."""

    restore: DiskRestore

    def give_up(self) -> None:
        """Note that its prompt waits no longer. The last one to wait ends the restore."""
        self.is_given_up = True
        self.restore.end_unless_awaited()
