"""A parser of command lines that says which command or option was probably meant."""

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from start_llm.config.flags import FLAGS
from start_llm.config.foreign_names import FOREIGN_NAMES

_FOREIGN_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("run", "start", "up", "server"), "serve"),
    **dict.fromkeys(("list", "ls"), "models"),
    **dict.fromkeys(("download", "get", "install"), "pull"),
    **dict.fromkeys(("remove", "delete", "uninstall"), "rm"),
    **dict.fromkeys(("ps", "info"), "status"),
    **dict.fromkeys(("kill", "down", "quit"), "stop"),
    **dict.fromkeys(("update",), "upgrade"),
    **dict.fromkeys(("check", "diagnose"), "doctor"),
    **dict.fromkeys(("env", "options"), "settings"),
    "show": "audit",
    "find": "search",
}
"""What other programs call our commands."""
_OWN_OPTIONS = frozenset(name for flag in FLAGS for name in flag.names)
_FOREIGN_OPTIONS: Mapping[str, str] = {
    name: flag.names[0]
    for variable_name, variable in FOREIGN_NAMES.items()
    for flag in reversed(FLAGS)
    if flag.variable == variable
    and (name := f"--{variable_name.lower().replace('_', '-')}") not in _OWN_OPTIONS
}
"""What other servers call our options."""
_CHOICE = re.compile(r"argument (?P<argument>\S+): invalid choice: '(?P<written>[^']*)'")


class SuggestingParser(argparse.ArgumentParser):
    """A parser whose errors say what was probably meant. Its commands are parsed by its own class."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._parser_of(options).error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def error(self, message: str) -> NoReturn:
        meant = self._meant(message)
        super().error(f"{message}\nDid you mean {meant}?" if meant else message)

    def _parser_of(self, options: argparse.Namespace) -> argparse.ArgumentParser:
        """Return the parser of the command that the options are of."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
                below = action.choices.get(str(getattr(options, action.dest, None)))
                return below._parser_of(options) if isinstance(below, SuggestingParser) else self
        return self

    def _meant(self, message: str) -> str | None:
        if choice := _CHOICE.match(message):
            choices = (str(name) for action in self._actions for name in action.choices or ())
            return meant(choice["written"], [*choices], _FOREIGN_COMMANDS)
        if message.startswith("unrecognized arguments: "):
            written = (word.partition("=")[0] for word in message.split() if word.startswith("-"))
            known = [*self._option_string_actions]
            return next(
                (option for word in written if (option := meant(word, known, _FOREIGN_OPTIONS))), None
            )
        return None


def meant(written: str, known: Iterable[str], foreign: Mapping[str, str]) -> str | None:
    """Return the known word that is closest to what was written; None if none is close.

    Args:
        foreign: words of other programs, with what they mean here.
    """
    known = list(known)
    if foreign.get(written) in known:
        return foreign[written]
    close = difflib.get_close_matches(written.lower(), known, n=1)
    return close[0] if close else None
