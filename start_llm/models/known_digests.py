"""Remembers the digests of weights, so that a start need not read all weights once more.

A digest holds as long as the files of the model keep their names, sizes and modification times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from start_llm.core.private_files import private_folder, private_opener

_FORMAT = 1
_SUFFIXES = (".safetensors", ".json", ".npz")
_MOST_MODELS = 64


class KnownDigests:
    """Digests by model folder, in a file. A file that cannot be read or written costs time, nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, folder: Path, compute: Callable[[], bytes]) -> bytes:
        """Return the digest of the weights in a folder. `compute` reads them if the digest is not known."""
        files = _files(folder)
        known = self._read()
        entry = known.pop(str(folder.resolve()), None)
        if isinstance(entry, dict) and entry.get("files") == files:
            with suppress(KeyError, TypeError, ValueError):
                return bytes.fromhex(entry["digest"])
        digest = compute()
        known[str(folder.resolve())] = {"files": files, "digest": digest.hex()}
        self._write(known)
        return digest

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            said = json.loads(self._path.read_text(encoding="utf-8"))
            if (
                isinstance(said, dict)
                and said.get("format") == _FORMAT
                and isinstance(said.get("models"), dict)
            ):
                return said["models"]
        return {}

    def _write(self, models: Mapping[str, Any]) -> None:
        newest = dict(list(models.items())[-_MOST_MODELS:])
        temporary = self._path.with_name(self._path.name + ".tmp")
        with suppress(OSError):
            private_folder(self._path.parent)
            with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
                json.dump({"format": _FORMAT, "models": newest}, file)
            temporary.replace(self._path)


def _files(folder: Path) -> list[list[Any]]:
    """Return name, size and modification time of each file that a network is loaded from."""
    found = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in found]
