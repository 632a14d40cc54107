"""A reader's knowledge of a block, from a prompt that is read from its beginning to its end.

Written apart from the server's code, from what the notes say alone.
"""

from __future__ import annotations

import re

_CHANGED = r"\[Changed in {}:\n((?:[ +-][^\n]*\n)+)\]"


def known(read: str, name: str, form: str) -> str | None:
    """The block as it is now; None if none is.

    Args:
        name: of the block, as notes have it.
        form: a pattern for its text.
    """
    block: str | None = None
    pattern = rf"\[Now: {form}\]|{form}|{_CHANGED.format(name)}|(\[No longer: {name}\])"
    for match in re.finditer(pattern, read):
        if lines := match[1]:
            assert block is not None, "lines of what is not known"
            block = changed(block, lines.removesuffix("\n").split("\n"))
        else:
            block = None if match[2] else match[0].removeprefix("[Now: ").removesuffix("]").strip()
    return block


def changed(block: str, lines: list[str]) -> str:
    """Each line that is not new is the next such line of the block."""
    old, new, at = block.split("\n"), list[str](), 0
    for line in lines:
        if line[0] == "+":
            new.append(line[1:])
            continue
        place = old.index(line[1:], at)
        new += old[at : place + (line[0] == " ")]
        at = place + 1
    return "\n".join([*new, *old[at:]])
