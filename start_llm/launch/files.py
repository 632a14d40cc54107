"""Write a client's configuration files into its private folder.

The client writes into the same files: which folders it trusts, which notices it has shown. So our values are
merged into the existing content, and a file that already has them is not written.
"""

import json
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from start_llm.core.errors import LaunchError
from start_llm.storage.private_files import private_folder


def parse_yaml(text: str) -> Any:
    """Return what a text says; None if it is empty.

    Raises:
        ValueError: it is no YAML.
    """
    import yaml  # noqa: PLC0415 - takes time that only users with such files need to spend

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}".partition("\n")[0]) from None


type Content = Mapping[str, Any] | str
"""Values, or the text of a program."""
type Contents = Mapping[str, Content]
"""File name to content. Files are written in the format of the name's suffix."""


class Joined(list[Any]):
    """A list whose items are added to those that the file has."""


class _Format(NamedTuple):
    read: Callable[[str], Any]
    write: Callable[[Any], str]


def _as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _as_toml(content: Mapping[str, Any]) -> str:
    import tomlkit  # noqa: PLC0415 - takes longer to import than all else that a client's start needs

    return tomlkit.dumps(content)


_FORMATS: Mapping[str, _Format] = {
    ".json": _Format(json.loads, _as_json),
    ".toml": _Format(tomllib.loads, _as_toml),
    ".yaml": _Format(parse_yaml, _as_json),  # JSON is YAML
    ".js": _Format(str, str),
    ".rules": _Format(str, str),
    "": _Format(str, str),
}


def text_of(path: Path, content: Content) -> str:
    """Return `content` in the format of the path's suffix: JSON (YAML too), TOML, or the text that it is."""
    return _FORMATS[path.suffix].write(content)


def write_all(folder: Path, contents: Mapping[Path, Content]) -> None:
    """Create the folder and merge the contents into its files. Only their owner can read them.

    Raises:
        LaunchError: the folder cannot be written.
    """
    try:
        private_folder(folder)
        for path, content in contents.items():
            private_folder(path.parent)
            _write(path, content)
    except OSError as error:
        raise LaunchError(f"{error.filename or folder} cannot be written: {error.strerror}.") from None


def _write(path: Path, content: Content) -> None:
    before = _read(path)
    if (after := deep_merge(before, content)) != before:
        _replace(path, text_of(path, after))


def deep_merge(before: Any, ours: Any) -> Any:
    """Return `ours` merged into `before`, recursively; `ours` wins, but for lists that are joined."""
    if isinstance(ours, Joined) and isinstance(before, list):
        return [*before, *(item for item in ours if item not in before)]
    if not isinstance(before, Mapping) or not isinstance(ours, Mapping):
        return ours
    return {**before, **{key: deep_merge(before.get(key), value) for key, value in ours.items()}}


def _read(path: Path) -> Any:
    try:
        return _FORMATS[path.suffix].read(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        # There is no file yet, or one that the client could not parse either.
        return None


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically: a client that reads it meanwhile sees the old content or the new."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as new:
        new.write(text)
    Path(new.name).replace(path)
