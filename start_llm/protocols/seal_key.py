"""The key of the seal, in a file that outlives the server: thoughts are sent back after a restart too."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from start_llm.core.private_files import private_folder
from start_llm.protocols.seal import KEY_BYTES


def kept_key(path: Path) -> bytes:
    """The key in this file, which is made if there is none: its owner's alone, whole or not at all.

    Raises:
        OSError: it can be neither read nor written, or is no key.
    """
    private_folder(path.parent)
    with suppress(FileNotFoundError):
        return _read(path)
    # Another server may make one at the same moment; the first one counts.
    with suppress(FileExistsError):
        _write(path, secrets.token_bytes(KEY_BYTES))
    return _read(path)


def _read(path: Path) -> bytes:
    # A link may lead anywhere, and a pipe must not make the server wait.
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
    """Raises FileExistsError if there is one: a link, unlike a rename, replaces nothing."""
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
