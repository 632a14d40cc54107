"""What is known of conversations. Loaded models with equal weights and template share it, and its file."""

import threading
from dataclasses import dataclass

from start_llm.config.settings import Settings
from start_llm.hosting.disk_storage import DiskStorage
from start_llm.storage.database import Database, DatabaseMetrics
from start_llm.transcripts.transcripts import TranscriptStores
from start_llm.wiring.from_settings import no_table, transcript_stores


@dataclass(slots=True)
class OpenConversations:
    """What is known of the conversations with one model, or with several that are equal.

    Attributes:
        identity: what the models have in common.
        database: keeps the stores for the next start; None without a disk tier.
        users: number of loaded models that use them.
    """

    identity: bytes
    stores: TranscriptStores
    database: Database | None
    users: int = 0

    @property
    def metrics(self) -> DatabaseMetrics:
        return self.database.metrics if self.database else DatabaseMetrics()


class SharedConversations:
    """Opens the conversations of a model with the first one that uses them, and closes them with the last."""

    def __init__(self, settings: Settings, disk: DiskStorage) -> None:
        self._settings = settings
        self._disk = disk
        self._open: dict[bytes, OpenConversations] = {}
        self._lock = threading.Lock()

    def join(self, identity: bytes) -> OpenConversations:
        """Return what is known of the conversations with a model; it uses them until `leave`."""
        with self._lock:
            if identity not in self._open:
                database = self._disk.conversations(identity.hex())
                stores = transcript_stores(self._settings, database.table if database else no_table)
                self._open[identity] = OpenConversations(identity, stores, database)
            joined = self._open[identity]
            joined.users += 1
            return joined

    def leave(self, left: OpenConversations, patience_s: float = 0) -> None:
        """End the use by one model. With the last one everything is written.

        Args:
            patience_s: the longest that this waits until they can be opened again.
        """
        with self._lock:
            left.users -= 1
            if left.users:
                return
            del self._open[left.identity]
        if left.database:
            left.database.close(patience_s)
