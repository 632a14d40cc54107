"""Rank 0's side: sends what is decided here to the other ranks, and notices when one of them is gone."""

import itertools
import threading
from collections.abc import Callable, Sequence

from start_llm.cache.disk.shared_restore import RestoreWish
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.followers import ExecutorState, Followers
from start_llm.engine.generation import Generation
from start_llm.engine.step_plan import StepPart
from start_llm.models.rank_group import RankGroup
from start_llm.ranks.links import Link, LinkClosed
from start_llm.ranks.wire import (
    Message,
    SentBudget,
    SentEnd,
    SentFlush,
    SentPart,
    SentRead,
    SentRequest,
    SentRestore,
    SentRestored,
    SentSettings,
    SentTrimming,
    SentTrouble,
)

type OnLost = Callable[[str, bool], None]
"""Called once, with the reason why the ranks cannot go on, and whether that remains after a new start."""

_NAMING_S = 1.0
"""Seconds in which it shows whether a step has failed because another rank is gone."""


class Leader(Followers):
    """The other ranks, as the engine of rank 0 sees them (`engine.followers.Followers`).

    Requests and parts go out before they are done here, so that all ranks compute at the same time. A rank
    that is gone, or a part that failed on one of them, ends the service: what the others have computed since
    then is of no use.

    Args:
        links: to the others.
    """

    are_there = True

    def __init__(self, group: RankGroup, links: Sequence[Link]) -> None:
        self._links = tuple(links)
        self._lock = threading.Lock()
        self._on_lost: OnLost | None = None
        self._has_lost = threading.Event()
        self._notify: Callable[[], object] = lambda: None
        self._numbers = itertools.count(1)
        self._read: dict[int, list[int]] = {}
        self.group = group

    def watch(self, on_lost: OnLost) -> None:
        """From now on tell of a rank that is gone, on a thread of its own or on the engine's."""
        self._on_lost = on_lost
        for link in self._links:
            name = f"rank {link.rank}"
            threading.Thread(target=self._listen, args=(link,), name=name, daemon=True).start()

    def begin(self, settings: SentSettings) -> None:
        """Let the others load the model."""
        self._send(settings)

    def close(self) -> None:
        """Let the others end. Nothing is sent, and nobody is missed, afterwards."""
        with self._lock:
            self._on_lost = None
        self._send(SentEnd())

    def _listen(self, link: Link) -> None:
        place = f"Rank {link.rank} at {link.address}"
        try:
            while isinstance(message := link.receive(), SentRead):
                self._note_read(message)
        except LinkClosed:
            self._lose(f"{place} is gone.")
            return
        if isinstance(message, SentTrouble):
            self._lose(f"{place} cannot go on. {message.message}", is_final=message.is_final)
        else:
            self._lose(f"{place} has sent what no follower sends.")

    def _note_read(self, message: SentRead) -> None:
        with self._lock:
            self._read.setdefault(message.number, []).append(message.files)
        self._notify()

    def _lose(self, reason: str, *, is_final: bool = False) -> None:
        with self._lock:
            on_lost, self._on_lost = self._on_lost, None
        self._has_lost.set()
        if on_lost:
            on_lost(reason, is_final)

    def _send(self, message: Message) -> None:
        for link in self._links:
            try:
                link.send(message)
            except LinkClosed:
                self._lose(f"Rank {link.rank} at {link.address} is gone.")

    # ---------------------------------------------------------------------------------- what the engine calls

    @owned_by(ENGINE)
    def take_request(self, generation: Generation) -> None:
        """See `engine.followers`."""
        self._send(SentRequest(generation.number, generation.request))

    @owned_by(ENGINE)
    def take_part(self, part: StepPart, at: float, state: Callable[[], ExecutorState]) -> None:
        """See `engine.followers`."""
        self._send(SentPart(part, at, state()))

    @owned_by(ENGINE)
    def note_failure(self) -> None:
        """See `engine.followers`."""
        self._has_lost.wait(_NAMING_S)  # where a rank is gone, MLX raises before its link has ended
        self._lose("A step failed on rank 0, so the ranks do not have the same any more.")

    @owned_by(ENGINE)
    def take_trimmed(self, arrays: int) -> None:
        """See `engine.followers`."""
        if arrays:
            self._send(SentTrimming(arrays))

    @owned_by(ENGINE)
    def take_budget(self, nbytes: int, at: float) -> None:
        """See `engine.followers`."""
        self._send(SentBudget(nbytes, at))

    def on_news(self, notify: Callable[[], object]) -> None:
        """See `engine.followers`."""
        self._notify = notify

    @owned_by(ENGINE)
    def begin_restore(self, wish: RestoreWish, at: float) -> int:
        """See `cache.disk.shared_restore`."""
        number = next(self._numbers)
        self._send(SentRestore(number, wish, at))
        return number

    @owned_by(ENGINE)
    def least_restored(self, number: int, own: int) -> int | None:
        """See `cache.disk.shared_restore`."""
        with self._lock:
            read = list(self._read.get(number, ()))
        return min(own, *read) if len(read) == len(self._links) else None

    @owned_by(ENGINE)
    def end_restore(self, number: int, files: int, at: float) -> None:
        """See `cache.disk.shared_restore`."""
        with self._lock:
            del self._read[number]
        self._send(SentRestored(number, files, at))

    @owned_by(ENGINE)
    def flush(self, patience_s: float) -> None:
        """See `engine.followers`."""
        self._send(SentFlush(patience_s))
