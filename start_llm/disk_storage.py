"""The disk tier, which all models of a server share: its files, its databases and their threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from start_llm.cache.buffers import KVShape
from start_llm.cache.disk_index import TRANSCRIPTS
from start_llm.cache.disk_tier import DiskAccess, DiskTier
from start_llm.cache.prompt_cache import PromptCache
from start_llm.config.paths import from_root
from start_llm.config.settings import Settings
from start_llm.core.database import Database
from start_llm.core.disk_thread import DiskThread
from start_llm.models.device import this_device
from start_llm.telemetry.metrics import DiskMetrics
from start_llm.wiring import disk_limits

type Notify = Callable[[], None]

_RESPONSES = "responses"


class DiskStorage:
    """Gives the prompt caches of models a disk tier, if a folder is named and no other server has it.

    Args:
        say: prints a line for the user.

    Attributes:
        folder: the folder; None if there is no disk tier.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.metrics = DiskMetrics()
        self._settings = settings
        self._say = say
        self._thread = DiskThread(self._note_error)
        self._database_thread = DiskThread(self._note_error, name="database")
        self._listeners: tuple[Notify, ...] = ()
        self._names = {_RESPONSES}
        self._tier = self._open_tier()

    @property
    def folder(self) -> Path | None:
        return self._tier.folder if self._tier else None

    def _open_tier(self) -> DiskTier | None:
        if self._settings.ssd_folder is None or not self._settings.prompt_cache:
            return None
        folder = from_root(self._settings.ssd_folder)
        tier = DiskTier(folder, disk_limits(self._settings), self._thread, self.metrics, self._say)
        if not tier.start():
            return None
        tier.notify = self._notify
        self._thread.start()
        self._database_thread.start()
        return tier

    def attach(self, cache: PromptCache, shape: KVShape) -> None:
        """Give a model's prompt cache the disk tier, if there is one. On the engine thread."""
        if self._tier:
            write_after_s = self._settings.ssd_write_after_s
            cache.attach_disk(DiskAccess(self._tier, shape, this_device().shares_arrays, write_after_s))

    def conversations(self, name: str) -> Database | None:
        """Open the file with what is known of a model's conversations; None without a disk tier."""
        if self._tier is None:
            return None
        self._names.add(name)
        self._tier.database_names = tuple(self._names)
        return self._database(self._tier.folder, name)

    def responses(self) -> Database | None:
        """Open the file with the kept responses of all models; None without a disk tier."""
        return self._database(self._tier.folder, _RESPONSES) if self._tier else None

    def _database(self, folder: Path, name: str) -> Database:
        return Database(folder / TRANSCRIPTS / f"{name}.db", self._database_thread, self._say)

    def add_listener(self, notify: Notify) -> None:
        """Call this, on the disk thread, whenever something that may be waited for is over."""
        self._listeners = (*self._listeners, notify)

    def remove_listener(self, notify: Notify) -> None:
        self._listeners = tuple(one for one in self._listeners if one != notify)

    def close(self, timeout_s: float) -> None:
        """Write what is queued and let the folder go. Engines and databases must have ended."""
        self._database_thread.close(timeout_s)
        self._thread.close(timeout_s)
        if self._tier:
            self._tier.close()

    def _notify(self) -> None:
        for notify in self._listeners:
            notify()

    def _note_error(self, error: Exception) -> None:
        self.metrics.note_error()
        self._say(f"Work on the disk failed: {type(error).__name__}: {error}")
