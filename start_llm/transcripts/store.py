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

from start_llm.core.canonical import CanonicalKey
from start_llm.telemetry.metrics import TranscriptMetrics
from start_llm.transcripts.drift import Told

_MOST_VARIANTS = 4
_SHRUNK_TO = 0.9
_LOOKS_IN_AN_AGE = 10
_TOKEN, _TOKEN_BYTES = "I", 4
_VARIANT_BYTES = 400
"""About what a variant takes beside its tokens."""


@dataclass(frozen=True, slots=True)
class Held:
    """What tokens hold that their key does not say, for each message.

    Attributes:
        thoughts: digests of thoughts.
        own: digests of texts with lines of their own.
        live: what was said of now.
        noted: tokens of notes.
        replied: the last message that was written here; -1: none was.
    """

    thoughts: tuple[bytes | None, ...]
    own: tuple[bytes | None, ...]
    live: tuple[tuple[Told, ...], ...]
    noted: tuple[int, ...]
    replied: int = -1


@dataclass(eq=False, slots=True)
class Variant:
    """Tokens up to the end of one message, as what follows the parent's.

    Attributes:
        key: of the node.
        depth: index of the message.
        length: tokens in all.
        thoughts, own, live, noted: what the tokens of each message behind the parent's hold.
        replied: the last message that was written here.
        session: where it was computed.
        children: variants that build on this one.
    """

    key: CanonicalKey
    depth: int
    parent: Variant | None
    delta: array[int]
    length: int
    thoughts: tuple[bytes | None, ...]
    own: tuple[bytes | None, ...]
    live: tuple[tuple[Told, ...], ...]
    noted: tuple[int, ...]
    replied: int
    session: str
    last_used: float
    children: int = 0

    @property
    def nbytes(self) -> int:
        """With the texts that were told, although variants share those that stand in one request."""
        told = sum(getsizeof(text) for message in self.live for _, text in message if text)
        return _TOKEN_BYTES * len(self.delta) + _VARIANT_BYTES + told

    def path(self) -> list[Variant]:
        """This one and all that it builds on, the first message first."""
        found: list[Variant] = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

    def held(self) -> Held:
        """For each message up to this one."""
        path = self.path()
        return Held(
            thoughts=tuple(thought for variant in path for thought in variant.thoughts),
            own=tuple(text for variant in path for text in variant.own),
            live=tuple(told for variant in path for told in variant.live),
            noted=tuple(count for variant in path for count in variant.noted),
            replied=self.replied,
        )

    def tokens(self) -> array[int]:
        """All of them, from the first message on."""
        whole = array(_TOKEN)
        for variant in self.path():
            whole.extend(variant.delta)
        return whole


type Rank = Callable[[Variant], tuple[int, ...] | None]
"""How well a variant suits a conversation, the larger the better; None: not at all."""


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

    def find(self, keys: Sequence[CanonicalKey], rank: Rank) -> Iterator[Variant]:
        """The best variant of each known prefix, the longest first.

        Args:
            keys: of the conversation's prefixes.
            rank: what makes one variant better than another, before its last use does.
        """
        for depth in range(len(keys) - 1, -1, -1):
            with self._lock:
                now = self.clock()
                ranked = [(rank(one), one.last_used, one) for one in self._nodes.get(keys[depth], ())]
                fitting = [(worth, used, one) for worth, used, one in ranked if worth is not None]
                best = max(fitting, key=lambda found: found[:2])[2] if fitting else None
                if best is not None:
                    for one in best.path():
                        one.last_used = now
            if best is not None:
                yield best

    def add(
        self,
        key: CanonicalKey,
        depth: int,
        tokens: Sequence[int],
        held: Held,
        *,
        parent: Variant | None = None,
        session: str = "",
    ) -> Variant:
        """Tokens were computed for a prefix. The same ones again are the variant that is there.

        Args:
            held: of each message up to this one, and perhaps of more.
            parent: of a shorter prefix; ignored if its tokens are not a beginning of these.
        """
        whole = array(_TOKEN, tokens)
        with self._lock:
            parent = parent if parent and self._builds_on(parent, whole, depth) else None
            known = self._same(key, whole, held.thoughts[: depth + 1])
            if known is not None:
                known.last_used, known.session = self.clock(), session
                known.replied = max(known.replied, held.replied)
                return known
            start, first = (parent.length, parent.depth + 1) if parent else (0, 0)
            variant = Variant(
                key=key,
                depth=depth,
                parent=parent,
                delta=whole[start:],
                length=len(whole),
                thoughts=held.thoughts[first : depth + 1],
                own=held.own[first : depth + 1],
                live=held.live[first : depth + 1],
                noted=held.noted[first : depth + 1],
                replied=held.replied,
                session=session,
                last_used=self.clock(),
            )
            self._put(variant)
            self._forget_some()
            return variant

    def _builds_on(self, parent: Variant, tokens: array[int], depth: int) -> bool:
        is_kept = any(one is parent for one in self._nodes.get(parent.key, ()))
        return is_kept and parent.depth < depth and tokens[: parent.length] == parent.tokens()

    def _same(
        self, key: CanonicalKey, tokens: array[int], thoughts: tuple[bytes | None, ...]
    ) -> Variant | None:
        for one in self._nodes.get(key, ()):
            if one.length == len(tokens) and one.held().thoughts == thoughts and one.tokens() == tokens:
                return one
        return None

    def _put(self, variant: Variant) -> None:
        variants = self._nodes.setdefault(variant.key, [])
        variants.append(variant)
        if variant.parent:
            variant.parent.children += 1
        self.metrics.nbytes += variant.nbytes
        self.metrics.variants += 1
        self.metrics.nodes = len(self._nodes)
        free = [one for one in variants[:-1] if not one.children]
        if len(variants) > _MOST_VARIANTS and free:
            self._forget(min(free, key=lambda one: one.last_used))

    def _forget(self, variant: Variant) -> None:
        variants = self._nodes[variant.key]
        variants.remove(variant)
        if not variants:
            del self._nodes[variant.key]
        if variant.parent:
            variant.parent.children -= 1
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
