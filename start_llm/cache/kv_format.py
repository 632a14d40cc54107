"""How the KV of pages is stored while no sequence uses it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

_ENCODING = "encoding 2"
"""Counts up when `cache.quantize` writes the same numbers in another way."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Quantised KV.

    Attributes:
        bits: for each element; 4 or 8. With 8, keys have nine.
        group_size: elements that share a scale, as far as it divides the width of a head.
        start: position of the first token that is quantised.
    """

    bits: int
    group_size: int
    start: int

    @classmethod
    def from_page(cls, bits: int, group_size: int, start: int, page_size: int) -> KVFormat:
        """Return a format that starts with a page: the first that begins at `start` or later."""
        return cls(bits, group_size, ceil(start / page_size) * page_size)

    @property
    def mode(self) -> str:
        """What `/stats` calls it."""
        return f"uniform-kv{self.bits}"

    @property
    def tag(self) -> str:
        """What tells it from every other format, in page keys and page files."""
        return f"{self.mode} group {self.group_size} from {self.start}, {_ENCODING}"

    def group_of(self, width: int) -> int:
        """Return the elements of this many that share a scale."""
        return gcd(width, self.group_size)
