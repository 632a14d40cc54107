"""Notices a model that goes round in circles: within a reply, and from turn to turn."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from start_llm.core.chat import Message

type RepetitionPolicy = Literal["stop", "tell", "off"]
"""What happens to a reply that repeats itself: it ends, the user is warned, or nothing."""

RUNAWAY_TOKENS = 2000
LONGEST_PERIOD = 200
"""Tokens. A reply runs away once it has repeated a piece of at most `LONGEST_PERIOD` for `RUNAWAY_TOKENS`."""
_BETWEEN_LOOKS = 100
_FIRST_REPORTED = 4


class RunawayDetector:
    """Looks for a piece that a reply repeats. Cheap: it compares every hundred tokens."""

    def __init__(self) -> None:
        self._tail: deque[int] = deque(maxlen=RUNAWAY_TOKENS)
        self._unseen = 0

    def feed(self, tokens: Sequence[int]) -> int:
        """Take the next tokens of a reply. Returns the length of the piece that it repeats, or 0."""
        self._tail.extend(tokens)
        self._unseen += len(tokens)
        if self._unseen < _BETWEEN_LOOKS or len(self._tail) < RUNAWAY_TOKENS:
            return 0
        self._unseen = 0
        period = _period(list(self._tail))
        return period if period <= LONGEST_PERIOD else 0


@dataclass(frozen=True, slots=True)
class RepetitionHandling:
    """What is done about a model that goes round in circles (`REPETITION`).

    Attributes:
        calls_notice: what the terminal says of calls that the conversation repeats; empty if it repeats none.
        detector: looks for a piece that the reply repeats; None: nothing does.
        may_stop: a reply that runs away is ended, unless it is inside a call.
    """

    calls_notice: str = ""
    detector: RunawayDetector | None = None
    may_stop: bool = False


def _period(tokens: Sequence[int]) -> int:
    """Return the length of the shortest piece that repeated, the last time perhaps in part, gives all tokens.

    It is what the longest part that is both beginning and end leaves (Knuth, Morris and Pratt, 1977).
    """
    borders = [0]
    for token in tokens[1:]:
        border = borders[-1]
        while border and tokens[border] != token:
            border = borders[border - 1]
        borders.append(border + (tokens[border] == token))
    return len(tokens) - borders[-1]


def repeated_calls(messages: Sequence[Message]) -> tuple[str, int]:
    """Return the names of the last calls, and how often in a row they brought the same results.

    Once is not repeated: the count is then 1, and 0 if the conversation does not end with results. Names,
    arguments and results are equal from turn to turn; what the model says beside its calls does not count.
    """
    rounds = _rounds_from_the_end(messages)
    last = next(rounds, None)
    if last is None:
        return "", 0
    count = 1
    for earlier in rounds:
        if earlier != last:
            break
        count += 1
    return ", ".join(name for name, _ in last[0]), count


def is_worth_reporting(count: int) -> bool:
    """Return whether so many repetitions are reported: four, and every time that they have doubled."""
    return count >= _FIRST_REPORTED and count & (count - 1) == 0


type _Round = tuple[list[tuple[str, str]], list[str]]


def _rounds_from_the_end(messages: Sequence[Message]) -> Iterator[_Round]:
    """Yield calls and their results, the last ones first, up to a message of another kind."""
    results: list[str] = []
    for message in reversed(messages):
        if message.role == "tool":
            results.append(message.content)
        elif message.role == "assistant" and message.tool_calls and results:
            calls = [(call.name, json.dumps(call.arguments, sort_keys=True)) for call in message.tool_calls]
            yield calls, results
            results = []
        else:
            return
