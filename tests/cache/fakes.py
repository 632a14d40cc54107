"""Caches in which the KV of a token says which tokens it was computed from, so that a wrong restore shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from start_llm.cache.layers import Layers
from start_llm.cache.pages import Checkpoint, EarlierState, Page, PageRun

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

    def take(self, index: int) -> tuple[int, ...]:
        assert index == 0
        return self.entries


class FakePieces:
    """Consecutive tokens from `start` on. `copy` is called whenever some of them are copied."""

    def __init__(
        self, entries: Sequence[int], start: int = 0, copy: Callable[[], None] = lambda: None
    ) -> None:
        self.entries = tuple(entries)
        self.start = start
        self.token_bytes = BYTES_OF_A_TOKEN if entries else 0
        self._copy = copy

    @property
    def nbytes(self) -> int:
        return self.token_bytes * len(self.entries)

    @property
    def arrays(self) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    def bytes_of(self, start: int, end: int) -> int:
        return self.token_bytes * (end - start)

    def covers(self, start: int, end: int) -> bool:
        return not self.entries or (self.start <= start and end <= self.start + len(self.entries))

    def part(self, start: int, end: int) -> FakeCut:
        assert self.covers(start, end), "more is asked for than the run holds"
        return FakeCut(self.entries[start - self.start : end - self.start])

    def is_trimmed(self, index: int, start: int, end: int) -> bool:
        assert index == 0
        return not self.entries or (self.start, self.start + len(self.entries)) == (start, end)

    def keep(self, index: int, start: int, end: int) -> None:
        if not self.is_trimmed(index, start, end):
            if start < end:
                self._copy()
            self.entries = self.part(start, end).entries if start < end else ()
            self.start = start


def run(tokens: Sequence[int], start: int = 0) -> PageRun:
    """A run of its own, for a page of these tokens."""
    pieces: Any = FakePieces(tokens, start)
    return PageRun(pieces)


def kept_state(page: Page, tail: tuple[int, ...], state: Any, tail_cut: Any, last_used: float) -> Checkpoint:
    """A checkpoint of fakes."""
    return Checkpoint(page, tail, state, tail_cut, last_used)


@dataclass(frozen=True)
class FakeState:
    """A state that all tokens share, as a recurrent layer's; or with the states before it, as a window's."""

    digest: int
    before: tuple[int, ...] = ()

    @property
    def reach(self) -> int:
        return len(self.before)

    @property
    def nbytes(self) -> int:
        return BYTES_OF_A_STATE

    @property
    def arrays(self) -> int:
        return 1


@dataclass
class FakeCache:
    """The only cache of a network: `entries` if it is sliced, `digest` if it has state.

    `before` are the states since it was made or restored.
    """

    has_trimmable: bool
    has_state: bool
    entries: list[int] = field(default_factory=list[int])
    offset: int = 0
    digest: int = 0
    before: list[int] = field(default_factory=list[int])

    def feed(self, tokens: Sequence[int]) -> None:
        """A forward pass. It reads nothing but what the cache holds, as a network does."""
        for token in tokens:
            before = self.entries[self.offset - 1] if self.has_trimmable and self.offset else self.digest
            if self.has_trimmable:
                self.entries[self.offset :] = [hash((before, token))]
                self.offset += 1
            if self.has_state:
                self.before.append(self.digest)
                self.digest = hash((self.digest, token))

    def copy(self) -> FakeCache:
        return FakeCache(self.has_trimmable, self.has_state, list(self.entries), self.offset, self.digest)

    def holds(self, tokens: Sequence[int]) -> bool:
        """True if a fresh cache that was fed with these tokens would hold the same."""
        expected = digests(tokens)
        if self.has_trimmable and self.entries[: self.offset] != expected:
            return False
        return not self.has_state or self.digest == (expected[-1] if expected else 0)


class OutOfMemory(Exception):
    """`FakeLayers` raises this when a test tells it to."""


class FakeLayers(Layers):
    """`Layers` over caches of this file. After `fails_after` copies, every further one raises OutOfMemory.

    Args:
        reach: tokens by which states can be taken back, if nobody asks for more.
    """

    def __init__(
        self, *, has_trimmable: bool = True, has_state: bool = False, reach: int | None = None
    ) -> None:
        self._reach = reach
        self.unknown = []
        self.has_trimmable = has_trimmable
        self.has_state = has_state
        self.quantizer = None
        self.window = 0 if reach is None else 1
        self.fails_after: int | None = None
        self.reserved = 0

    def _copy(self) -> None:
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise OutOfMemory

    def fresh(self, room: int = 0) -> list[Any]:
        self.reserved = room
        return [FakeCache(self.has_trimmable, self.has_state)]

    def room(self, caches: Sequence[Any]) -> int:
        return caches[0].offset if self.has_trimmable else 0

    def reserve(self, caches: Sequence[Any], room: int) -> None:
        self.reserved = room

    def grow_in_small_steps(self, caches: Sequence[Any]) -> None:
        pass

    def compact(self, caches: Sequence[Any]) -> None:
        self._copy()

    def view(self, caches: Sequence[Any], start: int, end: int) -> Any:
        (cache,) = caches
        assert not self.has_trimmable or end <= cache.offset, "more is read than the cache holds"
        return FakeCut(tuple(cache.entries[start:end]) if self.has_trimmable else ())

    def cut(self, caches: Sequence[Any], start: int, end: int) -> Any:
        self._copy()
        return self.view(caches, start, end)

    def borrow(self, caches: Sequence[Any], start: int, end: int) -> Any:
        return self.view(caches, start, end)

    def cut_out(self, caches: Sequence[Any], start: int, end: int) -> Any:
        return FakePieces(self.cut(caches, start, end).entries, start, self._copy)

    def give_up(self, caches: Sequence[Any]) -> Any:
        (cache,) = caches
        pieces = FakePieces(cache.entries, 0, self._copy)
        cache.entries, cache.offset = [], 0
        return pieces

    def arrays(self, caches: Sequence[Any]) -> int:
        return len(caches)

    def state(
        self, caches: Sequence[Any], reach: int = 0, earlier: EarlierState | None = None, ahead: int = 0
    ) -> Any:
        self._copy()
        (cache,) = caches
        if self._reach is None:
            assert not ahead, "a state that cannot be taken back was passed by"
            return FakeState(cache.digest)
        states = [*cache.before, cache.digest]
        *before, digest = states[: len(states) - ahead]
        return FakeState(digest, tuple(before[max(len(before) - max(reach, self._reach), 0) :]))

    def rewound(self, state: Any, tokens: int) -> Any:
        assert 0 <= tokens <= state.reach, "a state is taken back further than it reaches"
        states = [*state.before, state.digest]
        return FakeState(states[-1 - tokens], tuple(states[: -1 - tokens]))

    def assemble(
        self,
        parts: Sequence[Any],
        state: Any,
        length: int,
        copied: Callable[[int], None] = lambda _: None,
        *,
        room: int = 0,
    ) -> list[Any]:
        self.reserved = room
        self._copy()
        entries = [entry for part in parts for entry in part.take(0)]
        assert len(entries) == (length if self.has_trimmable else 0), "the parts are no whole"
        if self.has_trimmable:
            copied(0)
        cache = FakeCache(self.has_trimmable, self.has_state, entries, len(entries))
        if state is not None:
            self._copy()
            self.set_state([cache], state)
        return [cache]

    def set_state(self, caches: Sequence[Any], state: Any) -> None:
        (cache,) = caches
        cache.digest, cache.before = state.digest, []

    def trim(self, caches: Sequence[Any], length: int) -> None:
        (cache,) = caches
        if self.has_trimmable:
            assert cache.offset >= length
            cache.offset = length

    def length(self, caches: Sequence[Any]) -> int | None:
        (cache,) = caches
        return cache.offset if self.has_trimmable else None

    def release(self) -> None:
        pass

    def nbytes(self, caches: Sequence[Any]) -> int:
        return sum(
            BYTES_OF_A_TOKEN * len(cache.entries) + BYTES_OF_A_STATE * cache.has_state for cache in caches
        )

    def token_bytes(self, caches: Sequence[Any]) -> int:
        return BYTES_OF_A_TOKEN * self.has_trimmable
