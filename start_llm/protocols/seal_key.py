"""Keeps the seal's key in a file, because clients also send reasoning back after a restart."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from start_llm.protocols.seal import KEY_BYTES
from start_llm.storage.private_files import private_folder


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
