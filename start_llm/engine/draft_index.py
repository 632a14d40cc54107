"""Find what a reply may go on with: tokens that followed the same tokens before.

No library does this for one growing sequence within some 20 bytes a token: a suffix automaton takes hundreds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from start_llm.core.thread_owners import ENGINE, owned_by

MATCHES = (2, 4, 8, 16, 32)
"""Lengths of equal tokens, in classes: the longer the match, the more probable its continuation."""
INDEX_TOKEN_BYTES = 40
"""Most bytes for a token of a sequence: 20, and as many for texts that repeat what its prompt has."""
FORCED = len(MATCHES)
"""The class of drafts that are the only text which a guide allows."""
EARLIER = FORCED + 1
"""The class of the shortest matches with `engine.earlier_texts`; longer ones follow."""
_CANDIDATES = 16
"""Places that are compared, the latest first."""
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_MASK = 2**64 - 1
_LEAST_BUCKETS = 1024
_FEW = 64
"""Tokens that are appended one by one."""
_BETWEEN = 2**32 - 1
"""Stands between texts; no token has this id."""
_NONE = -1


class Draft(NamedTuple):
    """Tokens that may come next.

    Attributes:
        match: index into `MATCHES` of the number of tokens before them that are equal, or `FORCED`, or from
            `EARLIER` on.
    """

    tokens: tuple[int, ...]
    match: int


@owned_by(ENGINE)
class DraftIndex:
    """The tokens of one sequence, or of texts that others look something up in, and where each pair of
    neighbours occurred before.

    Places whose pairs have the same hash form a chain, the latest first: 4 bytes for a token, 4 for the place
    before it in its chain, and at most 8 for the heads of the chains.

    Args:
        tokens: how the sequence begins.
        texts: the tokens of other texts that it may repeat.
    """

    def __init__(self, tokens: Sequence[int] = (), texts: Sequence[Sequence[int]] = ()) -> None:
        self._tokens = array("I")
        self._before = array("i")
        self._heads = array("i", [_NONE]) * _LEAST_BUCKETS
        before = [token for text in texts for token in (*text, _BETWEEN)]
        self._start = len(before)
        self.extend([*before, *tokens])

    def __len__(self) -> int:
        """Return the tokens of the sequence."""
        return len(self._tokens) - self._start

    @property
    def nbytes(self) -> int:
        return sum(column.itemsize * len(column) for column in (self._tokens, self._before, self._heads))

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        length = len(self._tokens) + len(tokens)
        if length > len(self._heads):
            self._make_room(length)
        if len(tokens) > _FEW:
            self._append_all(array("I", tokens))
            return
        for token in tokens:
            self._append(token)

    def _make_room(self, length: int) -> None:
        """Make the chains anew, with as many heads as there will be tokens, or up to twice as many."""
        known, self._tokens, self._before = self._tokens, array("I"), array("i")
        self._heads = array("i", [_NONE]) * max(_LEAST_BUCKETS, 1 << (length - 1).bit_length())
        self._append_all(known)

    def add(self, text: Sequence[int]) -> None:
        """Add a text that nothing follows."""
        self.extend([*text, _BETWEEN])

    def latest(self, count: int) -> DraftIndex:
        """Return an index of the last tokens alone."""
        return DraftIndex(self._tokens[-count:])

    def _append(self, token: int) -> None:
        place = len(self._tokens)
        self._tokens.append(token)
        bucket = self._bucket(place)
        self._before.append(self._heads[bucket])
        self._heads[bucket] = place

    def _bucket(self, place: int) -> int:
        """Return the head of the pair that ends at `place`. The first token has none before it: 0 counts."""
        return self._bucket_of(self._tokens[place - 1] if place else 0, self._tokens[place])

    def _bucket_of(self, first: int, second: int) -> int:
        return (first * _FACTORS[0] + second * _FACTORS[1] & _MASK) >> 32 & len(self._heads) - 1

    def _append_all(self, tokens: array[int]) -> None:
        """Append many tokens at once, which takes a tenth of the time."""
        begin = len(self._tokens)
        later = np.frombuffer(tokens, np.uint32).astype(np.uint64)
        first = np.array([self._tokens[-1] if begin else 0], np.uint64)
        earlier = np.concatenate([first, later[:-1]])
        hashes = earlier * np.uint64(_FACTORS[0]) + later * np.uint64(_FACTORS[1])
        bucket = (hashes >> np.uint64(32) & np.uint64(len(self._heads) - 1)).astype(np.int64)
        order = np.argsort(bucket, kind="stable").astype(np.int32)
        is_same = bucket[order[1:]] == bucket[order[:-1]]
        heads = np.frombuffer(self._heads, np.int32)
        before = heads[bucket]
        before[order[1:][is_same]] = order[:-1][is_same] + begin
        heads[bucket] = np.arange(begin, begin + len(tokens), dtype=np.int32)
        self._tokens.extend(tokens)
        self._before.frombytes(before.tobytes())

    def find(self, most: int) -> Draft | None:
        """Return up to `most` tokens that followed the longest match with the last tokens.

        Of equally long ones the latest is taken. What it lacks at the end goes on as it began, since the
        sequence then repeats itself.
        """
        last = len(self._tokens) - 1
        place, match = self._longest_match(self.tail, self._before[last] if last > 0 else _NONE)
        if place == _NONE:
            return None
        followed = self._tokens[place + 1 : place + 1 + most].tolist()
        period = last - place
        while len(followed) < most:
            followed.append(followed[-period])
        return _draft(followed, match)

    @property
    def tail(self) -> array[int]:
        """The last tokens, as many as are compared."""
        return self._tokens[-MATCHES[-1] :]

    def find_behind(self, tail: array[int], most: int) -> Draft | None:
        """Return up to `most` tokens that followed the longest match with the tail of another sequence."""
        if len(tail) < MATCHES[0] or not self._tokens:
            return None
        place, match = self._longest_match(tail, self._heads[self._bucket_of(tail[-2], tail[-1])])
        return _draft(self._tokens[place + 1 : place + 1 + most], match) if place != _NONE else None

    def _longest_match(self, tail: array[int], place: int) -> tuple[int, int]:
        """Return where the best match with a tail ends, and its class; `_NONE` if nothing was like that.

        Args:
            place: of the first candidate.
        """
        best, match = _NONE, -1
        for _ in range(_CANDIDATES):
            if place == _NONE or match + 1 == len(MATCHES):
                break
            while match + 1 < len(MATCHES) and self._ends_like(tail, place, MATCHES[match + 1]):
                best, match = place, match + 1
            place = self._before[place]
        return best, match

    def _ends_like(self, tail: array[int], place: int, length: int) -> bool:
        """Return whether the `length` tokens that end at `place` are those that end the tail."""
        return length <= place + 1 and self._tokens[place + 1 - length : place + 1] == tail[-length:]


def _draft(followed: Iterable[int], match: int) -> Draft | None:
    """Return what followed a match, up to the end of its text; None if it ended there."""
    tokens = tuple(takewhile(lambda token: token != _BETWEEN, followed))
    return Draft(tokens, match) if tokens else None
