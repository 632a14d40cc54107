"""Thoughts that clients carry for us: sealed text that only this server and the same tenant can open.

Some clients send nothing of a thought back but its `encrypted_content` or `signature`, so the whole thought
is in it, and the name of its reply. It is packed and signed, not hidden: who is sent a thought may read it.

    base64url( version · MAC(version, tenant, packed) · packed )        packed: name · zero byte · thought
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import zlib
from typing import NamedTuple

KEY_BYTES = 32
MOST_BYTES = 64 * 2**20
"""Of a thought that is opened: what is packed may be a thousand times longer than it looks."""
_VERSION = b"\x02"
_MAC_BYTES = 32


class Sealed(NamedTuple):
    """What is in it.

    Attributes:
        reply_name: of the reply that it came with (`core.ids`).
    """

    thought: str
    reply_name: str


class Seal:
    """Seals and opens. Safe to use from any thread.

    Args:
        key: 32 secret bytes; what another key has sealed is not ours.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key

    def seal(self, thought: str, reply_name: str, tenant: bytes) -> str:
        """Letters, digits, `-` and `_`; never empty, and the same each time."""
        packed = zlib.compress(f"{reply_name}\0{thought}".encode())
        whole = _VERSION + self._mac(packed, tenant) + packed
        return base64.urlsafe_b64encode(whole).rstrip(b"=").decode()

    def open(self, sealed: str, tenant: bytes) -> Sealed | None:
        """What was sealed; None if this is not ours, another tenant's, or damaged."""
        whole = _decoded(sealed)
        version, mac, packed = whole[:1], whole[1 : 1 + _MAC_BYTES], whole[1 + _MAC_BYTES :]
        if version != _VERSION or not hmac.compare_digest(mac, self._mac(packed, tenant)):
            return None
        return _unpacked(packed)

    def _mac(self, packed: bytes, tenant: bytes) -> bytes:
        # The length keeps a tenant and a thought apart from another tenant and another thought.
        told = _VERSION + len(tenant).to_bytes(4) + tenant + packed
        return hashlib.blake2b(told, key=self._key, digest_size=_MAC_BYTES).digest()


def _decoded(sealed: str) -> bytes:
    """Empty if it is no base64url."""
    try:
        return base64.b64decode(sealed + "=" * (-len(sealed) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""


def _unpacked(packed: bytes) -> Sealed | None:
    packer = zlib.decompressobj()
    try:
        name, _, thought = packer.decompress(packed, MOST_BYTES).decode().partition("\0")
        return Sealed(thought, name) if packer.eof else None
    except (zlib.error, UnicodeDecodeError):
        return None
