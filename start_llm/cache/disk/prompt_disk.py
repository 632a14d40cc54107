"""What the engine asks of the disk for one prompt cache, between two steps. Owned by the engine thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from start_llm.cache.disk.disk_restore import DiskRestorer
from start_llm.cache.disk.running_restore import DiskRestore
from start_llm.cache.disk.write_back import WriteBack
from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.disk.disk_reads import DiskWait
    from start_llm.cache.disk.followed_restores import FollowedRestores
    from start_llm.cache.prompt_lookup import PromptLookup
    from start_llm.telemetry.metrics import CacheMetrics


@owned_by(ENGINE)
class PromptDisk:
    """Restores prompts from the disk and writes pages behind. Without a tier it does nothing.

    Attributes:
        restorer, write_back: None until there is a tier.
        followed: restores that another rank has begun; None until there is a tier.
    """

    def __init__(self, lookup: PromptLookup, metrics: CacheMetrics) -> None:
        self.restorer: DiskRestorer | None = None
        self.write_back: WriteBack | None = None
        self.followed: FollowedRestores | None = None
        self._lookup = lookup
        self._metrics = metrics

    def wait_for(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        room: int,
        *,
        speed: float,
        may_look: bool = True,
        is_idle_work: bool = False,
    ) -> DiskWait | None:
        """Begin to restore from the disk what memory does not have of a prompt.

        Returns something that is over when the prompt can be opened, or asked for again; None if it can be
        opened now.

        Args:
            room: tokens that the caches should take without growing.
            speed: tokens that are computed in a second; nothing is restored that is computed faster.
            may_look: headers of files may be read first.
            is_idle_work: nobody asked for it yet, so that nothing counts as used.
        """
        if self.restorer is None:
            return None
        match = self._lookup.match(ids, salt)
        wait = self.restorer.begin(
            match, salt, room=room, may_look=may_look, speed=speed, is_idle_work=is_idle_work
        )
        self._metrics.cut_images += isinstance(wait, DiskRestore) and wait.plan.is_cut
        return wait

    def leave(self, wait: DiskWait) -> None:
        """Note that a prompt goes on without what it waited for. What comes of it later is kept."""
        if self.restorer:
            self.restorer.leave(wait)

    def collect(self) -> None:
        """Complete the restores whose files have been read."""
        if self.restorer:
            self.restorer.collect()

    def end_reading(self) -> None:
        """Read no further, for whomever it is: nobody will take it. `flush` keeps what was read."""
        if self.restorer:
            self.restorer.end_reading()

    def write_due(self, *, is_busy: bool) -> None:
        """Hand pages and states that are due to the disk thread. Called in every step.

        Args:
            is_busy: requests are running; then little of the time is spent on this.
        """
        if self.write_back:
            self.write_back.offer(is_busy=is_busy)

    def flush(self, patience_s: float) -> None:
        """End restores and write everything that is not on the disk yet, within `patience_s` seconds."""
        end = time.perf_counter() + patience_s
        try:
            if self.restorer:
                self.restorer.finish(patience_s)
        finally:
            if self.write_back:
                self.write_back.flush(end - time.perf_counter())

    def seconds_until_due(self) -> float | None:
        """Return the seconds after which `write_due` should be called even if nothing else happens."""
        return self.write_back.seconds_until_due() if self.write_back else None
