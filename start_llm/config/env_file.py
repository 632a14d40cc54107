"""Read `.env`, and refuse what would be misread or ignored in it."""

import io
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dotenv import dotenv_values
from dotenv.parser import parse_stream

from start_llm.core.common_beginning import common_length
from start_llm.core.errors import SettingsError

_LEAST_LETTERS = 4


class _Line(NamedTuple):
    number: int
    name: str | None
    has_value: bool


def read_env_file(path: Path, known: Collection[str]) -> Mapping[str, str]:
    """Return the variables of a file; none if there is no file.

    Args:
        known: names of settings. Other names are left alone, unless one is a slip for one of these.

    Raises:
        SettingsError: the file cannot be read, or a line of it is refused; names the file and the line.
    """
    try:
        text = _text(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from None
    problems = [
        f"{path}, line {line.number}: {why}" for line in _lines(text) if (why := _problem(line, known))
    ]
    if problems:
        raise SettingsError("\n".join(problems))
    values = dotenv_values(stream=io.StringIO(text))
    return {name: value for name, value in values.items() if value is not None}


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{_at(path, content, error.start)}: the byte 0x{content[error.start]:02x} is not UTF-8. "
            "Save the file as UTF-8."
        ) from None
    if "\0" in text:
        raise SettingsError(
            f"{_at(path, content, content.index(0))}: the byte 0x00 is no text. The file is damaged."
        )
    return text


def _at(path: Path, content: bytes, place: int) -> str:
    return f"{path}, line {content.count(b'\n', 0, place) + 1}"


def _lines(text: str) -> Iterator[_Line]:
    for binding in parse_stream(io.StringIO(text)):
        written = binding.original.string
        blank = written[: len(written) - len(written.lstrip())]
        is_empty = binding.key is None and not binding.error
        if not is_empty:
            number = binding.original.line + len(blank.splitlines())
            yield _Line(number, binding.key, binding.value is not None)


def _problem(line: _Line, known: Collection[str]) -> str:
    """Return why a line is refused; empty if it is not."""
    if line.name is None or not line.has_value:
        return "expected NAME=value."
    if line.name in known:
        return ""
    meant = next((name for name in known if _is_slip(line.name, name)), None)
    return f"there is no setting {line.name}. Did you mean {meant}?" if meant else ""


def _is_slip(written: str, meant: str) -> bool:
    """Return True if one letter is too many, missing or wrong, or two neighbours have changed places."""
    written = written.upper()
    if len(meant) < _LEAST_LETTERS or abs(len(written) - len(meant)) > 1:
        return False
    start = common_length(written, meant)
    rest, other = written[start:], meant[start:]
    swapped = rest[1:2] + rest[:1] + rest[2:]
    return other in (rest[1:], swapped) or rest == other[1:] or rest[1:] == other[1:]
