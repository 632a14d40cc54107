"""Seals reasoning that clients keep for us. Only this server, for the same tenant, can open it.

Some clients send back only the `encrypted_content` or `signature` of reasoning, so it contains the whole
reasoning and the name of its reply. The reasoning is packed and signed but not encrypted: a client that
receives reasoning may read it.

    base64url( version · MAC(version, tenant, packed) · packed )        packed: name · zero byte · reasoning
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import zlib
from typing import NamedTuple

KEY_BYTES = 32
MAX_BYTES = 64 * 2**20
"""Limit for unpacked reasoning: packed data may grow a thousandfold."""
_VERSION = b"\x02"
_MAC_BYTES = 32


class Sealed(NamedTuple):
    """The contents of a sealed text.

    Attributes:
        reply_name: name of the reply that the reasoning came with (`core.ids`).
    """

    reasoning: str
    reply_name: str

    def unless_edited(self, told: str) -> Sealed:
        """Return the contents, with the clear text that came beside them if a client has edited it.

        An empty text is no edit: some clients keep the sealed text alone.
        """
        is_edited = told.strip() not in ("", self.reasoning.strip())
        return self._replace(reasoning=told) if is_edited else self


class Seal:
    """Seals and opens reasoning. Thread-safe.

    Args:
        key: 32 secret bytes; text sealed with another key cannot be opened.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key

    def seal(self, reasoning: str, reply_name: str, tenant: bytes) -> str:
        """Return letters, digits, `-` and `_`; never empty, and always the same for the same input."""
        packed = zlib.compress(f"{reply_name}\0{reasoning}".encode())
        whole = _VERSION + self._mac(packed, tenant) + packed
        return base64.urlsafe_b64encode(whole).rstrip(b"=").decode()

    def open(self, sealed: str, tenant: bytes) -> Sealed | None:
        """Return the contents; None if damaged, or sealed with another key or for another tenant."""
        whole = _decoded(sealed)
        version, mac, packed = whole[:1], whole[1 : 1 + _MAC_BYTES], whole[1 + _MAC_BYTES :]
        if version != _VERSION or not hmac.compare_digest(mac, self._mac(packed, tenant)):
            return None
        return _unpacked(packed)

    def _mac(self, packed: bytes, tenant: bytes) -> bytes:
        # Without the length, tenant and data could be split differently and give the same MAC.
        told = _VERSION + len(tenant).to_bytes(4) + tenant + packed
        return hashlib.blake2b(told, key=self._key, digest_size=_MAC_BYTES).digest()


def _decoded(sealed: str) -> bytes:
    """Decode base64url; empty if invalid."""
    try:
        return base64.b64decode(sealed + "=" * (-len(sealed) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""


def _unpacked(packed: bytes) -> Sealed | None:
    packer = zlib.decompressobj()
    try:
        name, _, reasoning = packer.decompress(packed, MAX_BYTES).decode().partition("\0")
        return Sealed(reasoning, name) if packer.eof else None
    except (zlib.error, UnicodeDecodeError):
        return None
