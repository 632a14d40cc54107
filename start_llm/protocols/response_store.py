"""Responses that clients may go on from without sending them again (`previous_response_id`).

For each process, in memory: the least recently used go when there is no more room, the others when they are
too old. A tenant knows its own alone.
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
class Kept:
    """One response.

    Attributes:
        input: all items that it answered, those of earlier responses among them.
        instructions: that were in force; None: there were none.
        body: what the client was told, its output among it.
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
    kept: Kept
    nbytes: int
    until: float


class ResponseStore:
    """Keeps responses. Safe to use from any thread.

    Args:
        most_bytes: of all responses, as JSON; 0 keeps none.
        kept_s: time after which a response is gone, however often it was used.
    """

    def __init__(
        self,
        most_bytes: int = DEFAULT_MOST_BYTES,
        kept_s: float = DEFAULT_KEPT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_bytes = most_bytes
        self._kept_s = kept_s
        self._clock = clock
        self._entries: OrderedDict[tuple[bytes, str], _Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, tenant: bytes, name: str, kept: Kept) -> None:
        """One that is too large for the store is not kept, and displaces no other."""
        nbytes = len(json.dumps([*kept.input, kept.instructions, kept.body]))
        if nbytes > self._most_bytes:
            return
        with self._lock:
            self._forget_old()
            self._entries[tenant, name] = _Entry(kept, nbytes, self._clock() + self._kept_s)
            self._bytes += nbytes
            while self._bytes > self._most_bytes:
                self._drop(next(iter(self._entries)))

    def get(self, tenant: bytes, name: str, *, param: str | None = None) -> Kept:
        """A response, which is used last now.

        Raises:
            NotFound: never kept, gone by now, or another tenant's.
        """
        with self._lock:
            self._forget_old()
            entry = self._entries.get((tenant, name))
            if entry is None:
                raise NotFound(f"There is no response {name!r} on this server, or no more.", param=param)
            self._entries.move_to_end((tenant, name))
            return entry.kept

    def delete(self, tenant: bytes, name: str) -> None:
        """Forget a response.

        Raises:
            NotFound: see `get`.
        """
        self.get(tenant, name)
        with self._lock:
            if (tenant, name) in self._entries:
                self._drop((tenant, name))

    def item(self, tenant: bytes, name: str, *, param: str) -> Mapping[str, Json]:
        """An item of any response, by its id.

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
        """As `/stats` tells them."""
        with self._lock:
            self._forget_old()
            return {
                "entries": len(self._entries),
                "bytes": self._bytes,
                "max_bytes": self._most_bytes,
                "ttl_ms": round(self._kept_s * 1000),
            }

    def _forget_old(self) -> None:
        now = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.until <= now]:
            self._drop(key)

    def _drop(self, key: tuple[bytes, str]) -> None:
        self._bytes -= self._entries.pop(key).nbytes
