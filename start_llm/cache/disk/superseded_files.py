"""Tell which files of the disk tier are worth nothing beside a new one: shorter pages, and surplus states.

The engine thread asks how to find them, the disk thread looks. That needs the index and the headers of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from start_llm.cache.disk.disk_index import CachedFile, DiskIndex
    from start_llm.cache.disk.disk_worker import Reader, Superseded
    from start_llm.cache.disk.page_file import FileHeader
    from start_llm.cache.pages import Page

_MOST_STATES = 6
"""States up to and including a new one, of one conversation on the disk."""
_MOST_READ = 32
"""Files that were not read since the start and are read for one that is written."""

type _Path = Sequence[tuple[bytes, tuple[int, ...]]]
"""The keys on the way to a state, the root's first, each with the tokens that follow there."""


def superseded_by(header: FileHeader, parent: Page, page_size: int) -> Superseded:
    """Return what finds the files that a new one supersedes. It knows no page: the disk thread calls it.

    Args:
        header: the new file's.
        parent: the page before its tokens.
        page_size: tokens of a full page.
    """
    if header.kind == "pages":
        return partial(_shorter_pages, header)
    return partial(_states_beyond, _path_to(parent, header.tokens), page_size)


def _shorter_pages(header: FileHeader, index: DiskIndex, _: Reader) -> list[CachedFile]:
    """Return the shorter pages that a new one begins with, of those whose header is known."""
    return [
        file
        for file in index.after("pages", header.parent)
        if file.header
        and len(file.header.tokens) < len(header.tokens)
        and header.tokens[: len(file.header.tokens)] == file.header.tokens
    ]


def _path_to(page: Page | None, tail: tuple[int, ...]) -> _Path:
    """Return the path to a state that is `tail` after a page."""
    path: list[tuple[bytes, tuple[int, ...]]] = []
    while page is not None:
        path.append((page.key, tail))
        page, tail = page.parent, page.tokens
    return path[::-1]


def _states_beyond(path: _Path, page_size: int, index: DiskIndex, header_of: Reader) -> list[CachedFile]:
    """Return the states before a new one that are too many beside it.

    The first one stays, because other conversations share it, and so does the last one: where the new one
    is the end of a reply, a client that changes the reply goes on from the end of its prompt. Of the others
    those go that save the fewest tokens. States of other conversations do not count.

    Args:
        path: to the new state.
    """
    end = (len(path) - 1) * page_size + len(path[-1][1])
    on_path = _states_on(path, page_size, index, header_of)
    states = sorted((state for state in on_path if state[0] < end), key=lambda state: state[0])
    beyond: list[CachedFile] = []
    while len(states) >= _MOST_STATES:
        saved = {place: states[place][0] - states[place - 1][0] for place in range(1, len(states) - 1)}
        beyond.append(states.pop(min(saved, key=lambda place: saved[place]))[1])
    return beyond


def _states_on(
    path: _Path, page_size: int, index: DiskIndex, header_of: Reader
) -> Iterator[tuple[int, CachedFile]]:
    """Yield the states on a path, each with the tokens up to it. Reads what was not read since the start."""
    left = _MOST_READ
    for depth, (key, tokens) in enumerate(path):
        for file in index.after("states", key):
            left -= file.header is None
            header = file.header or (header_of(file) if left >= 0 else None)
            if header and header.tokens == tokens[: len(header.tokens)]:
                yield depth * page_size + len(header.tokens), file
