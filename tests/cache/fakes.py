"""Caches in which the KV of a token says which tokens it was computed from, so that a wrong restore shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from start_llm.cache.layers import Layers

BYTES_OF_A_TOKEN = 10
BYTES_OF_A_STATE = 70


def digests(tokens: Sequence[int]) -> list[int]:
    """One number for each token, which depends on all tokens up to it."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]


@dataclass(frozen=True)
class FakeCut:
    """Some consecutive tokens."""

    entries: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return BYTES_OF_A_TOKEN * len(self.entries)

    @property
    def arrays(self) -> int:
        return 1

    def part(self, start: int, end: int) -> FakeCut:
        return FakeCut(self.entries[start:end])


@dataclass(frozen=True)
class FakeState:
    """What is known of all tokens together."""

    digest: int

    @property
    def nbytes(self) -> int:
        return BYTES_OF_A_STATE

    @property
    def arrays(self) -> int:
        return 1


@dataclass
class FakeCache:
    """The only cache of a network: `entries` if it is sliced, `digest` if it has state."""

    is_sliced: bool
    has_state: bool
    entries: list[int] = field(default_factory=list[int])
    offset: int = 0
    digest: int = 0

    def feed(self, tokens: Sequence[int]) -> None:
        """A forward pass. It reads nothing but what the cache holds, as a network does."""
        for token in tokens:
            before = self.entries[self.offset - 1] if self.is_sliced and self.offset else self.digest
            if self.is_sliced:
                self.entries[self.offset :] = [hash((before, token))]
                self.offset += 1
            if self.has_state:
                self.digest = hash((self.digest, token))

    def copy(self) -> FakeCache:
        return FakeCache(self.is_sliced, self.has_state, list(self.entries), self.offset, self.digest)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether this is what a fresh cache holds that was fed with these tokens."""
        expected = digests(tokens)
        if self.is_sliced and self.entries[: self.offset] != expected:
            return False
        return not self.has_state or self.digest == (expected[-1] if expected else 0)


class OutOfMemory(Exception):
    """What `FakeLayers` raises when it is told to."""


class FakeLayers(Layers):
    """`Layers` over caches of this file. After `fails_after` copies, every further one raises OutOfMemory."""

    def __init__(self, *, is_sliced: bool = True, has_state: bool = False) -> None:
        self.unknown = []
        self.is_sliced = is_sliced
        self.has_state = has_state
        self.fails_after: int | None = None

    def _copy(self) -> None:
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise OutOfMemory

    def fresh(self) -> list[Any]:
        return [FakeCache(self.is_sliced, self.has_state)]

    def settle(self, caches: Sequence[Any]) -> None:
        self._copy()

    def view(self, caches: Sequence[Any], start: int, end: int) -> Any:
        (cache,) = caches
        assert not self.is_sliced or end <= cache.offset, "more is read than the cache holds"
        return FakeCut(tuple(cache.entries[start:end]) if self.is_sliced else ())

    def cut(self, caches: Sequence[Any], start: int, end: int) -> Any:
        self._copy()
        return self.view(caches, start, end)

    def take_apart(self, caches: Sequence[Any], spans: Sequence[tuple[int, int]]) -> Any:
        try:
            return [self.cut(caches, start, end) for start, end in spans]
        finally:
            caches[0].entries, caches[0].offset = [], 0

    def arrays(self, caches: Sequence[Any]) -> int:
        return len(caches)

    def state(self, caches: Sequence[Any]) -> Any:
        self._copy()
        (cache,) = caches
        return FakeState(cache.digest)

    def assemble(self, cuts: Sequence[Any], state: Any, length: int) -> list[Any]:
        self._copy()
        entries = [entry for cut in cuts for entry in cut.entries]
        assert len(entries) == (length if self.is_sliced else 0), "the cuts are no whole"
        cache = FakeCache(self.is_sliced, self.has_state, entries, len(entries))
        if state is not None:
            self.set_state([cache], state)
        return [cache]

    def set_state(self, caches: Sequence[Any], state: Any) -> None:
        (cache,) = caches
        cache.digest = state.digest

    def trim(self, caches: Sequence[Any], length: int) -> None:
        (cache,) = caches
        if self.is_sliced:
            assert cache.offset >= length
            cache.offset = length

    def length(self, caches: Sequence[Any]) -> int | None:
        (cache,) = caches
        return cache.offset if self.is_sliced else None

    def release(self) -> None:
        pass

    def nbytes(self, caches: Sequence[Any]) -> int:
        return sum(
            BYTES_OF_A_TOKEN * len(cache.entries) + BYTES_OF_A_STATE * cache.has_state for cache in caches
        )

    def sliced_nbytes(self, caches: Sequence[Any]) -> int:
        return sum(BYTES_OF_A_TOKEN * len(cache.entries) for cache in caches)
