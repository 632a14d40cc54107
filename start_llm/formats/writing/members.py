"""Builds a grammar for members in a fixed order, some of them optional."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from start_llm.core.chat import Json
from start_llm.formats.writing.lark import Lark


def separated(lark: Lark, members: Mapping[str, str], required: Collection[Json], comma: str) -> str:
    """Return a grammar for comma-separated members. Each possible first member is one alternative.

    Args:
        members: the expression of each member, by name.
        comma: an expression.
    """
    ways: list[str] = []
    after, is_open = "", True
    for name, member in reversed(list(members.items())):
        if name in required:
            ways, is_open = [], False
        ways.append(f"{member} {after}".strip())
        next_one = f"({comma} {member}){'' if name in required else '?'}"
        after = lark.rule(f"{next_one} {after}".strip())
    first = lark.either(*reversed(ways))
    return f"({first})?" if is_open else first
