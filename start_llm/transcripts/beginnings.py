"""Remembers how the prompts of the agents that were used last begin: their tools and system texts."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Collection
from dataclasses import dataclass

from start_llm.core.engine_request import EngineRequest
from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.storage.database import NO_TABLE, DatabaseTable
from start_llm.storage.database_file import decode_json, encode_json

_MOST = 16
_LEAST_TOKENS = 64
"""Shorter ones are read in no time."""
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Beginning:
    """What all conversations of an agent begin with.

    Attributes:
        tenant: whose it is.
        program: which client sends it; empty if it does not say.
        ids: the tokens up to the end of the first message, and the one behind it.
    """

    tenant: bytes
    program: str
    ids: array[int]

    @property
    def key(self) -> bytes:
        """A digest of whose it is and of its tokens."""
        content = b"".join((len(self.tenant).to_bytes(4, "little"), self.tenant, self.ids.tobytes()))
        return hashlib.blake2b(content, digest_size=_KEY_BYTES).digest()

    def request(self) -> EngineRequest:
        """Return a request that reads it, and generates nothing."""
        ids = tuple(self.ids)
        return EngineRequest(
            prompt=ModelTokens(ids),
            max_tokens=0,
            sampling=Sampling(),
            boundaries=(len(ids) - 1,),
            salt=self.tenant,
        )

    def encode(self) -> bytes:
        """Return the value of a row: length of the JSON, the JSON, the tokens in this machine's order."""
        described = encode_json((self.tenant, self.program))
        return b"".join((len(described).to_bytes(4, "little"), described, self.ids.tobytes()))

    @classmethod
    def decode(cls, data: bytes) -> Beginning:
        """Read the value of a row.

        Raises:
            ValueError, TypeError: it is none (see `UNREADABLE`).
        """
        end = 4 + int.from_bytes(data[:4], "little")
        tenant, program = decode_json(data[4:end])
        ids = array("I")
        ids.frombytes(data[end:])
        return cls(bytes.fromhex(tenant), str(program), ids)


class Beginnings:
    """The beginnings that were used last. Safe to use from any thread.

    Args:
        table: keeps them for the next process.
    """

    def __init__(self, *, table: DatabaseTable = NO_TABLE) -> None:
        self._table = table
        kept = table.read(lambda row: Beginning.decode(row.value))
        self._known = {row.key: beginning for row, beginning in kept}
        self._lock = threading.Lock()
        self._forget_some()

    def note(self, beginning: Beginning) -> None:
        """Note that a conversation with this beginning was answered."""
        if len(beginning.ids) < _LEAST_TOKENS:
            return
        key = beginning.key
        with self._lock:
            before = self._known.pop(key, None)
            self._known[key] = beginning
            if before and before.program == beginning.program:
                self._table.touch(key)
            else:
                self._table.put(key, beginning.encode())
            self._forget_some()

    def latest(self) -> list[Beginning]:
        """Return all of them, the one used last first."""
        with self._lock:
            return list(reversed(self._known.values()))

    def of(self, tenant: bytes, programs: Collection[str], most_tokens: int) -> list[Beginning]:
        """Return those of a tenant's programs, the one used last first.

        Args:
            programs: their names; empty: all that the tenant has.
            most_tokens: longer ones are left out.
        """
        return [
            beginning
            for beginning in self.latest()
            if beginning.tenant == tenant
            and len(beginning.ids) <= most_tokens
            and (not programs or beginning.program in programs)
        ]

    def _forget_some(self) -> None:
        while len(self._known) > _MOST:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._table.delete(oldest)
