"""Find what a reply may go on with: tokens that followed the same tokens before.

No library does this for one growing sequence within some 20 bytes a token: a suffix automaton takes hundreds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
_CANDIDATES = 16
"""Places that are compared, the latest first."""
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_MASK = 2**64 - 1
_LEAST_BUCKETS = 1024
_BETWEEN = 2**32 - 1
"""Stands between texts; no token has this id."""
_NONE = -1


class Draft(NamedTuple):
    """Tokens that may come next.

    Attributes:
        match: index into `MATCHES` of the number of tokens before them that are equal, or `FORCED`.
    """

    tokens: tuple[int, ...]
    match: int


@owned_by(ENGINE)
class DraftIndex:
    """The tokens of one sequence, and where each pair of neighbours occurred before.

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
        return sum(one.itemsize * len(one) for one in (self._tokens, self._before, self._heads))

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        if len(self._tokens) + len(tokens) > len(self._heads):
            self._tokens.extend(tokens)
            self._rebuild()
            return
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        place = len(self._tokens)
        self._tokens.append(token)
        bucket = self._bucket(place)
        self._before.append(self._heads[bucket])
        self._heads[bucket] = place

    def _bucket(self, place: int) -> int:
        """Return the head of the pair that ends at `place`. The first token has none before it: 0 counts."""
        first = self._tokens[place - 1] if place else 0
        return (first * _FACTORS[0] + self._tokens[place] * _FACTORS[1] & _MASK) >> 32 & len(self._heads) - 1

    def _rebuild(self) -> None:
        """Make the chains anew, with as many heads as there are tokens, or up to twice as many."""
        buckets = max(_LEAST_BUCKETS, 1 << (len(self._tokens) - 1).bit_length())
        tokens = np.frombuffer(self._tokens, np.uint32).astype(np.uint64)
        earlier = np.concatenate([np.zeros(1, np.uint64), tokens[:-1]])
        hashes = earlier * np.uint64(_FACTORS[0]) + tokens * np.uint64(_FACTORS[1])
        bucket = (hashes >> np.uint64(32) & np.uint64(buckets - 1)).astype(np.int64)
        order = np.argsort(bucket, kind="stable").astype(np.int32)
        is_same = bucket[order[1:]] == bucket[order[:-1]]
        before = np.full(len(tokens), _NONE, np.int32)
        before[order[1:][is_same]] = order[:-1][is_same]
        heads = np.full(buckets, _NONE, np.int32)
        heads[bucket] = np.arange(len(tokens), dtype=np.int32)
        self._before = array("i", before.tobytes())
        self._heads = array("i", heads.tobytes())

    def find(self, most: int) -> Draft | None:
        """Return up to `most` tokens that followed the longest match with the last tokens.

        Of equally long ones the latest is taken. What it lacks at the end goes on as it began, since the
        sequence then repeats itself.
        """
        place, match = self._longest_match()
        if place == _NONE:
            return None
        followed = self._tokens[place + 1 : place + 1 + most].tolist()
        period = len(self._tokens) - 1 - place
        while len(followed) < most:
            followed.append(followed[-period])
        return Draft(tuple(takewhile(lambda token: token != _BETWEEN, followed)), match)

    def _longest_match(self) -> tuple[int, int]:
        """Return where the best match ends, and its class; `_NONE` if nothing was like that before."""
        best, match = _NONE, -1
        last = len(self._tokens) - 1
        place = self._before[last] if last > 0 else _NONE
        for _ in range(_CANDIDATES):
            if place == _NONE or match + 1 == len(MATCHES):
                break
            while match + 1 < len(MATCHES) and self._is_equal(place, MATCHES[match + 1]):
                best, match = place, match + 1
            place = self._before[place]
        return best, match

    def _is_equal(self, place: int, length: int) -> bool:
        """Return whether the `length` tokens that end at `place` are those that end the sequence."""
        tokens = self._tokens
        return length <= place + 1 and tokens[place + 1 - length : place + 1] == tokens[-length:]
