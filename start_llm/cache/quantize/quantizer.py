"""Quantise the arrays of leaves, and restore them.

Codes are chosen so that quantising what was restored gives them again, to the bit: a conversation whose pages
are restored and cut in every turn loses its precision once.

Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.cache.kv_format import TURBOQUANT_BITS, LayerFormat, PageFormat
from start_llm.cache.quantize.packing import Arrays
from start_llm.cache.quantize.rotated import RotatedCodec, rotated_codecs
from start_llm.cache.quantize.uniform import UniformCodec, uniform_codecs

type _Codec = RotatedCodec | UniformCodec


@dataclass(frozen=True, slots=True)
class KVQuantizer:
    """Quantises the arrays of a network's trimmable leaves.

    Attributes:
        codecs: for each leaf those of its arrays; () if the leaf stays as it is.
        names: what `/stats` calls the KV of each leaf; empty if it stays as it is.
    """

    format: PageFormat
    codecs: tuple[Sequence[_Codec], ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, form: PageFormat, leaves: Sequence[Arrays], layers: Sequence[int] = ()) -> KVQuantizer:
        """Return a quantiser for leaves like these, which hold some tokens.

        Args:
            layers: the layer of each leaf; if there are none, one leaf for each layer.
        """
        forms = [form.of_layer(layer) for layer in layers or range(len(leaves))]
        codecs = tuple(_codecs(layer_form, arrays) for layer_form, arrays in zip(forms, leaves, strict=True))
        names = tuple(
            layer_form.name if layer_form and leaf_codecs else ""
            for layer_form, leaf_codecs in zip(forms, codecs, strict=True)
        )
        return cls(form, codecs, names)

    def quantizes(self, index: int) -> bool:
        """Return whether this leaf is quantised."""
        return bool(self.codecs[index])

    def packed(self, index: int, arrays: Arrays) -> Arrays:
        """Return codes and scales of each array of a leaf; themselves if they are quantised."""
        if not self.codecs[index] or self._is_packed(index, arrays):
            return arrays
        pairs = zip(self.codecs[index], arrays, strict=True)
        return tuple(part for codec, array in pairs for part in codec.packed(array))

    def unpacked(self, index: int, arrays: Arrays) -> Arrays:
        """Return the arrays of a leaf as sequences have them."""
        if not self._is_packed(index, arrays):
            return arrays
        triples = zip(self.codecs[index], arrays[::2], arrays[1::2], strict=True)
        return tuple(codec.restored(codes, scales) for codec, codes, scales in triples)

    def token_bytes(self, index: int) -> int:
        """Return the bytes of a token in a quantised leaf."""
        return sum(codec.token_bytes for codec in self.codecs[index])

    def packed_count(self, index: int) -> int:
        """Return the number of arrays of a leaf that is quantised; 0 if it stays as it is."""
        return 2 * len(self.codecs[index])

    def _is_packed(self, index: int, arrays: Arrays) -> bool:
        return bool(self.codecs[index]) and len(arrays) == self.packed_count(index)


def _codecs(form: LayerFormat | None, arrays: Arrays) -> Sequence[_Codec]:
    if form is None:
        return ()
    if form.scheme == "turboquant":
        return rotated_codecs(*TURBOQUANT_BITS[form.bits], arrays)
    return uniform_codecs(int(form.bits), form.group_size, arrays)
