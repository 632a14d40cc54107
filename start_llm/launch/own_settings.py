"""Read what the user has set up for a client. Nothing here writes."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from start_llm.core.errors import LaunchError
from start_llm.launch.files import parse_yaml

_TOKENS = re.compile(
    r'(?P<double>"(?:\\.|[^"\\])*")'
    r"|(?P<single>'(?:\\.|[^'\\])*')"
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|(?P<key>[A-Za-z_$][\w$]*)(?=\s*:)",
    re.DOTALL,
)
_LAST_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSettings:
    """The user's own settings.

    Attributes:
        variables: the user's environment.
        work: the folder that the client is started in.
    """

    variables: Mapping[str, str]
    work: Path

    @property
    def home(self) -> Path:
        home = self.variables.get("HOME")
        return Path(home) if home else Path.home()

    def place(self, variable: str, below_home: str) -> Path:
        """Return the folder that the variable names, or else the one below the home."""
        named = self.variables.get(variable)
        return Path(named).expanduser() if named else self.home / below_home

    def folders_around(self) -> Iterator[Path]:
        """Yield the root of the project that the client works in, and what is between it and the folder."""
        around = [self.work, *self.work.parents]
        root = next((place for place, folder in enumerate(around) if (folder / ".git").exists()), None)
        yield from reversed(around if root is None else around[: root + 1])

    def read(self, path: Path) -> Mapping[str, Any]:
        """Return what a file of JSON, JSON5, TOML or YAML says; nothing if there is none.

        Raises:
            LaunchError: it cannot be read, so nobody knows what the user wants.
        """
        text = self.text(path)
        try:
            content = _PARSERS.get(path.suffix, lenient_json)(text)
        except ValueError as error:
            raise LaunchError(_unreadable(path, str(error))) from None
        return content if isinstance(content, Mapping) else {}

    def text(self, path: Path) -> str:
        """Return the text of a file, which is empty if there is none.

        Raises:
            LaunchError: it cannot be read.
        """
        try:
            return path.read_text(encoding="utf-8-sig")
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise LaunchError(_unreadable(path, error.strerror or "")) from None
        except UnicodeDecodeError:
            raise LaunchError(_unreadable(path, "it is not UTF-8")) from None


def _unreadable(path: Path, reason: str) -> str:
    return (
        f"{path} cannot be read ({reason}), so the permissions that you set there cannot be kept. "
        "Repair it, or move it away."
    )


def lenient_json(text: str) -> Any:
    """Parse JSON that may have comments, last commas, names without quotes and texts in single quotes.

    Raises:
        ValueError: it is none.
    """
    plain = _LAST_COMMA.sub(lambda comma: comma[1] or "", _TOKENS.sub(_plain, text))
    return json.loads(plain) if plain.strip() else None


def _plain(token: re.Match[str]) -> str:
    match token.lastgroup:
        case "single":
            return '"' + token[0][1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
        case "comment":
            return " "
        case "key":
            return f'"{token[0]}"'
        case _:
            return token[0]


_PARSERS: Mapping[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".yaml": parse_yaml}
"""By suffix; all other files are JSON, as people write it."""
