"""Stores responses that clients can continue without sending them again (`previous_response_id`).

The store is in memory, per process. It evicts the least recently used responses when it is full, and all
responses that are too old. A tenant sees only its own.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from start_llm.core.chat import Json
from start_llm.core.errors import NotFound

DEFAULT_MOST_BYTES = 32 * 2**20
DEFAULT_KEPT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One stored response.

    Attributes:
        input: all items before the output, including those of earlier responses.
        instructions: the instructions in force, if any.
        body: the body sent to the client, with its output.
    """

    input: Sequence[Mapping[str, Json]]
    instructions: str | None
    body: Mapping[str, Json]

    @property
    def output(self) -> list[Mapping[str, Json]]:
        items = self.body["output"]
        return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []

    @property
    def items(self) -> list[Mapping[str, Json]]:
        """The conversation so far."""
        return [*self.input, *self.output]


@dataclass(frozen=True, slots=True)
class _Entry:
    kept: StoredResponse
    nbytes: int
    until: float


class ResponseStore:
    """Stores responses. Thread-safe.

    Args:
        max_bytes: limit for all responses, as JSON; 0 stores none.
        kept_s: a response expires after this time, however often it is used.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_MOST_BYTES,
        kept_s: float = DEFAULT_KEPT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._clock = clock
        self._entries: OrderedDict[tuple[bytes, str], _Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, tenant: bytes, name: str, kept: StoredResponse) -> None:
        """Store a response. One that is larger than the whole store is dropped and evicts no other."""
        nbytes = len(json.dumps([*kept.input, kept.instructions, kept.body]))
        if nbytes > self._max_bytes:
            return
        with self._lock:
            self._forget_old()
            self._entries[tenant, name] = _Entry(kept, nbytes, self._clock() + self._kept_s)
            self._bytes += nbytes
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def get(self, tenant: bytes, name: str, *, param: str | None = None) -> StoredResponse:
        """Return a response and mark it as most recently used.

        Raises:
            NotFound: never stored, no longer stored, or another tenant's.
        """
        with self._lock:
            self._forget_old()
            entry = self._entries.get((tenant, name))
            if entry is None:
                raise NotFound(f"There is no response {name!r} on this server, or no more.", param=param)
            self._entries.move_to_end((tenant, name))
            return entry.kept

    def delete(self, tenant: bytes, name: str) -> None:
        """Delete a response.

        Raises:
            NotFound: see `get`.
        """
        self.get(tenant, name)
        with self._lock:
            if (tenant, name) in self._entries:
                self._drop((tenant, name))

    def item(self, tenant: bytes, name: str, *, param: str) -> Mapping[str, Json]:
        """Return an item of any response, by its id.

        Raises:
            NotFound: see `get`.
        """
        with self._lock:
            self._forget_old()
            own = [entry.kept for (owner, _), entry in self._entries.items() if owner == tenant]
        for kept in reversed(own):
            for item in reversed(kept.items):
                if item.get("id") == name:
                    return item
        raise NotFound(f"There is no item {name!r} on this server, or no more.", param=param)

    def counts(self) -> dict[str, Json]:
        """Return the counts for `/stats`."""
        with self._lock:
            self._forget_old()
            return {
                "entries": len(self._entries),
                "bytes": self._bytes,
                "max_bytes": self._max_bytes,
                "ttl_ms": round(self._kept_s * 1000),
            }

    def _forget_old(self) -> None:
        now = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.until <= now]:
            self._drop(key)

    def _drop(self, key: tuple[bytes, str]) -> None:
        self._bytes -= self._entries.pop(key).nbytes
