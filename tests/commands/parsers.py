"""What a parser of command lines takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of its commands, by name."""
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: below for group in groups for name, below in group.choices.items()}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def all_parsers(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """The parser and those of all commands below it, with the words that lead to them."""
    yield path, parser
    for name, below in commands_of(parser).items():
        yield from all_parsers(below, (*path, name))
