"""Stores the exact tokens that were computed for each prefix of a conversation: the transcript store.

A *node* stands for a canonical prefix. A *variant* is one token sequence that a model read or wrote for it. A
node has several variants if the same visible conversation was computed with different reasoning.

Keys are derived from content, so a fork, a retry or a sub-agent gets its own branch, and what is written
replaces nothing that another conversation has written. Conversations of one key find each other's variants;
`transcripts.guard` decides which of them they may take.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from start_llm.core.canonical import CanonicalKey
from start_llm.storage.database import NO_TABLE, DatabaseRow, DatabaseTable
from start_llm.storage.database_file import UNREADABLE, decode_json, encode_json
from start_llm.telemetry.metrics import TranscriptSizes
from start_llm.transcripts.recorded_details import Claims, MessageDetails
from start_llm.transcripts.rows import claims_json, claims_of, details_of

_MAX_VARIANTS = 32
_SHRUNK_TO = 0.9
_LOOKS_IN_AN_AGE = 10
_TOKEN, _TOKEN_BYTES = "I", 4
_KEY_BYTES = 16
_VARIANT_BYTES = 1100
"""Approximate size of a variant without its tokens, with its details and its place in the store."""
_TEXT_BYTES = 64
"""Approximate size of a text without its characters."""


class PrefixNode(NamedTuple):
    """The end of a message: key of the prefix, index of its last message, number of its tokens, and whose."""

    key: CanonicalKey
    depth: int
    length: int
    tenant: bytes = b""


@dataclass(eq=False, slots=True)
class Variant:
    """Tokens up to the end of one message, stored as the difference from a parent.

    Attributes:
        key: key of the node.
        depth: index of the message.
        delta: the tokens after the parent's.
        length: number of tokens, the parent's included.
        details: details of the messages after the parent's.
        claims: evidence of whose tokens these are.
        tenant: for whom they were computed.
        session: session that computed them last.
        number: names it in the database; greater than the parent's.
        children: variants that build on this one, by `id()`.
    """

    key: CanonicalKey
    depth: int
    parent: Variant | None
    delta: array[int]
    length: int
    details: tuple[MessageDetails, ...]
    claims: Claims
    tenant: bytes
    session: str
    last_used: float
    number: int = 0
    children: dict[int, Variant] = field(default_factory=dict[int, "Variant"])

    @property
    def nbytes(self) -> int:
        """Size in bytes. Texts of details count in full, although the variants of a request share them."""
        omitted = (item for details in self.details for item in details.omitted)
        texts = [text for item in omitted for text in (item.text, item.note_text)]
        texts += [text for details in self.details for _, text in details.noted if text]
        return _TOKEN_BYTES * len(self.delta) + _VARIANT_BYTES + sum(map(_text_bytes, texts))

    def path(self) -> list[Variant]:
        """Return this variant and its ancestors, the first message first."""
        path: list[Variant] = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    def all_details(self) -> tuple[MessageDetails, ...]:
        """Return the details of each message up to this one."""
        return tuple(details for variant in self.path() for details in variant.details)

    def tokens(self) -> array[int]:
        """Return all tokens from the first message on."""
        whole = array(_TOKEN)
        for variant in self.path():
            whole.extend(variant.delta)
        return whole


@dataclass(slots=True)
class TranscriptStore:
    """Variants by the key of their node. Safe to use from any thread.

    Attributes:
        max_bytes: limit for the size of all variants.
        cache_ttl_s: seconds without use after which a variant is removed; 0: never.
        table: keeps them for the next process.
    """

    max_bytes: int
    cache_ttl_s: float = 0
    clock: Callable[[], float] = time.monotonic
    metrics: TranscriptSizes = field(default_factory=TranscriptSizes)
    table: DatabaseTable = NO_TABLE
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _nodes: dict[CanonicalKey, list[Variant]] = field(default_factory=dict[CanonicalKey, "list[Variant]"])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next_look: float = 0

    def __post_init__(self) -> None:
        self._load(self.table)

    def at(self, key: CanonicalKey) -> tuple[Variant, ...]:
        """Return all variants of a prefix."""
        with self._lock:
            return tuple(self._nodes.get(key, ()))

    def returning(self, count: int, within_s: float) -> list[Variant]:
        """Return the ends of the recent conversations with the most messages, one for each session.

        Args:
            within_s: seconds since their last use, at most.
        """
        with self._lock:
            oldest = self.clock() - within_s
            recent = (variant for variant in self._leaves() if variant.last_used >= oldest)
            ends: dict[tuple[bytes, str], Variant] = {}
            for variant in sorted(recent, key=lambda variant: (variant.depth, variant.last_used)):
                ends[variant.tenant, variant.session] = variant
            return heapq.nlargest(
                count, ends.values(), key=lambda variant: (variant.depth, variant.last_used)
            )

    def use(self, variant: Variant) -> None:
        """Mark a variant and its ancestors as used now."""
        with self._lock:
            now = self.clock()
            for used in variant.path():
                used.last_used = now
            self.table.touch(_row_key(variant.number))

    def add(
        self,
        place: PrefixNode,
        tokens: array[int],
        details: Sequence[MessageDetails],
        *,
        parent: Variant | None = None,
        claims: Claims,
        session: str = "",
    ) -> Variant:
        """Add the tokens of a prefix. If an equal variant exists, update and return that one.

        Args:
            place: the prefix; `tokens` may be longer.
            details: of each message up to the prefix's end; there may be more.
            parent: variant of a shorter prefix, with whose tokens these begin.
            claims: evidence of whose tokens these are.
            session: session that computed them.
        """
        with self._lock:
            parent = parent if parent and self._is_kept(parent) else None
            start, first = (parent.length, parent.depth + 1) if parent else (0, 0)
            new = tuple(details[first : place.depth + 1])
            delta = tokens[start : place.length]
            variant = self._same(place.key, parent, delta, new)
            if variant is None:
                variant = Variant(
                    key=place.key,
                    depth=place.depth,
                    parent=parent,
                    delta=delta,
                    length=place.length,
                    details=new,
                    claims=claims.copy(),
                    tenant=place.tenant,
                    session=session,
                    last_used=self.clock(),
                    number=next(self._numbers),
                )
                self._write(variant)
                self._put(variant)
                self._forget_some()
                return variant
            variant.last_used, variant.session = self.clock(), session
            variant.claims.add(claims)
            self._write(variant)
            return variant

    def _load(self, table: DatabaseTable) -> None:
        """Add the variants of the table. One whose parent is missing is rejected, so its children are too."""
        loaded: dict[int, Variant] = {}
        now, last = self.clock(), -1
        for row in sorted(table.rows()):
            last = int.from_bytes(row.key, "big")
            variant = _variant(row, last, loaded, now)
            if variant is None:
                table.reject(row.key)
            else:
                loaded[last] = variant
        self._numbers = itertools.count(last + 1)
        # `use` has marked whole paths, but only the row of the last variant.
        for variant in reversed(loaded.values()):
            if variant.parent:
                variant.parent.last_used = max(variant.parent.last_used, variant.last_used)
        for variant in loaded.values():
            if variant.parent is None or self._is_kept(variant.parent):
                self._put(variant)
            else:
                table.reject(_row_key(variant.number))
        self._forget_some()

    def _write(self, variant: Variant) -> None:
        self.table.put(_row_key(variant.number), _row(variant))

    def _is_kept(self, variant: Variant) -> bool:
        return any(kept is variant for kept in self._nodes.get(variant.key, ()))

    def _same(
        self,
        key: CanonicalKey,
        parent: Variant | None,
        delta: array[int],
        details: tuple[MessageDetails, ...],
    ) -> Variant | None:
        for known in self._nodes.get(key, ()):
            if known.parent is parent and known.delta == delta and known.details == details:
                return known
        return None

    def _put(self, variant: Variant) -> None:
        variants = self._nodes.setdefault(variant.key, [])
        variants.append(variant)
        if variant.parent:
            variant.parent.children[id(variant)] = variant
        self.metrics.nbytes += variant.nbytes
        self.metrics.variants += 1
        self.metrics.nodes = len(self._nodes)
        if len(variants) > _MAX_VARIANTS:
            self._forget_with_children(min(variants[:-1], key=lambda other: other.last_used))

    def _forget_with_children(self, variant: Variant) -> None:
        after = [variant]
        for parent in after:
            after += parent.children.values()
        for leaf in reversed(after):
            self._forget(leaf)

    def _forget(self, variant: Variant) -> None:
        """Remove a variant that no other one builds on."""
        variants = self._nodes[variant.key]
        variants.remove(variant)
        if not variants:
            del self._nodes[variant.key]
        if variant.parent:
            del variant.parent.children[id(variant)]
        self._delete(variant)
        self.metrics.nbytes -= variant.nbytes
        self.metrics.variants -= 1
        self.metrics.nodes = len(self._nodes)
        self.metrics.forgotten += 1

    def _delete(self, variant: Variant) -> None:
        self.table.delete(_row_key(variant.number))
        if variant.parent:
            # The last use of the parent may so far be recorded by this row alone.
            idle_s = self.clock() - variant.parent.last_used
            self.table.touch(_row_key(variant.parent.number), idle_s=idle_s)

    def _forget_some(self) -> None:
        """Remove variants that are too old; above the byte limit remove the least recently used down to 90 %.

        Only leaves are removed, never a variant that others build on.
        """
        now = self.clock()
        is_over = self.metrics.nbytes > self.max_bytes
        if not is_over and not (self.cache_ttl_s and now >= self._next_look):
            return
        self._next_look = now + self.cache_ttl_s / _LOOKS_IN_AN_AGE
        oldest = now - self.cache_ttl_s if self.cache_ttl_s else -math.inf
        enough = _SHRUNK_TO * self.max_bytes if is_over else self.max_bytes
        heap = [(leaf.last_used, id(leaf), leaf) for leaf in self._leaves()]
        heapq.heapify(heap)
        while heap and (heap[0][0] < oldest or self.metrics.nbytes > enough):
            leaf = heapq.heappop(heap)[2]
            self._forget(leaf)
            if leaf.parent and not leaf.parent.children:
                heapq.heappush(heap, (leaf.parent.last_used, id(leaf.parent), leaf.parent))

    def _leaves(self) -> Iterator[Variant]:
        return (variant for variants in self._nodes.values() for variant in variants if not variant.children)


def _row_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _row(variant: Variant) -> bytes:
    """Return the value: length of the JSON, the JSON, the key, and the tokens in this machine's order."""
    parent, claims = variant.parent and variant.parent.number, claims_json(variant.claims)
    whose = variant.tenant, variant.session
    described = encode_json((variant.depth, variant.length, parent, *whose, claims, variant.details))
    size = len(described).to_bytes(4, "little")
    return b"".join((size, described, variant.key.digest, variant.delta.tobytes()))


def _variant(row: DatabaseRow, number: int, loaded: Mapping[int, Variant], now: float) -> Variant | None:
    """Return the variant of a row, or None if it cannot be used.

    Args:
        loaded: the variants with smaller numbers.
    """
    end, delta = 4 + int.from_bytes(row.value[:4], "little"), array(_TOKEN)
    try:
        depth, length, parent_number, tenant, session, claims, details = decode_json(row.value[4:end])
        parent = None if parent_number is None else loaded[parent_number]
        tenant, claims, details = bytes.fromhex(tenant), claims_of(claims), tuple(map(details_of, details))
        delta.frombytes(row.value[end + _KEY_BYTES :])
    except UNREADABLE:
        return None
    start, first = (parent.length, parent.depth + 1) if parent else (0, 0)
    if (length, depth) != (start + len(delta), first + len(details) - 1):
        return None
    return Variant(
        key=CanonicalKey(row.value[end : end + _KEY_BYTES]),
        depth=depth,
        parent=parent,
        delta=delta,
        length=length,
        details=details,
        claims=claims,
        tenant=tenant,
        session=session,
        last_used=now - row.idle_s,
        number=number,
    )


def _text_bytes(text: str) -> int:
    """Return the same size for a text whenever it is asked.

    `sys.getsizeof` does not: it counts the UTF-8 form too, from the moment that something has asked for it.
    """
    width = 1 if text.isascii() else 2 if max(text) <= "\uffff" else 4
    return _TEXT_BYTES + width * len(text)
