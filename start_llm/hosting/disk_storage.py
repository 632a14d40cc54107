"""The disk tier, which all models of a server share: its files, its databases and their threads."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from start_llm.cache.buffers import KVShape
from start_llm.cache.disk.disk_index import TRANSCRIPTS
from start_llm.cache.disk.disk_tier import DiskAccess, DiskTier
from start_llm.cache.disk.shared_restore import RestorePeers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.config.paths import disk_tier_folder
from start_llm.config.settings import Settings
from start_llm.models.device import this_device
from start_llm.models.identity import computed_with
from start_llm.storage.database import Database
from start_llm.storage.disk_thread import DiskThread
from start_llm.storage.private_files import private_opener
from start_llm.telemetry.metrics import DiskMetrics
from start_llm.wiring.memory_plan import disk_limits

type Notify = Callable[[], None]

_RESPONSES = "responses"


_SOFTWARE = "software"
"""A file with what the newest pages of the folder were computed with."""


def tell_of_older_pages(folder: Path, say: Callable[[str], None]) -> None:
    """Say, once, that pages of other versions of the libraries are of no use any more.

    Their keys begin with the versions, so nothing finds them. They are older than all pages that will be
    written, so they go first when there is need for room.
    """
    now = computed_with()
    try:
        before = (folder / _SOFTWARE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        before = ""
    if before == now:
        return
    if before and (folder / "pages").is_dir():
        say(
            f"What {folder} keeps was computed with {before}; this is {now}. It is not used any more, and "
            "goes first when there is need for room (`start_llm cache clear` removes it now)."
        )
    with suppress(OSError), open(folder / _SOFTWARE, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(now)


class DiskStorage:
    """Gives the prompt caches of models a disk tier, if a folder is named and no other server has it.

    Args:
        say: prints a line for the user.
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

    def __str__(self) -> str:
        """Where it is, and how large it may become, in one line."""
        if self._tier is None:
            return "off"
        text = f"{self._tier.folder.path}, up to {self._tier.folder.limit() / 10**9:,.1f} GB"
        return text if self._settings.ssd.folder else f"{text}; SSD_CACHE_DIR=off turns it off"

    def _open_tier(self) -> DiskTier | None:
        settings = self._settings
        folder = disk_tier_folder(settings.ssd.folder, settings.server.state_root)
        if folder is None or not settings.cache.is_on:
            return None
        tier = DiskTier(folder, disk_limits(self._settings), self._thread, self.metrics, self._say)
        if not tier.start():
            return None
        tell_of_older_pages(folder, self._say)
        tier.traffic.notify = self._notify
        self._thread.start()
        self._database_thread.start()
        return tier

    @property
    def is_on(self) -> bool:
        """There is a disk tier."""
        return self._tier is not None

    def attach(self, cache: PromptCache, shape: KVShape, peers: RestorePeers, *, is_shared: bool) -> None:
        """Give a model's prompt cache the disk tier, if there is one. On the engine thread.

        Args:
            peers, is_shared: see `DiskAccess`.
        """
        if self._tier:
            is_in_place, idle_s = not this_device().has_own_memory, self._settings.ssd.write_after_s
            cache.attach_disk(DiskAccess(self._tier, shape, is_in_place, idle_s, peers, is_shared))

    def conversations(self, name: str) -> Database | None:
        """Open the file with what is known of a model's conversations; None without a disk tier."""
        if self._tier is None:
            return None
        self._names.add(name)
        self._tier.folder.database_names = tuple(self._names)
        return self._database(self._tier.folder.path, name)

    def responses(self) -> Database | None:
        """Open the file with the kept responses of all models; None without a disk tier."""
        return self._database(self._tier.folder.path, _RESPONSES) if self._tier else None

    def _database(self, folder: Path, name: str) -> Database:
        return Database(folder / TRANSCRIPTS / f"{name}.db", self._database_thread, self._say)

    def add_listener(self, notify: Notify) -> None:
        """Call this, on the disk thread, whenever something that may be waited for is over."""
        self._listeners = (*self._listeners, notify)

    def remove_listener(self, notify: Notify) -> None:
        self._listeners = tuple(listener for listener in self._listeners if listener != notify)

    def close(self, timeout_s: float) -> None:
        """Write what is queued and let the folder go. Engines and databases must have ended.

        A disk that hangs keeps the folder until the process ends.
        """
        self._database_thread.close(timeout_s)
        has_ended = self._thread.close(timeout_s)
        if self._tier and has_ended:
            self._tier.close()

    def _notify(self) -> None:
        for notify in self._listeners:
            notify()

    def _note_error(self, error: Exception) -> None:
        self.metrics.note_error()
        self._say(f"Work on the disk failed: {type(error).__name__}: {error}")
