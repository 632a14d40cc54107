"""Types of settings: each has a parser, and a description of valid values for error messages."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from start_llm.core.sampling import Range

type Reader = Callable[[str], Any]
"""Parses a text into a value. Raises ValueError, or KeyError for an unknown word, if it is invalid."""


class SettingKind(NamedTuple):
    """A type of setting.

    Attributes:
        read: the parser.
        expected: the valid values, in words, for error messages and documents.
        documented: what the documents say in place of `expected`, where that is a list that grows.
        is_secret: error messages do not show the value.
    """

    read: Reader
    expected: str
    documented: str = ""
    is_secret: bool = False


def integer(low: int, high: int) -> SettingKind:
    return SettingKind(
        lambda text: _within(int(text), Range(low, high)), f"a whole number from {low} to {high}"
    )


def number(allowed: Range) -> SettingKind:
    return SettingKind(lambda text: _within(float(text), allowed), f"a number {allowed}")


def _within[N: (int, float)](value: N, allowed: Range) -> N:
    if value not in allowed:
        raise ValueError(value)
    return value


_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def _memory(text: str) -> int | float:
    """Parse a size in bytes (an int) or a share of memory (a float from 0 to 1).

    Units: B, KB to TB, KiB to TiB, %. A size between 0 and 1 byte, such as 0.5 without a unit, is refused,
    because it was probably meant as a share.
    """
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError(text)
    number, unit = float(match["number"]), match["unit"].lower()
    if unit == "%":
        return _within(number / 100, Range(0, 1))
    count = number * _UNITS[unit]
    if 0 < count < 1:
        raise ValueError(text)
    return int(count)


_MEMORY = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|[kmgt]i?b|b?)", re.IGNORECASE)
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{unit}b": 10 ** (3 * power) for power, unit in enumerate("kmgt", 1)},
    **{f"{unit}ib": 2 ** (10 * power) for power, unit in enumerate("kmgt", 1)},
}
BYTES = SettingKind(
    _memory, "bytes, such as 4GB or 8GiB, or from 0% to 100% of what the system lets models use"
)


def _cache_bytes(text: str) -> int | float:
    """Parse the size of the prompt cache. 0% is refused: it may mean "no cap", as 0 does, or "no cache"."""
    size = _memory(text)
    if isinstance(size, float) and not size:
        raise ValueError(text)
    return size


CACHE_BYTES = SettingKind(
    _cache_bytes,
    "bytes from 0 on (0 = no cap), such as 4GB or 8GiB, or more than 0% and up to 100% of the memory that "
    "the weights leave",
)
DISK_BYTES = SettingKind(
    _memory, "bytes, such as 100GB, or from 0% to 100% of the disk space that is free or the cache's own"
)


def _size(text: str) -> int:
    size = _memory(text)
    if isinstance(size, float):
        raise ValueError(text)  # noqa: TRY004 - readers say so of any text that is wrong
    return size


SIZE = SettingKind(_size, "bytes from 0 on, such as 200GB")


def choice(words: Sequence[str], documented: str = "") -> SettingKind:
    return SettingKind(
        lambda text: {word: word for word in words}[text.lower()], f"one of {', '.join(words)}", documented
    )


def number_choice(numbers: Sequence[int]) -> SettingKind:
    words = choice([str(number) for number in numbers])
    return SettingKind(lambda text: int(words.read(text)), words.expected)


def _list_of(entry: re.Pattern[str]) -> Reader:
    def read(text: str) -> tuple[str, ...]:
        entries = tuple(part.strip() for part in text.split(","))
        if not all(map(entry.fullmatch, entries)):
            raise ValueError(text)
        return entries

    return read


def _always(text: str) -> bool:
    if not _WORDS[text.lower()]:
        raise ValueError(text)
    return True


def always(why: str) -> SettingKind:
    """Return the type of a setting that cannot be turned off."""
    return SettingKind(_always, f"one of true, yes, on, 1: {why}")


def _secret(text: str) -> str:
    if not re.fullmatch(r"[!-~]{24,}", text):
        raise ValueError(text)
    return text


BOOLEAN = SettingKind(lambda text: _WORDS[text.lower()], "one of true, yes, on, 1, false, no, off, 0")
KV_BITS = SettingKind(
    lambda text: {"off": None, "3.5": 3.5, "4": 4, "8": 8, "config": "config"}[text.lower()],
    "one of OFF, 3.5, 4, 8, config",
)
TEXT = SettingKind(str, "text")
OFF = "off"
FOLDER_OR_OFF = SettingKind(lambda text: OFF if text.lower() == OFF else text, "a folder, or off")
PORT = integer(0, 65535)
SECONDS = number(Range(0.01, 86400))
# The characters that an HTTP header can carry, except the comma.
KEYS = SettingKind(
    _list_of(re.compile(r"[!-+\--~]([ -+\--~]*[!-+\--~])?")),
    "one or more keys of the characters from ! to ~, with commas between",
    is_secret=True,
)
SECRET = SettingKind(
    _secret,
    "one word of 24 or more of the characters from ! to ~, such as `openssl rand -hex 24` writes",
    is_secret=True,
)
MODELS = SettingKind(
    _list_of(re.compile(r"[^\s,]([^,]*[^\s,])?")),
    "one or more names of models, with commas between",
)
ALIASES = SettingKind(
    _list_of(re.compile(r"[^\s,=]([^,=]*[^\s,=])?\s*=\s*[^\s,=]([^,=]*[^\s,=])?")),
    "one or more ALIAS=MODEL, with commas between",
)
_ORIGIN = re.compile(
    r"(?!https?://\*)[A-Za-z][A-Za-z0-9+.-]*://(\*|([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?)"
)
ORIGINS = SettingKind(
    _list_of(_ORIGIN),
    "one or more origins such as http://localhost:3000 or app://obsidian.md, with commas between and without "
    "a path; vscode-webview://* is all of a scheme, which http and https cannot have",
)
SERVERS = SettingKind(
    _list_of(re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[1-9]\d{0,4}")),
    "one or more addresses such as http://192.168.1.20:8080, with commas between and without a path",
)
HOSTS = SettingKind(
    _list_of(re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*")),
    "one or more host names, with commas between",
)
