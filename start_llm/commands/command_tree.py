"""Read an argparse parser as a tree of commands, so that completion offers what the parser takes."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_KINDS: dict[str, Literal["file", "folder"]] = {"FOLDER": "folder", "PATH_OR_REPO": "folder"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A value on the command line, of an option or on its own.

    Attributes:
        name: what it is, such as FOLDER.
        choices: its values, if there are only these.
        kind: what else to offer.
        is_rest: it and everything behind it belong to another program.
    """

    name: str
    choices: tuple[str, ...]
    kind: Literal["file", "folder", "nothing"]
    is_rest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option.

    Attributes:
        value: None for a switch.
    """

    names: tuple[str, ...]
    about: str
    value: Operand | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command with what it takes.

    Attributes:
        path: its name, with those of the commands that it belongs to.
    """

    path: tuple[str, ...]
    about: str
    options: tuple[Option, ...]
    operands: tuple[Operand, ...]
    commands: tuple[Command, ...]

    @property
    def name(self) -> str:
        return self.path[-1] if self.path else ""

    def all(self) -> Iterator[Command]:
        """Yield this command and all below it."""
        yield self
        for command in self.commands:
            yield from command.all()


def command_tree(parser: argparse.ArgumentParser) -> Command:
    """Return the commands of a parser."""
    return _command(parser, (), "")


def _command(parser: argparse.ArgumentParser, path: tuple[str, ...], about: str) -> Command:
    options: list[Option] = []
    operands: list[Operand] = []
    commands: list[Command] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            abouts = {one.dest: one.help for one in action._choices_actions}
            commands += [
                _command(below, (*path, name), short(abouts.get(name)))
                for name, below in action.choices.items()
            ]
        elif action.option_strings:
            value = None if action.nargs == 0 else _operand(action)
            options.append(Option(names=tuple(action.option_strings), about=short(action.help), value=value))
        else:
            operands.append(_operand(action))
    return Command(
        path=path,
        about=about,
        options=tuple(options),
        operands=tuple(operands),
        commands=tuple(commands),
    )


def _operand(action: argparse.Action) -> Operand:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    is_rest = action.nargs == argparse.REMAINDER
    return Operand(
        name=name,
        choices=tuple(map(str, action.choices or ())),
        kind="file" if is_rest else _KINDS.get(name, "nothing"),
        is_rest=is_rest,
    )


def short(text: str | None) -> str:
    """Return the first sentence of a help text."""
    plain = (text or "").replace("%%", "%")
    return re.split(r"[.;:](?=\s)| \[[A-Z]", plain)[0].rstrip(".")
