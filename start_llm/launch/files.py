"""Files of a client in its private folder.

The client writes into them too: what it was told to trust, which notes it has shown. So ours is laid over
what stands there, and nothing is written that stands there already.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from start_llm.core.errors import LaunchError
from start_llm.core.private_files import private_folder
from start_llm.launch.toml import as_toml


class _Format(NamedTuple):
    read: Callable[[str], Any]
    write: Callable[[Mapping[str, Any]], str]


def _as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


_FORMATS: Mapping[str, _Format] = {
    ".json": _Format(json.loads, _as_json),
    ".toml": _Format(tomllib.loads, as_toml),
}


def text_of(path: Path, content: Mapping[str, Any]) -> str:
    """The file that says `content`, in the form that its name asks for."""
    return _FORMATS[path.suffix].write(content)


def write_all(folder: Path, contents: Mapping[Path, Mapping[str, Any]]) -> None:
    """Make the folder and lay the contents over the files in it, all for their owner alone.

    Raises:
        LaunchError: the folder cannot be written.
    """
    try:
        private_folder(folder)
        for path, content in contents.items():
            _write(path, content)
    except OSError as error:
        raise LaunchError(f"{error.filename or folder} cannot be written: {error.strerror}.") from None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    before = _read(path)
    if (after := laid_over(before, content)) != before:
        _replace(path, text_of(path, after))


def laid_over(before: Any, ours: Any) -> Any:
    """`ours`, and of `before` what it does not mention."""
    if not isinstance(before, Mapping) or not isinstance(ours, Mapping):
        return ours
    return {**before, **{key: laid_over(before.get(key), value) for key, value in ours.items()}}


def _read(path: Path) -> Any:
    try:
        return _FORMATS[path.suffix].read(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        # None yet, or one that its client could not read either.
        return None


def _replace(path: Path, text: str) -> None:
    """A client that reads it meanwhile sees the old file or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as new:
        new.write(text)
    Path(new.name).replace(path)
