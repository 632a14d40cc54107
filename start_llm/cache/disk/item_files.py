"""Turn pages, checkpoints and the ends of sequence caches into files of the disk tier.

Owned by the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from start_llm.cache.buffers import Outgoing, outgoing
from start_llm.cache.conversations import page_before
from start_llm.cache.disk.page_file import FileHeader
from start_llm.cache.pages import CacheItem, Checkpoint, Page, SequenceCache, page_key
from start_llm.core.thread_owners import ENGINE, owned_by

if TYPE_CHECKING:
    from start_llm.cache.arrays import KVSlice, StateSnapshot
    from start_llm.cache.buffers import KVShape
    from start_llm.cache.disk.disk_index import FileName
    from start_llm.cache.layers import Layers
    from start_llm.cache.page_store import PageStore


class NewFile(NamedTuple):
    """A file that is to be written. Its content holds arrays of MLX."""

    header: FileHeader
    content: Outgoing


@owned_by(ENGINE)
class ItemFiles:
    """The files of one network's items.

    Args:
        shape: of the network's KV.
    """

    def __init__(self, layers: Layers, store: PageStore, shape: KVShape) -> None:
        self._layers = layers
        self._store = store
        self._shape = shape

    def name(self, item: CacheItem) -> FileName:
        """Return the name of an item's file, which needs no copy."""
        match item:
            case Page():
                return "pages", item.key
            case Checkpoint():
                return "states", page_key(item.page.key, item.tail)
            case SequenceCache():
                kind = "states" if self._layers.has_state else "pages"
                return kind, page_key(item.end_page.key, item.tokens[item.end_page.end :])

    def new(self, item: CacheItem) -> NewFile:
        """Return a file with a copy of an item.

        Raises:
            ValueError: a page whose KV is lost, or a root.
        """
        tokens, content, numbers = self._content(item)
        parent, (kind, key) = page_before(item), self.name(item)
        is_packed = kind == "pages" and self._shape.is_packed(parent.end)
        form = self._layers.kv_format_tag if is_packed else ""
        return NewFile(FileHeader(kind, key, parent.key, tokens, content.tensors, numbers, form), content)

    def _content(self, item: CacheItem) -> tuple[tuple[int, ...], Outgoing, tuple[tuple[int, ...], ...]]:
        """Return its tokens, its tensors and its numbers."""
        match item:
            case Page():
                if item.holder is None:
                    raise ValueError("a page whose KV is lost cannot be written")
                part = self._store.part(item.holder, item.start, item.end)
                return item.tokens, outgoing(self._layers.page(part, item.start)), ()
            case Checkpoint():
                state, tail = item.state, item.tail_cut
                kv = self._layers.copied(tail.part(0, len(item.tail))) if tail else self._shape.nothing()
                return item.tail, outgoing(kv, state), _numbers(state)
            case SequenceCache():
                page = item.end_page
                tokens = tuple(item.tokens[page.end :])
                kv = self._end(item.caches, page.end, len(item.tokens)) if tokens else self._shape.nothing()
                state = self._layers.state(item.caches) if self._layers.has_state else None
                return tokens, outgoing(kv, state), _numbers(state) if state else ()

    def _end(self, caches: list[Any], start: int, end: int) -> KVSlice:
        """Return the tokens after the last full page: beside a state as they are, else as a page."""
        if self._layers.has_state:
            return self._layers.cut(caches, start, end)
        return self._layers.page(self._layers.borrow(caches, start, end), start)


def _numbers(state: StateSnapshot) -> tuple[tuple[int, ...], ...]:
    return tuple(numbers for _, numbers in state.leaves)
