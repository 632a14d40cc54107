"""How fast restores from the disk are, so that none is begun that takes longer than computing."""

from collections import deque

_LEAST_BYTES = 2**24
"""Less says more of waiting than of reading."""
_REMEMBERED = 8
_MOST_TIMES_AS_LONG = 1.5
"""As computing a restore may take: it leaves the device to other prompts."""
_UNNOTICED_S = 0.25
"""Nobody notices so much more, and nothing is computed twice."""


class RestorePace:
    """The last restores of a model."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, nbytes: int, seconds: float) -> None:
        """Learn from a restore, with its wait for others."""
        if nbytes >= _LEAST_BYTES and seconds > 0:
            self._rates.append(nbytes / seconds)

    def is_slower(self, nbytes: int, computing_s: float) -> bool:
        """Return whether restoring takes so long that computing in `computing_s` seconds is better.

        It goes by the fastest of the last restores: the others may have waited for a busy disk. As long as
        none is known, restoring is better.
        """
        acceptable_s = _MOST_TIMES_AS_LONG * computing_s + _UNNOTICED_S
        return bool(self._rates) and nbytes / max(self._rates) > acceptable_s
