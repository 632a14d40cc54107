"""Seals reasoning that clients keep for us. Only this server, for the same tenant, can open it.

Some clients send back only the `encrypted_content` or `signature` of reasoning, so it contains the whole
reasoning and the name of its reply. The reasoning is packed and signed but not encrypted: a client that
receives reasoning may read it. The key is kept in a file: clients also send reasoning back after a restart.

    base64url( version · MAC(version, tenant, packed) · packed )        packed: name · zero byte · reasoning
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from start_llm.storage.private_files import private_folder

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

    def unless_edited(self, clear: str) -> Sealed:
        """Return the contents, with the clear text that came beside them if a client has edited it.

        An empty text is no edit: some clients keep the sealed text alone.
        """
        is_edited = clear.strip() not in ("", self.reasoning.strip())
        return self._replace(reasoning=clear) if is_edited else self


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
        signed = _VERSION + len(tenant).to_bytes(4) + tenant + packed
        return hashlib.blake2b(signed, key=self._key, digest_size=_MAC_BYTES).digest()


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


def kept_key(path: Path) -> bytes:
    """Return the key in this file. Create the file if it is missing, complete and readable by its owner only.

    Raises:
        OSError: the file can be neither read nor written, or contains no key.
    """
    private_folder(path.parent)
    with suppress(FileNotFoundError):
        return _read(path)
    # Another server may create one at the same moment. The first one counts.
    with suppress(FileExistsError):
        _write(path, secrets.token_bytes(KEY_BYTES))
    return _read(path)


def _read(path: Path) -> bytes:
    # Do not follow links, and do not block on a pipe.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != KEY_BYTES:
            raise OSError(f"{path} is no key; without it, a new one is made")
        os.fchmod(file, 0o600)
        return os.read(file, KEY_BYTES)
    finally:
        os.close(file)


def _write(path: Path, key: bytes) -> None:
    """Write the key. A link, unlike a rename, never replaces an existing file.

    Raises:
        FileExistsError: there is a key already.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "wb") as writer:
            writer.write(key)
            writer.flush()
            os.fsync(file)
        os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
