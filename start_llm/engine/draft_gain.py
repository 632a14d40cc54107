"""Decide how many tokens to draft: as many as pay for the longer forward pass that verifies them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.draft_index import MATCHES

PASSES = (1, 2, 4, 8, 16)
"""Tokens of the forward passes that are measured."""
_LEAST_GAIN = 1.05
"""How much faster a reply has to get, at least. A draft also costs the overlap of host and device."""
_FADING = 0.96
"""What an older observation weighs beside the next one."""
_ASSUMED = (0.3, 0.5, 0.7, 0.85, 0.95)
"""How often a drafted token is right, by class of match, before anything was seen: as on edits of files."""
_WEIGHT = 4.0
"""Observations for which that counts."""
_REMEMBERED = 5


class PassTimes:
    """The seconds of forward passes that go on with one sequence, by their number of tokens.

    Args:
        measured: by the numbers of `PASSES`. Where one is left out, each token takes as long as the first.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self._recent = {tokens: deque[float](maxlen=_REMEMBERED) for tokens in PASSES}
        self._medians: dict[int, float] = {}
        for tokens, seconds in (measured or {}).items():
            self._add(tokens, seconds)

    def note(self, tokens: int, seconds: float) -> None:
        """Record a pass. One of a length between those of `PASSES` tells of the next longer one."""
        known = next((length for length in PASSES if length >= tokens), None)
        if known is None:
            return
        expected = self.seconds(tokens)
        self._add(known, seconds * (self.seconds(known) / expected if expected else 1.0))

    def _add(self, tokens: int, seconds: float) -> None:
        self._recent[tokens].append(seconds)
        self._medians[tokens] = median(self._recent[tokens])

    def seconds(self, tokens: int) -> float:
        """Return the median of the last passes of so many tokens, by interpolation; 0 if none is known."""
        shorter = max(length for length in PASSES if length <= tokens)
        longer = next((length for length in PASSES if length >= tokens), None)
        low = self._of(shorter)
        if longer is None:
            return low * tokens / shorter
        return low + (self._of(longer) - low) * (tokens - shorter) / max(longer - shorter, 1)

    def _of(self, tokens: int) -> float:
        return self._medians.get(tokens) or tokens * self._medians.get(1, 0.0)


@owned_by(ENGINE)
class DraftGain:
    """Follows how often drafts are right and what passes cost, and says how long drafts should be.

    Also tokens that were not drafted are observed: whether the index would have said them. So drafts come
    back when a reply begins to repeat what was said.

    Attributes:
        times: of forward passes of one sequence.
        drafts: that were verified.
        drafted, accepted: tokens of these, and those of them that became the reply's.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self.times = PassTimes(measured)
        self.drafts = self.drafted = self.accepted = 0
        self._right = [share * _WEIGHT for share in _ASSUMED]
        self._seen = [_WEIGHT] * len(MATCHES)

    def note_verified(self, match: int, drafted: int, accepted: int) -> None:
        """Record a draft that was verified."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.note(match, drafted, accepted)

    def note(self, match: int, drafted: int, accepted: int) -> None:
        """Record how many of the tokens that followed a match of this class were right, from the first on."""
        wrong = accepted < drafted
        for right in (*[1] * accepted, *[0] * wrong):
            self._right[match] = self._right[match] * _FADING + right
            self._seen[match] = self._seen[match] * _FADING + 1

    def share(self, match: int) -> float:
        """Return how often a token behind a match of this class is right, if all before it were."""
        return self._right[match] / self._seen[match]

    def lengths(self) -> tuple[int, ...]:
        """Return how many tokens to draft behind each class of match; () if no draft pays."""
        lengths = tuple(self._best(self.share(match)) for match in range(len(MATCHES)))
        return lengths if any(lengths) else ()

    def can_pay(self) -> bool:
        """Return whether drafts would pay if all of their tokens were right."""
        return self._best(1.0) > 0

    def _best(self, share: float) -> int:
        plain_s = self.times.seconds(1)
        if not plain_s:
            return 0
        gains = {
            tokens - 1: expected(share, tokens - 1) * plain_s / self.times.seconds(tokens)
            for tokens in PASSES
        }
        best = max(gains, key=lambda drafted: gains[drafted])
        return best if gains[best] >= _LEAST_GAIN else 0


def expected(share: float, drafted: int) -> float:
    """Return the tokens that a pass with so many drafted ones is expected to give, its own one included."""
    return float(drafted + 1) if share >= 1 else (1 - share ** (drafted + 1)) / (1 - share)
