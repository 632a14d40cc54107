"""How the KV of pages is stored while no sequence uses it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

type KVScheme = Literal["uniform", "turboquant"]

_ENCODINGS = {"uniform": "encoding 2", "turboquant": "encoding 1"}
"""They count up when `cache.quantize` writes the same numbers in another way."""
TURBOQUANT_BITS = {4: (6, 3), 3.5: (5, 3)}
"""Bits of keys and of values."""


def first_quantized(start: int, page_size: int) -> int:
    """Return where the first page begins that is quantised: at `start` or later, and never at 0.

    The first token of a prompt draws much of the attention of most models, so an error in its key is felt
    everywhere. Its page costs little: all prompts with the same instructions share it.
    """
    return max(ceil(start / page_size), 1) * page_size


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """Quantised KV of one layer.

    Attributes:
        bits: for each element. With 8, keys have nine; of turboquant see `TURBOQUANT_BITS`.
        group_size: elements that share a scale, as far as it divides the width of a head; of turboquant all
            of a head do.
    """

    bits: float
    group_size: int
    scheme: KVScheme = "uniform"

    @property
    def name(self) -> str:
        """What `/stats` calls the KV of such a layer."""
        return f"{'kv' if self.scheme == 'uniform' else 'turbo'}{self.bits:g}"


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Quantised KV, the same in all layers.

    Attributes:
        bits, group_size, scheme: see `LayerFormat`.
        start: position of the first token that is quantised.
    """

    bits: float
    group_size: int
    start: int
    scheme: KVScheme = "uniform"

    @property
    def mode(self) -> str:
        """What `/stats` calls it."""
        return f"{self.scheme}-kv{self.bits:g}"

    @property
    def tag(self) -> str:
        """What tells it from every other format, in page keys and page files."""
        groups = f" group {self.group_size}" if self.scheme == "uniform" else ""
        return f"{self.mode}{groups} from {self.start}, {_ENCODINGS[self.scheme]}"

    def of_layer(self, _: int) -> LayerFormat | None:
        return LayerFormat(self.bits, self.group_size, self.scheme)


@dataclass(frozen=True, slots=True)
class MixedKVFormat:
    """Quantised KV of some layers, each in its own way.

    Attributes:
        layers: with their formats, ascending. Others stay exact.
        start: position of the first token that is quantised.
    """

    layers: Sequence[tuple[int, LayerFormat]]
    start: int

    @property
    def mode(self) -> str:
        """What `/stats` calls it."""
        return "mixed (kv_config.json)"

    @property
    def tag(self) -> str:
        """What tells it from every other format, in page keys and page files."""
        layers = " ".join(f"{layer}:{form.name}/{form.group_size}" for layer, form in self.layers)
        return f"mixed {layers} from {self.start}, {_ENCODINGS['uniform']}"

    def of_layer(self, layer: int) -> LayerFormat | None:
        """Return how a layer is quantised; None if it is not."""
        return dict(self.layers).get(layer)


type PageFormat = KVFormat | MixedKVFormat
