"""The session turn store: for each beginning of a conversation, the exact tokens that were computed for it.

A *node* stands for a canonical prefix, a *variant* for one sequence of tokens that a model read or wrote for
it. The same visible conversation may have been computed with different thoughts: then a node has several.

Keys are content: a fork, a retry or a sub-agent gets its own branch, and nothing that is written changes what
another conversation finds (the strict-append guard of earlier servers, by construction).
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import NamedTuple

from start_llm.core.canonical import CanonicalKey
from start_llm.telemetry.metrics import TranscriptMetrics
from start_llm.transcripts.guard import Claims, Reading

_MOST_VARIANTS = 32
_SHRUNK_TO = 0.9
_LOOKS_IN_AN_AGE = 10
_TOKEN, _TOKEN_BYTES = "I", 4
_VARIANT_BYTES = 400
"""About what a variant takes beside its tokens."""


class Place(NamedTuple):
    """The end of a message: the key of its prefix, its index, and the tokens up to it."""

    key: CanonicalKey
    depth: int
    length: int


@dataclass(eq=False, slots=True)
class Variant:
    """Tokens up to the end of one message, as what follows the parent's.

    Attributes:
        key: of the node.
        depth: index of the message.
        length: tokens in all.
        readings: of each message behind the parent's.
        claims: whose it is.
        session: where it was computed.
        children: variants that build on this one, by their identity.
    """

    key: CanonicalKey
    depth: int
    parent: Variant | None
    delta: array[int]
    length: int
    readings: tuple[Reading, ...]
    claims: Claims
    session: str
    last_used: float
    children: dict[int, Variant] = field(default_factory=dict[int, "Variant"])

    @property
    def nbytes(self) -> int:
        """With the texts that stand in it, although variants share those of one request."""
        said = (text for one in self.readings for item in one.omitted for text in (item.text, item.said))
        told = (text for one in self.readings for _, text in one.told if text)
        return _TOKEN_BYTES * len(self.delta) + _VARIANT_BYTES + sum(map(getsizeof, (*said, *told)))

    def path(self) -> list[Variant]:
        """This one and all that it builds on, the first message first."""
        found: list[Variant] = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

    def all_readings(self) -> tuple[Reading, ...]:
        """Of each message up to this one."""
        return tuple(reading for variant in self.path() for reading in variant.readings)

    def tokens(self) -> array[int]:
        """All of them, from the first message on."""
        whole = array(_TOKEN)
        for variant in self.path():
            whole.extend(variant.delta)
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the store may keep.

    Attributes:
        most_bytes: of all variants.
        unused_s: age at which an unused variant goes; 0: never.
    """

    most_bytes: int
    unused_s: float = 0


@dataclass(slots=True)
class TranscriptStore:
    """Nodes by key. Safe to use from any thread."""

    limits: Limits
    clock: Callable[[], float] = time.monotonic
    metrics: TranscriptMetrics = field(default_factory=TranscriptMetrics)
    _nodes: dict[CanonicalKey, list[Variant]] = field(default_factory=dict[CanonicalKey, "list[Variant]"])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next_look: float = 0

    def at(self, key: CanonicalKey) -> tuple[Variant, ...]:
        """All that are known of a prefix."""
        with self._lock:
            return tuple(self._nodes.get(key, ()))

    def use(self, variant: Variant) -> None:
        """A conversation goes on from this one."""
        with self._lock:
            now = self.clock()
            for one in variant.path():
                one.last_used = now

    def add(
        self,
        place: Place,
        tokens: array[int],
        readings: Sequence[Reading],
        *,
        parent: Variant | None = None,
        claims: Claims,
        session: str = "",
    ) -> Variant:
        """Tokens were computed for a prefix. The same ones again are the variant that is there.

        Args:
            place: where it ends in the tokens.
            readings: of each message up to this one, and perhaps of more.
            parent: of a shorter prefix; its tokens are a beginning of these.
            claims: whose these tokens are.
        """
        with self._lock:
            parent = parent if parent and self._is_kept(parent) else None
            start, first = (parent.length, parent.depth + 1) if parent else (0, 0)
            new = tuple(readings[first : place.depth + 1])
            delta = tokens[start : place.length]
            variant = self._same(place.key, parent, delta, new)
            if variant is None:
                variant = Variant(
                    key=place.key,
                    depth=place.depth,
                    parent=parent,
                    delta=delta,
                    length=place.length,
                    readings=new,
                    claims=claims,
                    session=session,
                    last_used=self.clock(),
                )
                self._put(variant)
                self._forget_some()
                return variant
            variant.last_used, variant.session = self.clock(), session
            variant.claims.add(claims)
            return variant

    def _is_kept(self, variant: Variant) -> bool:
        return any(one is variant for one in self._nodes.get(variant.key, ()))

    def _same(
        self, key: CanonicalKey, parent: Variant | None, delta: array[int], readings: tuple[Reading, ...]
    ) -> Variant | None:
        for one in self._nodes.get(key, ()):
            if one.parent is parent and one.delta == delta and one.readings == readings:
                return one
        return None

    def _put(self, variant: Variant) -> None:
        variants = self._nodes.setdefault(variant.key, [])
        variants.append(variant)
        if variant.parent:
            variant.parent.children[id(variant)] = variant
        self.metrics.nbytes += variant.nbytes
        self.metrics.variants += 1
        self.metrics.nodes = len(self._nodes)
        if len(variants) > _MOST_VARIANTS:
            self._forget_with_children(min(variants[:-1], key=lambda one: one.last_used))

    def _forget_with_children(self, variant: Variant) -> None:
        behind = [variant]
        for one in behind:
            behind += one.children.values()
        for one in reversed(behind):
            self._forget(one)

    def _forget(self, variant: Variant) -> None:
        """Nothing builds on it."""
        variants = self._nodes[variant.key]
        variants.remove(variant)
        if not variants:
            del self._nodes[variant.key]
        if variant.parent:
            del variant.parent.children[id(variant)]
        self.metrics.nbytes -= variant.nbytes
        self.metrics.variants -= 1
        self.metrics.nodes = len(self._nodes)
        self.metrics.forgotten += 1

    def _forget_some(self) -> None:
        """What is too old, and beyond the bytes what was used least recently; never what others build on."""
        limits, now = self.limits, self.clock()
        is_over = self.metrics.nbytes > limits.most_bytes
        if not is_over and not (limits.unused_s and now >= self._next_look):
            return
        self._next_look = now + limits.unused_s / _LOOKS_IN_AN_AGE
        oldest = now - limits.unused_s if limits.unused_s else -math.inf
        enough = _SHRUNK_TO * limits.most_bytes if is_over else limits.most_bytes
        heap = [(one.last_used, id(one), one) for one in self._leaves()]
        heapq.heapify(heap)
        while heap and (heap[0][0] < oldest or self.metrics.nbytes > enough):
            leaf = heapq.heappop(heap)[2]
            self._forget(leaf)
            if leaf.parent and not leaf.parent.children:
                heapq.heappush(heap, (leaf.parent.last_used, id(leaf.parent), leaf.parent))

    def _leaves(self) -> Iterator[Variant]:
        return (one for variants in self._nodes.values() for one in variants if not one.children)
