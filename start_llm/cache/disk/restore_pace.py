"""How fast restores from the disk are, so that none is begun that takes much longer than computing."""

import time
from collections import deque
from collections.abc import Callable

_LEAST_BYTES = 2**24
"""Less says more of waiting than of reading."""
_REMEMBERED = 8
_REMEMBERED_S = 600.0
"""A disk that slept is soon fast again, and only another restore shows it."""
_MOST_TIMES_AS_LONG = 1.5
"""A restore may take this many times as long as computing, because it leaves the device to other prompts."""
_UNNOTICED_S = 0.25
"""Nobody notices so much more, and nothing is computed twice."""


class RestorePace:
    """The last restores of a model.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def note(self, nbytes: int, seconds: float) -> None:
        """Learn from a restore whose files were read and copied in this time."""
        if nbytes >= _LEAST_BYTES and seconds > 0:
            self._rates.append((self._clock(), nbytes / seconds))

    def is_slower(self, nbytes: int, computing_s: float) -> bool:
        """Return whether restoring takes so long that computing in `computing_s` seconds is better.

        It goes by the fastest of the last restores: the others may have met a busy disk. As long as none is
        known, or the last one is long ago, restoring is better.
        """
        while self._rates and self._rates[0][0] < self._clock() - _REMEMBERED_S:
            self._rates.popleft()
        acceptable_s = _MOST_TIMES_AS_LONG * computing_s + _UNNOTICED_S
        return bool(self._rates) and nbytes / max(rate for _, rate in self._rates) > acceptable_s
