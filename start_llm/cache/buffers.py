"""Arrays as bytes: what the disk thread writes to files, and the buffers into which it reads them.

Runs on the engine thread, which makes every array. The disk thread gets memory views of arrays that are
evaluated and that nobody changes meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx

from start_llm.cache.arrays import Arrays, KVSlice, StateSnapshot
from start_llm.cache.disk.page_file import TensorLayout

if TYPE_CHECKING:
    from start_llm.cache.layers import Layers

_DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F64": mx.float64,
}
"""MLX's types by safetensors' names."""
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

type Tensors = dict[str, TensorLayout]
"""Layouts by name, in the order of their data."""
type Targets = list[list[memoryview]]
"""For each tensor of a file the buffers that take its bytes."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The tensors of a file that is to be written.

    Attributes:
        contents: their bytes. They keep the arrays alive.
    """

    tensors: Tensors
    contents: list[memoryview]


def outgoing(kv: KVSlice, state: StateSnapshot | None = None) -> Outgoing:
    """Return contiguous, evaluated arrays as the tensors of a file."""
    named = [
        *_named("kv", kv.leaves),
        *_named("state", [arrays for arrays, _ in state.leaves] if state else []),
    ]
    return Outgoing({name: _layout(array) for name, array in named}, [_bytes(array) for _, array in named])


def _named(what: str, leaves: Sequence[Arrays]) -> Iterator[tuple[str, mx.array]]:
    for leaf, arrays in enumerate(leaves):
        for index, array in enumerate(arrays):
            yield f"{what}.{leaf}.{index}", array


def _layout(array: mx.array) -> TensorLayout:
    return TensorLayout(_DTYPE_NAMES[array.dtype], tuple(array.shape))


def _bytes(array: mx.array) -> memoryview:
    return memoryview(cast("Any", array)).cast("B") if array.size else memoryview(bytearray())


@dataclass(slots=True)
class KVShape:
    """Types and shapes of the arrays of a network's trimmable leaves.

    Attributes:
        leaves: for each leaf the layouts of its arrays for 0 tokens.
        packed: the same, for quantised pages.
        packed_from: position from which pages are quantised; None: no page is.
    """

    leaves: list[tuple[TensorLayout, ...]]
    packed: list[tuple[TensorLayout, ...]] = field(default_factory=list["tuple[TensorLayout, ...]"])
    packed_from: int | None = None

    @classmethod
    def of(cls, layers: Layers, caches: Sequence[Any]) -> KVShape:
        """Return the shape of caches that hold some tokens."""
        arrays = layers.trimmable_arrays(caches)
        shape = cls([_empty(leaf) for leaf in arrays])
        if packer := layers.quantizer:
            shape.packed = [_empty(packer.packed(index, leaf)) for index, leaf in enumerate(arrays)]
            shape.packed_from = packer.format.start
        return shape

    def tensors(self, tokens: int) -> Tensors:
        """Return the tensors of this many tokens that are not quantised."""
        return _tensors(self.leaves, tokens)

    def page(self, start: int, tokens: int) -> Tensors:
        """Return the tensors of a page of this many tokens that begins at position `start`."""
        return _tensors(self.packed if self.is_packed(start) else self.leaves, tokens)

    def is_packed(self, start: int) -> bool:
        """Return whether a page that begins there is quantised."""
        return self.packed_from is not None and start >= self.packed_from

    def nothing(self) -> KVSlice:
        """Return arrays for 0 tokens."""
        return KVSlice(tuple(tuple(map(_zeros, layouts)) for layouts in self.leaves))


def _empty(leaf: Arrays) -> tuple[TensorLayout, ...]:
    return tuple(_resized(_layout(array), 0) for array in leaf)


def _tensors(leaves: Sequence[tuple[TensorLayout, ...]], tokens: int) -> Tensors:
    return {
        f"kv.{leaf}.{index}": _resized(layout, tokens)
        for leaf, layouts in enumerate(leaves)
        for index, layout in enumerate(layouts)
    }


def _resized(layout: TensorLayout, tokens: int) -> TensorLayout:
    """Return the layout for another number of tokens; axis -2 is the token axis."""
    return TensorLayout(layout.dtype, (*layout.shape[:-2], tokens, layout.shape[-1]))


def _zeros(layout: TensorLayout) -> mx.array:
    array = mx.zeros(layout.shape, _DTYPES[layout.dtype])
    mx.eval(array)
    return array


@dataclass(slots=True)
class _StagedPage:
    """A page that is read into buffers beside the caches.

    Attributes:
        is_packed: it is quantised.
        contents: one buffer for each tensor, from the moment at which it is read.
    """

    start: int
    layouts: list[TensorLayout]
    is_packed: bool
    contents: list[bytearray] = field(default_factory=list[bytearray])


@dataclass(slots=True)
class Incoming:
    """Buffers for files that are read into the caches of a sequence.

    Quantised pages are read beside the caches everywhere.

    Args:
        is_in_place: bytes are read straight into the arrays. If not (the memory of a CUDA device), they are
            read into buffers beside them, and `take` copies them.
    """

    layers: Layers
    caches: list[Any]
    is_in_place: bool = True
    _views: list[_View] = field(default_factory=list["_View"])
    _pages: list[_StagedPage | None] = field(default_factory=list["_StagedPage | None"])
    _taken: int = 0
    _spare: deque[list[bytearray]] = field(default_factory=deque["list[bytearray]"])
    _state: list[tuple[TensorLayout, mx.array | bytearray]] = field(
        default_factory=list[tuple[TensorLayout, "mx.array | bytearray"]]
    )

    def page(self, start: int, tokens: int) -> Callable[[], Targets]:
        """Return what cuts the buffers for the KV of `tokens` tokens from position `start` on.

        That takes a while for many layers, so the disk thread calls it.
        """
        arrays = [array for leaf in self.layers.trimmable_arrays(self.caches) for array in leaf]
        if self.is_in_place:
            self._views = self._views or [_View.of(array) for array in arrays]
            self._pages.append(None)
            return partial(_rows_of_all, self._views, start, tokens)
        return self._beside(start, [_resized(_layout(array), tokens) for array in arrays], is_packed=False)

    def packed_page(self, start: int, tensors: Tensors) -> Callable[[], Targets]:
        """Return what makes the buffers for a quantised page."""
        return self._beside(start, list(tensors.values()), is_packed=True)

    def _beside(self, start: int, layouts: list[TensorLayout], *, is_packed: bool) -> Callable[[], Targets]:
        page = _StagedPage(start, layouts, is_packed)
        self._pages.append(page)
        return partial(self._stage, page)

    def _stage(self, page: _StagedPage) -> Targets:
        """Give a page buffers. Runs on the disk thread, since fresh memory is as slow as a disk."""
        sizes = [layout.nbytes for layout in page.layouts]
        spare = self._spare.pop() if self._spare else []
        page.contents = spare if list(map(len, spare)) == sizes else list(map(bytearray, sizes))
        return [[memoryview(content)] for content in page.contents]

    def state(self, layouts: Sequence[TensorLayout]) -> Targets:
        """Return the buffers for the state of all non-trimmable leaves."""
        self._state = [
            (layout, _zeros(layout) if self.is_in_place else bytearray(layout.nbytes)) for layout in layouts
        ]
        return [
            [_bytes(buffer) if isinstance(buffer, mx.array) else memoryview(buffer)]
            for _, buffer in self._state
        ]

    @property
    def takes_early(self) -> bool:
        """True if `take` may be called before all is read: nothing is read in place meanwhile."""
        return not self._views

    def take(self, done: int) -> None:
        """Copy what is read beside the caches into them.

        Args:
            done: number of pages, in their order, that were read and are right.
        """
        for index in range(self._taken, min(done, len(self._pages))):
            page, self._pages[index], self._taken = self._pages[index], None, index + 1
            if page:
                self._copy_page(page)
                self._spare.append(page.contents)

    def finish(self, done: int, length: int, state: Sequence[tuple[int, tuple[int, ...]]] = ()) -> None:
        """Make the caches hold `length` tokens.

        Args:
            done: see `take`.
            state: for each non-trimmable leaf the number of its arrays and its numbers, if there is state.
        """
        self._views.clear()
        self.take(done)
        self._pages.clear()
        self._spare.clear()
        self.layers.trim(self.caches, length)
        if state:
            arrays = iter([_array(layout, content) for layout, content in self._state])
            leaves = [(tuple(next(arrays) for _ in range(count)), numbers) for count, numbers in state]
            self.layers.give_state(self.caches, StateSnapshot(tuple(leaves)))

    def _copy_page(self, page: _StagedPage) -> None:
        """Copy a page into the caches. Its buffers are free afterwards."""
        leaves = self.layers.trimmable_arrays(self.caches)
        stored = map(_array, page.layouts, page.contents)
        for index, leaf in enumerate(leaves):
            for whole, part in zip(leaf, self._parts(page, index, len(leaf), stored), strict=True):
                if part.size:
                    whole[..., page.start : page.start + part.shape[-2], :] = part
        mx.eval(leaves)
        self.layers.put_trimmable_arrays(self.caches, leaves)

    def _parts(self, page: _StagedPage, index: int, arrays: int, stored: Iterator[mx.array]) -> Arrays:
        """Return the arrays of one leaf of a page, as the caches hold them."""
        quantizer = self.layers.quantizer
        if not page.is_packed or quantizer is None:
            return tuple(islice(stored, arrays))
        return quantizer.unpacked(index, tuple(islice(stored, quantizer.packed_count(index) or arrays)))


class _View(NamedTuple):
    """The bytes of an array.

    Attributes:
        width: bytes of a token in a row.
        room: tokens of a row.
        rows: indexes of the axes before the token axis.
    """

    whole: memoryview
    width: int
    room: int
    rows: int

    @classmethod
    def of(cls, array: mx.array) -> _View:
        width, room = array.shape[-1] * array.itemsize, array.shape[-2]
        return cls(_bytes(array), width, room, array.nbytes // (width * room) if array.size else 0)

    def part(self, start: int, tokens: int) -> list[memoryview]:
        """Return the bytes of these tokens, by row. There is none in an array without elements, whose width
        may be 0.
        """
        if not self.rows:
            return []
        begins = range(start * self.width, self.rows * self.room * self.width, self.room * self.width)
        return [self.whole[begin : begin + tokens * self.width] for begin in begins]


def _rows_of_all(views: Sequence[_View], start: int, tokens: int) -> Targets:
    return [view.part(start, tokens) for view in views]


def _array(layout: TensorLayout, content: mx.array | bytearray) -> mx.array:
    if isinstance(content, mx.array):
        return content
    if not content:
        return _zeros(layout)
    return mx.view(mx.array(cast("Any", memoryview(content))), _DTYPES[layout.dtype]).reshape(layout.shape)
