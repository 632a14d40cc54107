"""Members that stand in a certain order, some of which may be missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from start_llm.core.chat import Json
from start_llm.formats.writing.lark import Lark


def separated(lark: Lark, members: Mapping[str, str], required: Collection[Json], comma: str) -> str:
    """Members with a comma between them: a way for each that may be the first, and one without any.

    Args:
        members: the expression of each, by its name.
        comma: an expression.
    """
    ways: list[str] = []
    behind, is_open = "", True
    for name, member in reversed(list(members.items())):
        if name in required:
            ways, is_open = [], False
        ways.append(f"{member} {behind}".strip())
        next_one = f"({comma} {member}){'' if name in required else '?'}"
        behind = lark.rule(f"{next_one} {behind}".strip())
    first = lark.either(*reversed(ways))
    return f"({first})?" if is_open else first
