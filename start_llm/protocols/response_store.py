"""Stores responses that clients can continue without sending them again (`previous_response_id`).

The store evicts the least recently used responses when it is full, and all responses that are too old. A
tenant sees only its own. Without a table of the database, the responses end with the process.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from start_llm.core.chat import Json
from start_llm.core.errors import NotFound
from start_llm.protocols.long_texts import encoded_in_steps, long_text_length
from start_llm.storage.database import NO_TABLE, DatabaseRow, DatabaseTable
from start_llm.storage.database_file import decode_json, encode_json

DEFAULT_MOST_BYTES = 32 * 2**20
DEFAULT_KEPT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """One stored response.

    Attributes:
        input: all items before the output, including those of earlier responses.
        made_ids: ids of those that this server has made: of earlier outputs, of items without an id, and of
            items that were referred to.
        instructions: the instructions in force, if any.
        body: the body sent to the client, with its output.
    """

    input: Sequence[Mapping[str, Json]]
    made_ids: Sequence[str] = ()
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

    @cached_property
    def made_items(self) -> dict[str, Mapping[str, Json]]:
        """Its items by the ids that this server has made. Two clients may give one id to two items."""
        made = {*self.made_ids}
        of_input = [item for item in reversed(self.input) if str(item.get("id")) in made]
        return {str(item.get("id")): item for item in (*of_input, *self.output)}


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
        table: keeps them for the next process.
    """

    def __init__(
        self,
        max_bytes: int = DEFAULT_MOST_BYTES,
        kept_s: float = DEFAULT_KEPT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
        table: DatabaseTable = NO_TABLE,
    ) -> None:
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._clock = clock
        self._entries: OrderedDict[tuple[bytes, str], _Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._table = table
        now = clock()
        for row, (key, response) in table.read(_decode):
            self._add(key, _Entry(response, len(row.value), now - row.age_s + kept_s))
        self._forget_old()

    def keep(self, tenant: bytes, name: str, kept: StoredResponse) -> None:
        """Store a response. One that is larger than the whole store is dropped and evicts no other."""
        if long_text_length(kept.input) > self._max_bytes:
            return
        data = _encode(kept)
        if len(data) > self._max_bytes:
            return
        with self._lock:
            self._forget_old()
            if (tenant, name) in self._entries:
                self._drop((tenant, name))
            self._table.put(_row_key((tenant, name)), data)
            self._add((tenant, name), _Entry(kept, len(data), self._clock() + self._kept_s))

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
            self._table.touch(_row_key((tenant, name)))
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
        """Return an item of any response, by the id that this server has made for it.

        Raises:
            NotFound: see `get`.
        """
        with self._lock:
            self._forget_old()
            own = [entry.kept for (owner, _), entry in self._entries.items() if owner == tenant]
        for kept in reversed(own):
            if item := kept.made_items.get(name):
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

    def _add(self, key: tuple[bytes, str], entry: _Entry) -> None:
        self._entries[key] = entry
        self._bytes += entry.nbytes
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _forget_old(self) -> None:
        now = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.until <= now]:
            self._drop(key)

    def _drop(self, key: tuple[bytes, str]) -> None:
        self._bytes -= self._entries.pop(key).nbytes
        self._table.delete(_row_key(key))


def _row_key(key: tuple[bytes, str]) -> bytes:
    return encode_json(key)


def _encode(kept: StoredResponse) -> bytes:
    return encoded_in_steps((kept.input, kept.made_ids, kept.instructions, kept.body))


def _decode(row: DatabaseRow) -> tuple[tuple[bytes, str], StoredResponse]:
    tenant, name = decode_json(row.key)
    inputs, made_ids, instructions, body = decode_json(row.value)
    response = StoredResponse(input=inputs, made_ids=tuple(made_ids), instructions=instructions, body=body)
    return (bytes.fromhex(tenant), name), response
