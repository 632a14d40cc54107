"""How long a chunk of a prompt takes, and how long one may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

LONGEST_CHUNK = 2048
"""Tokens. mlx_lm's chunks are as long; longer ones are no faster and need more memory."""
STALL_S = 0.23
"""Seconds for which a running reply may stand still; its stream then still seems to flow."""
DECODE_SHARE = 1 / 3
"""Part of the engine's time that running replies keep while a prompt is computed."""

_RELAXED_S = 1.0
"""Seconds of a chunk while no reply runs. Requests that come or are cancelled meanwhile wait for its end."""
_RELAXED_EFFICIENCY = 0.97
PACED_EFFICIENCY = 0.65
"""Shorter chunks would give most of their time to fixed costs, and the prompt would never be done."""
_PLANNED = 0.9
"""Part of a stall that a chunk is planned to last: predictions are wrong by a tenth."""
_FIRST = 256
_BELIEVED, _PATIENCE_S = 1024, 4.0
"""Tokens, and seconds for which so many are tried. Shorter chunks do not tell what long ones cost: with few
tokens for each expert tiles are empty."""
_TILE = 32
"""Tokens that a matrix product on a GPU takes at once: fewer cost as much."""
_SHORTEST = 4
"""Where even a tile takes longer than a second, which no GPU does."""
_SHORTEST_S = 1e-6
_UNKNOWN_SPEED = 300.0


class Chunk(NamedTuple):
    """Seconds that `tokens` of a prompt took behind `before` others."""

    tokens: int
    before: int
    seconds: float


class ChunkTimes:
    """Predicts a chunk's seconds from those measured, as level * (a + b L + c n + d L n).

    L is the chunk's length and n what stands before it. `a` is paid by every chunk (weights are read,
    kernels are launched), `b` by each token, `c` by each token in front of the chunk (MLA decompresses its
    whole KV for each chunk), and `d` by each pair of them (attention). A mixture of experts reads nearly
    all of its weights from a hundred tokens on, so its reads are part of `a`. No cost is negative.

    The costs are fitted to relative errors by recursive least squares, for which chunks of each order of
    length are remembered apart: a thousand short ones do not make it forget what long ones cost. Coordinate
    descent starts from the last solution, so what the chunks cannot tell apart stays as it was; at first
    everything counts as `b`, and what grows with `n` as `c`, for which chunks get longer and soon tell. The
    level follows at once when the machine gets slower or faster.
    """

    _FADING = 0.9
    _SWEEPS = 20
    _UNITS = (1.0, 1 / 1024, 1 / 2**14, 1 / 2**24)
    _ORDER = (1, 0, 2, 3)
    _LEVEL_OF = 3  # one slow chunk of three is a hiccup, two are a busy machine
    # A chunk shorter than this part of the longest one says little: few experts, small tiles.
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
        """Seconds from which a chunk of so many tokens says something: short ones only if they are slow."""
        if tokens < self.TELLING * self.longest:
            return _RELAXED_S
        return _RELAXED_S / 2 if tokens < _TILE else 0.0

    @property
    def is_known(self) -> bool:
        """Something was measured."""
        return self.longest > 0

    def seconds(self, tokens: int, before: int) -> float:
        return self._level * self._expected(tokens, before)

    def tokens_in(self, seconds: float, before: int) -> int:
        """The longest chunk that takes no longer than this; 0 if none does."""
        return max(int((seconds - self.seconds(0, before)) / self._each(before)), 0)

    def tokens_at(self, efficiency: float, before: int) -> int:
        """The shortest chunk that computes a token at this part of the speed of the longest chunks."""
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
        """Seconds of one token more."""
        return max(self.seconds(LONGEST_CHUNK, before) - self.seconds(0, before), 1e-9) / LONGEST_CHUNK

    def _fit(self) -> None:
        memories = self._memories.values()
        gram = [[sum(one.gram[i][j] / one.weight for one in memories) for j in range(4)] for i in range(4)]
        wanted = [sum(one.wanted[i] / one.weight for one in memories) for i in range(4)]
        for _ in range(self._SWEEPS):
            for place in self._ORDER:
                if gram[place][place] > 0:
                    rest = wanted[place] - _dot(gram[place], self._costs)
                    self._costs[place] = max(self._costs[place] + rest / gram[place][place], 0.0)


class _Memory:
    """Sums over chunks, older ones fading: all that least squares needs of them.

    Each chunk is a row of terms over its seconds, whose product with the right costs is 1.
    """

    def __init__(self) -> None:
        self.gram = [[0.0] * 4 for _ in range(4)]
        self.wanted = [0.0] * 4
        self.weight = 0.0

    def add(self, terms: Sequence[float], fading: float) -> None:
        for row, left in zip(self.gram, terms, strict=True):
            row[:] = [fading * old + left * right for old, right in zip(row, terms, strict=True)]
        self.wanted = [fading * old + term for old, term in zip(self.wanted, terms, strict=True)]
        self.weight = fading * self.weight + 1


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))


class ChunkPacer:
    """Chooses how long chunks are.

    While no reply runs they are as fast as the network can be: 2,048 tokens, or fewer where that takes more
    than a second and shorter ones reach 97 % of the speed. While replies run a chunk ends within `stall_s`,
    unless it would then be slower than 65 % of the speed: a device that needs longer for one chunk's fixed
    costs cannot stall less.

    Args:
        stall_s: seconds.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._times = ChunkTimes()
        self._before = 0

    def record(self, chunk: Chunk) -> None:
        """Learn from a chunk."""
        self._before = chunk.before
        self._times.record(chunk)

    @property
    def speed(self) -> float:
        """Tokens of a prompt that are computed in a second, as far as is known."""
        if not self._times.is_known:
            return _UNKNOWN_SPEED
        return LONGEST_CHUNK / self._times.seconds(LONGEST_CHUNK, self._before)

    def length(self, before: int, *, stalls: bool, share_s: float = 0.0) -> int:
        """Tokens of the next chunk.

        Args:
            before: tokens in front of it.
            stalls: replies run and stand still meanwhile.
            share_s: seconds that it may last then, up to a second, even if that is longer than a stall: a
                whole step of the replies follows, and shorter chunks would leave the prompt less than its
                share.
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

    def fits(self, tokens: int, before: int, seconds: float) -> bool:
        """Whether so many tokens are computed in so many seconds."""
        if not self._times.is_known:
            return tokens <= _FIRST
        return tokens == 0 or self._times.seconds(tokens, before) <= seconds


def _lengths(parts: Sequence[int]) -> list[int]:
    """These parts, times powers of two, as far as they fill tiles; shorter ones are for slow devices."""
    lengths = {part * 2**power for power in range(12) for part in parts}
    return sorted(
        length
        for length in lengths
        if _SHORTEST <= length <= LONGEST_CHUNK and (length < _TILE or length % _TILE == 0)
    )


# Few, which share buffers: 4, 6, 8, 12 ... 1536, 2048. Beside replies four in each octave: a stall counts.
_LENGTHS_ALONE, _LENGTHS_BESIDE = _lengths((2, 3)), _lengths((4, 5, 6, 7))


def _rounded_down(length: int, lengths: Sequence[int]) -> int:
    return max((one for one in lengths if one <= length), default=_SHORTEST)


def _rounded_up(length: int, lengths: Sequence[int]) -> int:
    return min((one for one in lengths if one >= length), default=LONGEST_CHUNK)
