"""Let requests wait for what only the disk has of their prompts, for as long as computing it takes, or 5 s.

So a disk that is slow or hangs costs a prompt at most as much time again as computing it, or a few seconds.
Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from start_llm.cache.disk.running_restore import DiskRestore, JoinedRestore
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.admission import planned_tokens

if TYPE_CHECKING:
    from start_llm.cache.disk.prompt_disk import PromptDisk
    from start_llm.engine.schedule import QueuedRequest
    from start_llm.telemetry.metrics import EngineMetrics

_MOST_WAITS, _MOST_LOOKS = 8, 3
"""How often the disk is asked for a request, and how often headers may be read for that."""
_LEAST_PATIENCE_S = 5.0
"""A disk that slept may need this long to answer."""
_LAST_FILE_S = 1.0
"""For the file that is being read when the patience ends, so that those before it are used."""


@owned_by(ENGINE)
class DiskWaits:
    """Begins, follows and ends the waits of requests for the disk.

    Args:
        clock: the engine's, in seconds.
    """

    def __init__(self, disk: PromptDisk, metrics: EngineMetrics, clock: Callable[[], float]) -> None:
        self._disk = disk
        self._metrics = metrics
        self._clock = clock

    def has_to_wait(self, first: QueuedRequest, speed: float) -> bool:
        """Begin to restore what only the disk has of a request, and return whether it has to wait for it.

        Args:
            speed: prefill speed in tokens per second.
        """
        if isinstance(first.wait, DiskRestore):
            first.from_disk, first.wait = first.wait.got.after(first.from_disk), None  # it counts once
        request = first.generation.request
        room = planned_tokens(request, first.tokens)
        while first.waits < _MOST_WAITS:
            first.waits += 1
            try:
                may_look = first.waits <= _MOST_LOOKS
                first.wait = self._disk.wait_for(
                    first.ids,
                    request.salt,
                    room,
                    speed=speed,
                    may_look=may_look,
                    is_idle_work=request.is_idle_work,
                )
            except Exception:  # noqa: BLE001 - whatever is wrong with the disk tier, the prompt can be computed
                self._metrics.failures += 1
                first.wait = None
            if first.wait is None:
                return False
            if first.is_restoring:  # the disk thread may end it at any time: this is decided once
                first.waits_until = self._clock() + max(first.wait.saves / speed, _LEAST_PATIENCE_S)
                return True
        return False

    def end_late(self, restoring: Sequence[QueuedRequest]) -> None:
        """Let those go on that have waited long enough."""
        now = self._clock()
        for queued in restoring:
            late_s = now - queued.waits_until
            if late_s > 0 and isinstance(queued.wait, DiskRestore | JoinedRestore):
                queued.wait.give_up()
                queued.waits = _MOST_WAITS
            if late_s > _LAST_FILE_S and queued.wait:
                self._disk.leave(queued.wait)
                queued.wait, queued.waits = None, _MOST_WAITS
