"""Decide how many tokens to draft: as many as pay for the longer forward pass that verifies them."""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.pass_times import PASSES, PassTimes
from start_llm.telemetry.metrics import DraftMetrics

_LEAST_GAIN = 1.05
"""How much faster a reply has to get, at least. A draft also costs the overlap of host and device."""
_WASTE = 4.0
"""The time of rejected tokens counts this many times on top of itself, so that it stays small everywhere."""
_FADING = 0.96
"""What an older observation weighs beside the next one."""
_ASSUMED = (0.3, 0.5, 0.7, 0.85, 0.95, 0.9, 0.3, 0.5, 0.7, 0.85, 0.95)
"""How often a drafted token is right, by class of match, before anything was seen: as on edits of files."""
_WEIGHT = 4.0
"""Observations for which that counts."""
_STEPS_BETWEEN = 16
"""Times that lengths are asked for without deciding anew, unless a draft of several tokens was verified."""


@owned_by(ENGINE)
class DraftGain:
    """Follows how often drafts are right and what passes cost, and says how long drafts should be.

    Tokens that were not drafted are observed too: whether the index would have proposed them. So drafts come
    back when a reply begins to repeat earlier text.

    Args:
        times: of forward passes of one sequence.
    """

    def __init__(self, times: PassTimes, metrics: DraftMetrics | None = None) -> None:
        self.times = times
        self.metrics = metrics or DraftMetrics()
        self._right = [share * _WEIGHT for share in _ASSUMED]
        self._seen = [_WEIGHT] * len(_ASSUMED)
        self._steps_until_due = 0
        self._lengths: tuple[int, ...] = ()
        self._can_pay = False
        self.metrics.pays = self.can_pay()

    def note_verified(self, match: int, drafted: int, accepted: int) -> None:
        """Record a draft that was verified."""
        pass_s, token_s = self.times.seconds(drafted + 1), self.times.seconds(1)
        each_s = max(pass_s - token_s, 0.0) / drafted
        saved_s, rejected_s = (accepted + 1) * token_s - pass_s, (drafted - accepted) * each_s
        self.metrics.note(drafted, accepted, saved_s=saved_s, rejected_s=rejected_s)
        self.note(match, drafted, accepted)

    def note(self, match: int, drafted: int, accepted: int) -> None:
        """Record how many of the tokens that followed a match of this class were right, from the first on."""
        self._steps_until_due = 0 if drafted > 1 else self._steps_until_due
        wrong = accepted < drafted
        for right in (*[1] * accepted, *[0] * wrong):
            self._right[match] = self._right[match] * _FADING + right
            self._seen[match] = self._seen[match] * _FADING + 1

    def share(self, match: int) -> float:
        """Return how often a token after a match of this class is right, if all before it were."""
        return self._right[match] / self._seen[match]

    def lengths(self) -> tuple[int, ...]:
        """Return how many tokens to draft after each class of match; () if no draft pays. Each call counts
        towards the next decision.
        """
        self._update()
        return self._lengths

    def can_pay(self) -> bool:
        """Return whether drafts would pay if all of their tokens were right. Each call counts towards
        the next decision.
        """
        self._update()
        return self._can_pay

    def _update(self) -> None:
        """Decide anew if it is time: deciding takes a twentieth of a step of a small model."""
        self._steps_until_due -= 1
        if self._steps_until_due >= 0:
            return
        self._steps_until_due = _STEPS_BETWEEN
        token_s = self.times.seconds(1)
        passes = [(tokens - 1, self.times.seconds(tokens)) for tokens in PASSES[1:]]
        lengths = tuple(_best(self.share(match), token_s, passes) for match in range(len(_ASSUMED)))
        self._lengths = lengths if any(lengths) else ()
        self._can_pay = _best(1.0, token_s, passes) > 0


def _best(share: float, token_s: float, passes: Sequence[tuple[int, float]]) -> int:
    """Return the number of drafted tokens with the most tokens a second; 0 if none is worth it.

    Args:
        share: how often a token is right, if all before it were.
        token_s: seconds of a pass of one token.
        passes: numbers of drafted tokens, and the seconds of the passes that verify them.
    """
    best, gain = 0, _LEAST_GAIN
    for drafted, pass_s in passes:
        given = expected_tokens(share, drafted)
        rejected_s = (drafted + 1 - given) * max(pass_s - token_s, 0.0) / drafted
        gained = given * token_s / (pass_s + _WASTE * rejected_s) if pass_s else 0.0
        if gained > gain:
            best, gain = drafted, gained
    return best


def expected_tokens(share: float, drafted: int) -> float:
    """Return the tokens that a pass with so many drafted ones is expected to give, its own one included."""
    return float(drafted + 1) if share >= 1 else (1 - share ** (drafted + 1)) / (1 - share)
