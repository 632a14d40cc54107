"""Predict how long a prefill chunk takes, and choose the length of the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from start_llm.core.limits import STALL_S

LONGEST_CHUNK = 2048
"""Tokens of the longest chunk, as in mlx_lm. Longer chunks are no faster and need more memory."""

_RELAXED_S = 1.0
"""Seconds of a chunk while no reply runs. New requests and cancellations wait until it ends."""
_RELAXED_EFFICIENCY = 0.97
PACED_EFFICIENCY = 0.65
"""Share of the full prefill speed that a chunk must reach while replies run.

Shorter chunks would spend most of their time on fixed costs, and the prompt would never be done.
"""
_PLANNED = 0.9
"""Share of the stall target that a chunk is planned to last, since predictions are off by a tenth."""
_FIRST = 256
_BELIEVED, _PATIENCE_S = 1024, 4.0
"""Chunk lengths double until a chunk has had `_BELIEVED` tokens or the next would take `_PATIENCE_S` seconds.

Shorter chunks do not show what long ones cost: with few tokens for each expert, tiles are partly empty.
"""
_TILE = 32
"""Tokens of a tile of a matrix product on a GPU. Fewer tokens cost as much."""
_SHORTEST = 4
"""Tokens of the shortest chunk on a device that needs more than a second for a tile, which no GPU does."""
_SHORTEST_S = 1e-6
_WORTH_A_PASS = 1 / 8
"""Padding that one pass in place of several is worth in any case, as a share of their tokens.

A few measured chunks may not show what a pass costs by itself (lesson 377).
"""
_UNKNOWN_SPEED = 300.0


class Chunk(NamedTuple):
    """A measured chunk: the seconds that `tokens` prompt tokens took with `before` tokens before them."""

    tokens: int
    before: int
    seconds: float


class ChunkTimes:
    """Predicts a chunk's seconds from measured chunks, as level * (a + b L + c n + d L n).

    L is the chunk's length and n the number of tokens before it. `a` is the cost per chunk (weights are
    read, kernels are launched), `b` the cost per token, `c` the cost per token before the chunk (MLA
    decompresses its whole KV for each chunk), and `d` the cost per pair of them (attention). A mixture of
    experts reads nearly all of its weights from a hundred tokens on, so its reads are part of `a`. No cost is
    negative.

    The costs are fitted to relative errors by recursive least squares. Chunks of each power of two in length
    have their own sums, so that a thousand short chunks do not displace what long ones cost.

    Coordinate descent starts from the last solution, so costs that the chunks do not determine keep their
    values. At first everything counts as `b`, and time that grows with `n` counts as `c`, so chunks get
    longer and soon determine the costs. The level follows at once when the machine gets slower or faster.
    """

    _FADING = 0.9
    _SWEEPS = 20
    _UNITS = (1.0, 1 / 1024, 1 / 2**14, 1 / 2**24)
    _ORDER = (1, 0, 2, 3)
    _LEVEL_OF = 3  # one slow chunk of three is an outlier, two mean a busy machine
    # A chunk shorter than this share of the longest one predicts little: few experts, small tiles.
    TELLING = 1 / 16

    def __init__(self) -> None:
        self._costs = [0.0] * 4
        self._memories: dict[int, _Memory] = {}
        self._ratios: deque[float] = deque(maxlen=self._LEVEL_OF)
        self.longest = 0
        """Tokens of the longest chunk measured."""

    def record(self, chunk: Chunk) -> None:
        if chunk.tokens < 1 or chunk.seconds < self._telling_s(chunk.tokens):
            return
        seconds = max(chunk.seconds, _SHORTEST_S)
        if self.is_known:
            self._ratios.append(seconds / self._expected(chunk.tokens, chunk.before))
        self.longest = max(self.longest, chunk.tokens)
        terms = [term / seconds for term in self._terms(chunk.tokens, chunk.before)]
        self._memories.setdefault(chunk.tokens.bit_length(), _Memory()).add(terms, self._FADING)
        self._fit()

    def _telling_s(self, tokens: int) -> float:
        """Return the seconds that a chunk of `tokens` tokens must take to be recorded.

        Short chunks predict little, so they are recorded only if they are slow.
        """
        if tokens < self.TELLING * self.longest:
            return _RELAXED_S
        return _RELAXED_S / 2 if tokens < _TILE else 0.0

    @property
    def is_known(self) -> bool:
        """True if a chunk has been measured."""
        return self.longest > 0

    def seconds(self, tokens: int, before: int) -> float:
        return self._level * self._expected(tokens, before)

    def tokens_in(self, seconds: float, before: int) -> int:
        """Return the longest chunk, in tokens, that takes at most `seconds`; 0 if none does."""
        return max(int((seconds - self.seconds(0, before)) / self._each(before)), 0)

    def tokens_at(self, efficiency: float, before: int) -> int:
        """Return the shortest chunk, in tokens, that reaches this share of the longest chunks' speed."""
        allowed = self.seconds(LONGEST_CHUNK, before) / LONGEST_CHUNK / efficiency
        fixed, each = self.seconds(0, before), self._each(before)
        return min(int(fixed / (allowed - each)) + 1, LONGEST_CHUNK) if allowed > each else LONGEST_CHUNK

    @property
    def _level(self) -> float:
        return median(self._ratios) if self._ratios else 1.0

    def _terms(self, tokens: int, before: int) -> list[float]:
        numbers = (1, tokens, before, tokens * before)
        return [number * unit for number, unit in zip(numbers, self._UNITS, strict=True)]

    def _expected(self, tokens: int, before: int) -> float:
        return max(_dot(self._costs, self._terms(tokens, before)), 1e-9)

    def _each(self, before: int) -> float:
        """Return the seconds of one more token."""
        return max(self.seconds(LONGEST_CHUNK, before) - self.seconds(0, before), 1e-9) / LONGEST_CHUNK

    def _fit(self) -> None:
        memories = self._memories.values()
        gram = [
            [sum(memory.gram[i][j] / memory.weight for memory in memories) for j in range(4)]
            for i in range(4)
        ]
        wanted = [sum(memory.wanted[i] / memory.weight for memory in memories) for i in range(4)]
        for _ in range(self._SWEEPS):
            for place in self._ORDER:
                if gram[place][place] > 0:
                    rest = wanted[place] - _dot(gram[place], self._costs)
                    self._costs[place] = max(self._costs[place] + rest / gram[place][place], 0.0)


class _Memory:
    """The sums over chunks that least squares needs. Older chunks fade.

    Each chunk is a vector of terms divided by its seconds; its product with the right costs is 1.
    """

    def __init__(self) -> None:
        self.gram = [[0.0] * 4 for _ in range(4)]
        self.wanted = [0.0] * 4
        self.weight = 0.0

    def add(self, terms: Sequence[float], fading: float) -> None:
        for sequence, left in zip(self.gram, terms, strict=True):
            sequence[:] = [fading * old + left * right for old, right in zip(sequence, terms, strict=True)]
        self.wanted = [fading * old + term for old, term in zip(self.wanted, terms, strict=True)]
        self.weight = fading * self.weight + 1


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(left_term * right_term for left_term, right_term in zip(left, right, strict=True))


class ChunkPacer:
    """Chooses the length of prefill chunks.

    While no reply runs, chunks are as fast as the network allows: 2,048 tokens, or fewer if that takes more
    than a second and shorter ones reach 97 % of the speed. While replies run, a chunk ends within `stall_s`,
    unless its speed would then be below 65 %: a device that needs longer for one chunk's fixed costs cannot
    stall less.

    Args:
        stall_s: target for the longest pause of a reply, in seconds.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._times = ChunkTimes()
        self._before = 0

    def record(self, chunk: Chunk) -> None:
        """Update the prediction with a measured chunk."""
        self._before = chunk.before
        self._times.record(chunk)

    @property
    def speed(self) -> float:
        """The predicted prefill speed in tokens per second; a default before the first measurement."""
        if not self._times.is_known:
            return _UNKNOWN_SPEED
        return LONGEST_CHUNK / self._times.seconds(LONGEST_CHUNK, self._before)

    def length(self, before: int, *, stalls: bool, share_s: float = 0.0) -> int:
        """Return the length of the next chunk, in tokens.

        Args:
            before: tokens before the chunk.
            stalls: replies are running and pause while the chunk is computed.
            share_s: if `stalls`, seconds that the chunk may last, up to a second, even if that exceeds the
                stall target. A whole decode step follows each chunk, and shorter chunks would leave the
                prompt less than its share.
        """
        times = self._times
        if not times.is_known:
            return _FIRST
        relaxed_s = max(_RELAXED_S, self._stall_s)
        if stalls:
            lasting_s = max(self._stall_s * _PLANNED, min(share_s, _RELAXED_S))
            least = times.tokens_at(PACED_EFFICIENCY, before)
        elif times.longest >= _BELIEVED or times.seconds(2 * times.longest, before) > _PATIENCE_S:
            lasting_s, least = relaxed_s, times.tokens_at(_RELAXED_EFFICIENCY, before)
        else:
            lasting_s, least = relaxed_s, 2 * times.longest
        lengths = _LENGTHS_BESIDE if stalls else _LENGTHS_ALONE
        affordable = _rounded_down(times.tokens_in(lasting_s, before), lengths)
        return max(affordable, _rounded_up(max(least, self._shortest(before)), lengths))

    def _shortest(self, before: int) -> int:
        if self._times.seconds(_TILE, before) > _RELAXED_S:
            return _SHORTEST
        return max(_TILE, int(self._times.longest * self._times.TELLING))

    def saves_time(self, lengths: Sequence[int], before: int) -> bool:
        """Return whether prompts that have so many tokens left are worth one pass in place of several.

        In one pass, all are padded to the longest. They are worth it if that takes no longer than one by one,
        or if it adds little.
        """
        times, padded = self._times, len(lengths) * max(lengths)
        if not times.is_known or padded <= (1 + _WORTH_A_PASS) * sum(lengths):
            return True
        return times.seconds(padded, before) <= sum(times.seconds(length, before) for length in lengths)

    def fits(self, tokens: int, before: int, seconds: float) -> bool:
        """Return whether `tokens` tokens are computed within `seconds`."""
        if not self._times.is_known:
            return tokens <= _FIRST
        return tokens == 0 or self._times.seconds(tokens, before) <= seconds


def _lengths(parts: Sequence[int]) -> list[int]:
    """Return these parts times powers of two that fill tiles, and shorter ones for slow devices."""
    lengths = {part * 2**power for power in range(12) for part in parts}
    return sorted(
        length
        for length in lengths
        if _SHORTEST <= length <= LONGEST_CHUNK and (length < _TILE or length % _TILE == 0)
    )


# Few lengths, so that chunks reuse buffers: 4, 6, 8, 12 ... 1536, 2048. While replies run, four in each
# octave, because a pause matters then.
_LENGTHS_ALONE, _LENGTHS_BESIDE = _lengths((2, 3)), _lengths((4, 5, 6, 7))


def _rounded_down(most: int, lengths: Sequence[int]) -> int:
    return max((length for length in lengths if length <= most), default=_SHORTEST)


def _rounded_up(least: int, lengths: Sequence[int]) -> int:
    return min((length for length in lengths if length >= least), default=LONGEST_CHUNK)
