"""Remembers the digests of weights, so that a start need not read all weights once more.

A digest holds as long as the files of the model are the same ones. Their names, sizes and modification times
do not say that: an image that is built reproducibly, a copy that keeps times and a restored backup give other
weights all of these. So the files' inodes and times of change count too, which nobody can choose, and some
blocks of their contents, because a file system that is read-only has all of that from whoever made it.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from start_llm.storage.private_files import private_folder, private_opener

_FORMAT = 2
_SUFFIXES = (".safetensors", ".json", ".npz")
_MOST_MODELS = 64
_BLOCK_BYTES = 4096
_IN_FLOAT32 = " in float32"
_BLOCKS = 64
"""So many blocks of each file are read: the first, the last, and in equal steps between them."""

type WeightFiles = list[list[Any]]
"""What tells the files of a folder from others: see `weight_files_of`."""


def weight_files_of(folder: Path) -> WeightFiles:
    """Return what tells the files that a network is loaded from, by name; nothing if they cannot be read.

    For each: name, size, times of modification and of change in nanoseconds, inode, a digest of some blocks.
    """
    try:
        return [_fingerprint(path) for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES]
    except OSError:
        return []


def _fingerprint(path: Path) -> list[Any]:
    status = path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return [path.name, status.st_size, *times, status.st_ino, _sample(path, status.st_size)]


def _sample(path: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    last = max(size - _BLOCK_BYTES, 0)
    with path.open("rb", buffering=0) as file:
        for place in sorted({last * number // (_BLOCKS - 1) for number in range(_BLOCKS)}):
            file.seek(place)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


class KnownDigests:
    """Digests by model folder, in a file. A file that cannot be read or written costs time, nothing else.

    Args:
        tell: called with a sentence for the user if the file is damaged.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self._path = path
        self._tell = tell

    def get(
        self,
        folder: Path,
        loaded: WeightFiles,
        compute: Callable[[], bytes],
        *,
        in_float32: bool = False,
        shard: str = "",
    ) -> bytes:
        """Return the digest of weights that are in memory.

        Args:
            loaded: the files of the folder, from before the weights were loaded. If they are others by now,
                or could not be read, nobody knows which ones were loaded, and nothing is remembered.
            compute: reads the weights in memory if the digest is not known.
            in_float32: the weights in memory were converted to float32. They have a digest of their own.
            shard: which part of the weights is in memory; empty for all of them.
        """
        if not loaded or weight_files_of(folder) != loaded:
            return compute()
        known, name = self._read(), str(folder.resolve()) + (_IN_FLOAT32 if in_float32 else "") + shard
        entry = known.pop(name, None)
        digest = _digest_in(entry, loaded) or compute()
        known[name] = {"files": loaded, "digest": digest.hex()}
        if entry != known[name]:
            self._write(known)
        return digest

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_bytes())
            models = content["models"]
            if content["format"] == _FORMAT and content["checksum"] == _checksum(models):
                return models
            problem = (
                f"it is of format {content['format']}" if content["format"] != _FORMAT else "a wrong checksum"
            )
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"[:200]
        self._tell(f"{self._path} cannot be used ({problem}). The digests of weights are computed anew.")
        return {}

    def _write(self, models: Mapping[str, Any]) -> None:
        newest = dict(list(models.items())[-_MOST_MODELS:])
        temporary = self._path.with_name(self._path.name + ".tmp")
        with suppress(OSError):
            private_folder(self._path.parent)
            with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
                json.dump({"format": _FORMAT, "checksum": _checksum(newest), "models": newest}, file)
            temporary.replace(self._path)


def _digest_in(entry: Any, files: WeightFiles) -> bytes | None:
    """Return the digest of an entry if it is for these files."""
    return bytes.fromhex(entry["digest"]) if entry and entry["files"] == files else None


def _checksum(models: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(models).encode())
