"""Read, cut, copy and assemble the KV caches of one network.

A network has one cache for each layer; some caches hold several. `cache.leaves` finds them, and `cache.kinds`
has the table of what each class of *leaf* allows.

Runs on the engine thread. Arrays that are stored are contiguous and evaluated, so that no lazy slice keeps a
large buffer alive and no array changes after it is stored.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from start_llm.cache.arrays import (
    Arrays,
    BorrowedArrays,
    KVPieces,
    KVSlice,
    StateSnapshot,
    TokenRange,
    joined,
    owned_copy,
)
from start_llm.cache.kinds import NonTrimmableLeaf, TrimmableLeaf, kind_of, reuse_of
from start_llm.cache.kv_format import PageFormat
from start_llm.cache.leaves import filled_leaves, leaves, non_trimmable_leaves, trimmable_leaves
from start_llm.cache.pages import EarlierState
from start_llm.cache.quantize.quantizer import KVQuantizer
from start_llm.cache.rewinding import longer_arrays, reach_of, rewound_states, shortest_window
from start_llm.core.model_card import KVAtRest

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Returns freed memory to the system (lesson 14).

glibc, with which MLX allocates on Linux, keeps freed memory that lies between blocks in use.
"""

_SPARE_SHARE = 16
"""A leaf may keep 1/16 of its tokens as unused room, and grows by as much."""
_SMALL_BYTES = 2**20
"""Bytes of an array beside which the 16 KiB that `mx.contiguous` may leave do not matter."""


class Layers:
    """The leaves of one network's caches.

    Args:
        room: tokens that fresh caches can take before they grow, and by which they then grow.

    Attributes:
        unknown: classes without an entry in `cache.kinds`; a network with one has no prompt caching.
        has_state: some leaves are non-trimmable, so a prompt can resume only where their state was kept.
        has_trimmable: some leaves are trimmable.
        window: tokens of the shortest window, if all states are windows, which can be taken back; else 0.
        quantizer: quantises pages; None keeps them as they were computed.
    """

    def __init__(self, network: Any, room: int = 256) -> None:
        self._network = network
        self._room = room
        caches = self.fresh()
        known = [(leaf, reuse_of(leaf)) for leaf in leaves(caches)]
        self.unknown = sorted({_class_name(leaf) for leaf, reuse in known if reuse is None})
        self.has_state = any(isinstance(reuse, NonTrimmableLeaf) for _, reuse in known)
        self.has_trimmable = any(isinstance(reuse, TrimmableLeaf) for _, reuse in known)
        self.window = shortest_window(non_trimmable_leaves(caches))
        self.quantizer: KVQuantizer | None = None

    def quantize_pages(self, form: PageFormat, caches: Sequence[Any]) -> bool:
        """Quantise pages from now on. Returns False if no leaf of these filled caches can be quantised."""
        layers = [layer for layer, cache in enumerate(caches) for _ in trimmable_leaves([cache])]
        quantizer = KVQuantizer.of(form, self.trimmable_arrays(caches), layers)
        if any(quantizer.codecs):
            self.quantizer = quantizer
        return self.quantizer is not None

    @property
    def kv_format_tag(self) -> str:
        """What tells the format of pages from others; empty if they are kept as they were computed."""
        return self.quantizer.format.tag if self.quantizer else ""

    def kv_at_rest(self, caches: Sequence[Any]) -> KVAtRest:
        """Return how pages of caches like these, which hold some tokens, are kept."""
        layers = Counter(self._types(caches))
        most_common = max(layers, key=lambda name: layers[name], default="none")
        return KVAtRest(
            mode=self.quantizer.format.mode if self.quantizer else most_common,
            layers=layers,
            attention=Counter(kind_of(leaf).attention for leaf in leaves(caches) if not leaf.empty()),
            is_quantized=self.quantizer is not None,
        )

    def _types(self, caches: Sequence[Any]) -> Iterator[str]:
        """Yield for each filled leaf the type of its KV or state at rest: kv8, turbo4, bf16 and so on."""
        names = iter(self.quantizer.names if self.quantizer else ())
        for leaf in leaves(caches):
            name = next(names, "") if isinstance(reuse_of(leaf), TrimmableLeaf) else ""
            if name or not leaf.empty():
                yield name or _type_of(leaf)

    def fresh(self, room: int = 0) -> list[Any]:
        """Return empty caches, one for each entry that the network expects.

        Args:
            room: tokens for which memory is allocated at the first write.
        """
        # Not at the top: `start_llm.models` has to be the first to import mlx_lm (lesson 2).
        from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415

        caches = make_prompt_cache(self._network)
        for leaf, _ in trimmable_leaves(caches):
            leaf.step = max(self._room, room)
        return caches

    def room(self, caches: Sequence[Any]) -> int:
        """Return the tokens that filled trimmable leaves can hold without growing; 0 if there are none."""
        return min((_room(leaf, kind) for leaf, kind in filled_leaves(caches)), default=0)

    def reserve(self, caches: Sequence[Any], room: int) -> None:
        """Enlarge filled trimmable leaves to `room` tokens, one after the other."""
        for leaf, kind in filled_leaves(caches):
            if _room(leaf, kind) < room:
                _resize(leaf, kind, room)

    def grow_in_small_steps(self, caches: Sequence[Any]) -> None:
        """Make leaves grow by small shares of themselves once the reserved room is used up."""
        for leaf, _ in filled_leaves(caches):
            leaf.step = self._spare(leaf)

    def compact(self, caches: Sequence[Any]) -> None:
        """Materialize caches that will be kept, and drop most of their unused room."""
        for leaf, kind in filled_leaves(caches):
            if _room(leaf, kind) - leaf.offset > self._spare(leaf):
                _resize(leaf, kind, leaf.offset)
        materialize(caches)

    def _spare(self, leaf: Any) -> int:
        return max(self._room, int(leaf.offset) // _SPARE_SHARE)

    def view(self, caches: Sequence[Any], start: int, end: int) -> KVSlice:
        """Return tokens `start` to `end` of all trimmable leaves as views."""
        whole = KVSlice(tuple(kind.arrays(leaf) for leaf, kind in trimmable_leaves(caches)))
        return whole.part(start, end)

    def cut(self, caches: Sequence[Any], start: int, end: int) -> KVSlice:
        """Return copies of tokens `start` to `end` of all trimmable leaves."""
        cut = KVSlice(
            tuple(
                tuple(owned_copy(array[..., start:end, :]) for array in kind.arrays(leaf))
                for leaf, kind in trimmable_leaves(caches)
            )
        )
        mx.eval([array for leaf in cut.leaves for array in leaf])
        return cut

    def borrow(self, caches: Sequence[Any], start: int, end: int) -> TokenRange:
        """Return views of tokens `start` to `end` of all trimmable leaves; `take` removes them."""
        return BorrowedArrays([leaf] for leaf in self.view(caches, start, end).leaves)

    def cut_out(self, caches: Sequence[Any], start: int, end: int) -> KVPieces:
        """Return copies of tokens `start` to `end` of all trimmable leaves, which keep their positions."""
        return KVPieces(self.cut(caches, start, end).leaves, start, self.quantizer)

    def give_up(self, caches: Sequence[Any]) -> KVPieces:
        """Move the arrays of all trimmable leaves out of the caches, without a copy."""
        sliced = trimmable_leaves(caches)
        pieces = KVPieces([kind.arrays(leaf) for leaf, kind in sliced], packer=self.quantizer)
        for leaf, _ in sliced:
            leaf.keys = leaf.values = None
        return pieces

    def state(
        self, caches: Sequence[Any], reach: int = 0, earlier: EarlierState | None = None, ahead: int = 0
    ) -> StateSnapshot:
        """Return copies of the state of all non-trimmable leaves.

        Args:
            reach: tokens by which it should be possible to take the state back.
            earlier: a state of the same tokens, for what the leaves no longer have of that.
            ahead: tokens by which the leaves are further than the state. They have come there in one forward
                pass, and can be taken back.

        Raises:
            ValueError: `ahead`, of leaves that cannot be taken back.
        """
        if ahead and not self.window:
            raise ValueError("these states cannot be taken back")
        stateful = non_trimmable_leaves(caches)
        if (reach or ahead) and self.window:
            arrays = [
                longer_arrays(leaf, kind, reach + ahead, index, earlier)
                for index, (leaf, kind) in enumerate(stateful)
            ]
        else:
            arrays = [kind.arrays(leaf) for leaf, kind in stateful]
        states = [(part, kind.numbers(leaf)) for (leaf, kind), part in zip(stateful, arrays, strict=True)]
        states = rewound_states(stateful, states, ahead, reach)
        copies = tuple((tuple(map(owned_copy, part)), numbers) for part, numbers in states)
        mx.eval([part for part, _ in copies])
        reaches = (
            reach_of(leaf, kind, part, ahead)
            for (leaf, kind), (part, _) in zip(stateful, copies, strict=True)
        )
        return StateSnapshot(copies, min(reaches, default=0))

    def rewound(self, state: StateSnapshot, tokens: int) -> StateSnapshot:
        """Return views of a state as it was `tokens` tokens before, which is within its reach."""
        if not tokens:
            return state
        return StateSnapshot(rewound_states(non_trimmable_leaves(self.fresh()), state.leaves, tokens))

    def copied(self, part: TokenRange) -> KVSlice:
        """Return copies of consecutive tokens of all trimmable leaves, which `part` holds as views."""
        count = len(trimmable_leaves(self.fresh()))
        return KVSlice(tuple(self._put_together([part], index, 0) for index in range(count)))

    def page(self, part: TokenRange, start: int) -> KVSlice:
        """Return a copy of a page, which begins at position `start`, as pages are kept."""
        packer = self.quantizer
        if packer is None or start < packer.format.start:
            return self.copied(part)
        count = len(trimmable_leaves(self.fresh()))
        pieces = ([packer.packed(index, piece) for piece in part.take(index)] for index in range(count))
        return KVSlice(tuple(_joined(leaf, 0) for leaf in pieces))

    def trimmable_arrays(self, caches: Sequence[Any]) -> list[Arrays]:
        """Return the arrays of each trimmable leaf, with their unused room."""
        return [kind.arrays(leaf) for leaf, kind in trimmable_leaves(caches)]

    def put_trimmable_arrays(self, caches: Sequence[Any], arrays: Sequence[Arrays]) -> None:
        for (leaf, kind), leaf_arrays in zip(trimmable_leaves(caches), arrays, strict=True):
            kind.fill(leaf, leaf_arrays)

    def assemble(
        self,
        parts: Sequence[TokenRange],
        state: StateSnapshot | None,
        length: int,
        copied: Callable[[int], None] = lambda _: None,
        *,
        room: int = 0,
    ) -> list[Any]:
        """Return caches that hold `length` tokens: the parts in order, and the state at their end.

        Args:
            room: tokens that they can take before they grow.
            copied: called with the index of each leaf that has been copied; its source may then be freed.
        """
        caches = self.fresh()
        for index, (leaf, kind) in enumerate(trimmable_leaves(caches)):
            kind.fill(leaf, self._put_together(parts, index, room))
            leaf.offset = length
            copied(index)
        if state is not None:
            self.set_state(caches, state)
        return caches

    def _put_together(self, parts: Sequence[TokenRange], index: int, room: int) -> Arrays:
        """Return a copy of one leaf of all parts, as sequences have it."""
        pieces = [arrays for part in parts for arrays in part.take(index)]
        if self.quantizer:
            pieces = [self.quantizer.unpacked(index, arrays) for arrays in pieces]
        return _joined(pieces, room)

    def set_state(self, caches: Sequence[Any], state: StateSnapshot) -> None:
        """Set the state of non-trimmable leaves, as copies, because some leaves write into their arrays."""
        for (leaf, kind), (arrays, numbers) in zip(non_trimmable_leaves(caches), state.leaves, strict=True):
            copies = tuple(mx.array(array) for array in arrays)
            mx.eval(copies)
            kind.fill(leaf, copies, numbers)

    def give_state(self, caches: Sequence[Any], state: StateSnapshot) -> None:
        """Set the state of non-trimmable leaves to arrays that nobody else uses."""
        for (leaf, kind), (arrays, numbers) in zip(non_trimmable_leaves(caches), state.leaves, strict=True):
            kind.fill(leaf, arrays, numbers)

    def trim(self, caches: Sequence[Any], length: int) -> None:
        """Set the number of tokens that trimmable leaves hold; their arrays have room for as many."""
        for leaf, _ in trimmable_leaves(caches):
            leaf.offset = length

    def release(self) -> None:
        """Return unused memory to the system."""
        mx.clear_cache()
        if _malloc_trim is not None:
            _malloc_trim(0)

    def nbytes(self, caches: Sequence[Any]) -> int:
        """Return the bytes of all leaves, unused room included."""
        return sum(leaf.nbytes for leaf in leaves(caches) if not leaf.empty())

    def arrays(self, caches: Sequence[Any]) -> int:
        """Return the number of arrays in the caches."""
        states = [leaf.state for leaf in leaves(caches) if not leaf.empty()]
        return sum(isinstance(value, mx.array) for _, value in tree_flatten(states))

    def token_bytes(self, caches: Sequence[Any]) -> int:
        """Return the bytes per token in the trimmable leaves."""
        filled = (kind.arrays(leaf) for leaf, kind in filled_leaves(caches))
        return sum(array.nbytes // array.shape[-2] for arrays in filled for array in arrays)


def materialize(caches: Sequence[Any]) -> None:
    """Evaluate what is still lazy, and copy arrays that are views of larger buffers.

    Handles one leaf after the other, so that little memory is held twice (lesson 28).
    """
    for leaf in leaves(caches):
        if not leaf.empty():
            kind_of(leaf).put_state(leaf, tree_map(_let_go, leaf.state))
            mx.eval(leaf.state)


def _joined(pieces: Sequence[Arrays], room: int) -> Arrays:
    whole = tuple(joined(column, room) for column in zip(*pieces, strict=True))
    mx.eval(whole)
    return whole


def _type_of(leaf: Any) -> str:
    """Return the type of a leaf's first array, in short: bf16, f16, f32."""
    first = next(value for _, value in tree_flatten(leaf.state) if isinstance(value, mx.array))
    name = str(first.dtype).removeprefix("mlx.core.")
    return name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u")


def _room(leaf: Any, kind: TrimmableLeaf) -> int:
    return int(kind.arrays(leaf)[0].shape[-2])


def _resize(leaf: Any, kind: TrimmableLeaf, room: int) -> None:
    arrays = tuple(joined([array[..., : leaf.offset, :]], room) for array in kind.arrays(leaf))
    mx.eval(arrays)
    kind.fill(leaf, arrays)


def _let_go(value: Any) -> Any:
    """Return an array that keeps no larger buffer alive. Large arrays are copied only if they are views."""
    if not isinstance(value, mx.array):
        return value
    return owned_copy(value) if value.nbytes < _SMALL_BYTES else mx.contiguous(value)


def _class_name(leaf: Any) -> str:
    """Return the class name, marked for a window that always keeps its first tokens."""
    name = type(leaf).__name__
    return f"{name}(keep={leaf.keep})" if getattr(leaf, "keep", 0) else name
