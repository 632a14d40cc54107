"""`start_llm completion`: has shtab write what makes a shell complete commands, options and values."""
# pyright: reportPrivateUsage=false

import argparse
import re

SHELLS = ("bash", "zsh", "fish")
_FOLDERS = ("FOLDER", "PATH_OR_REPO")


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell. Changes the parser, which must not be used for anything else then."""
    import shtab  # noqa: PLC0415 - the other commands start without it

    _prepare(parser, file=shtab.FILE, folder=shtab.DIRECTORY)
    return f"{shtab.complete(parser, shell)}\n"


def _prepare(parser: argparse.ArgumentParser, **kinds: object) -> None:
    """Say which values are files and folders, and shorten what is shown of each action."""
    for action in parser._actions:
        action.help = short(action.help)
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                listed.help = short(listed.help)
            for below in action.choices.values():
                _prepare(below, **kinds)
        elif action.choices:
            action.choices = tuple(action.choices)  # shtab takes a mapping for commands
        elif action.nargs == argparse.REMAINDER:
            action.complete = kinds["file"]  # pyright: ignore[reportAttributeAccessIssue] - read by shtab
        elif action.metavar in _FOLDERS:
            action.complete = kinds["folder"]  # pyright: ignore[reportAttributeAccessIssue]


def short(text: str | None) -> str:
    """Return the first sentence of a help text."""
    return re.split(r"[.;:](?=\s)| \[[A-Z]", text or "")[0].rstrip(".")
