"""Remember what requests do and did lately, for the status page and `/activity`.

Records are bounded in number, and each text in length, so that all of them together stay below 2 MB whatever
clients send. They hold neither prompts nor replies; where tokens had to be read again because a client has
changed a message, they hold a few words on both sides of the first difference.
"""

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from start_llm.core.explanation import Difference, Explanation
from start_llm.telemetry.request_record import RequestFacts, RequestRecord
from start_llm.telemetry.savings import PromptReading, Saving, Savings

_MAX_FINISHED = 100
_MAX_REFUSED = 50
_MAX_CONVERSATIONS = 20
_MAX_TURNS = 24
_MAX_DIGITS = 18
_MAX_NAME, _MAX_PATH, _MAX_REASON, _MAX_TEXT = 100, 120, 240, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that was refused before the engine saw it. Equal ones are one record.

    Attributes:
        tenant: whose request it was; None if it was refused at the door, before that is known.
        number: of this record; later ones have higher numbers.
        times: how often it came.
        last: seconds since 1970.
    """

    tenant: bytes | None
    method: str
    path: str
    status: int
    reason: str
    number: int = 0
    last: float = 0.0
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationTurn:
    """One turn: prompt tokens that the cache had, that were new, and that were read again."""

    number: int
    ended: float
    cached: int
    new: int
    again: int
    reason: str | None


@dataclass(eq=False, slots=True)
class ConversationHistory:
    """The last turns of a conversation. `facts` are those of the newest."""

    facts: RequestFacts
    turns: deque[ConversationTurn] = field(default_factory=lambda: deque(maxlen=_MAX_TURNS))


class Activity:
    """The running requests, and bounded records of those before. Safe to use from any thread.

    Args:
        clock: returns seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._running: dict[int, RequestRecord] = {}
        self._finished: deque[RequestRecord] = deque(maxlen=_MAX_FINISHED)
        self._refused: deque[Refusal] = deque(maxlen=_MAX_REFUSED)
        self._conversations: OrderedDict[tuple[bytes, str], ConversationHistory] = OrderedDict()
        self._savings = Savings(clock)
        self._name, self._last_number = secrets.token_hex(4), 0
        self._lock = threading.Lock()

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def version(self) -> str:
        """A name of the present records. It changes whenever they do, and another process has others."""
        return f"{self._name}-{self._last_number}"

    def last_number_in(self, version: str | None) -> int | None:
        """Return the number of the last record of a version; None if it is none of this process."""
        name, _, number = (version or "").partition("-")
        is_own = name == self._name and number.isascii() and number.isdigit() and len(number) < _MAX_DIGITS
        return int(number) if is_own else None

    def begin(self, record: RequestRecord) -> None:
        """Add a request, and cut what clients choose of its facts to a bounded length. `end` removes it."""
        facts = record.facts
        record.began = self._clock()
        record.facts = replace(
            facts,
            id=facts.id[:_MAX_NAME],
            model=facts.model[:_MAX_NAME],
            name=facts.name[:_MAX_NAME],
            client=facts.client[:_MAX_NAME],
            unknown_model=facts.unknown_model[:_MAX_NAME],
        )
        with self._lock:
            self._running[id(record)] = record

    def end(self, record: RequestRecord) -> None:
        """Let a request be among those that have ended, with what is shown of its explanation."""
        explanation, record.explanation = record.explanation, None
        if explanation:
            _keep_reason(record, explanation)
            self._savings.add(
                PromptReading.of_request(
                    cached=record.cached,
                    computed=record.computed,
                    prefill_s=record.prefill_s,
                    disk_s=explanation.restored.disk_s,
                )
            )
        with self._lock:
            self._last_number += 1
            self._running.pop(id(record), None)
            record.number, record.ended = self._last_number, self._clock()
            self._finished.append(record)
            if explanation and record.facts.has_turns:
                self._add_turn(record)

    def _add_turn(self, record: RequestRecord) -> None:
        key = record.facts.tenant, record.facts.session
        history = self._conversations.pop(key, None) or ConversationHistory(record.facts)
        history.facts = record.facts
        history.turns.append(
            ConversationTurn(
                number=record.number,
                ended=record.ended,
                cached=record.cached,
                new=record.computed - record.again,
                again=record.again,
                reason=record.reason,
            )
        )
        self._conversations[key] = history
        while len(self._conversations) > _MAX_CONVERSATIONS:
            self._conversations.popitem(last=False)

    def refuse(self, refusal: Refusal) -> None:
        """Add a refusal, or count it with equal ones."""
        clipped = replace(
            refusal,
            method=_clip(refusal.method, _MAX_NAME),
            path=_clip(refusal.path, _MAX_PATH),
            reason=_clip(refusal.reason, _MAX_REASON),
        )
        with self._lock:
            self._last_number += 1
            same = [
                earlier
                for earlier in self._refused
                if replace(earlier, number=0, last=0.0, times=1) == clipped
            ]
            for earlier in same:
                self._refused.remove(earlier)
            times = 1 + sum(earlier.times for earlier in same)
            self._refused.append(replace(clipped, number=self._last_number, last=self._clock(), times=times))

    def running(self) -> Sequence[RequestRecord]:
        """Return the running requests, the oldest first."""
        with self._lock:
            return tuple(self._running.values())

    def finished(self) -> Sequence[RequestRecord]:
        """Return the requests that have ended, the newest first."""
        with self._lock:
            return tuple(reversed(self._finished))

    def refused(self) -> Sequence[Refusal]:
        """Return the refusals, the newest first."""
        with self._lock:
            return tuple(reversed(self._refused))

    def conversations(self) -> Sequence[tuple[RequestFacts, tuple[ConversationTurn, ...]]]:
        """Return the conversations with their turns, the one that was used last first."""
        with self._lock:
            return tuple(
                (history.facts, tuple(history.turns)) for history in reversed(self._conversations.values())
            )

    def savings(self) -> tuple[Saving, Saving]:
        """Return what was saved over the last hour and over the last day."""
        return self._savings.of_hour_and_day()


def _keep_reason(record: RequestRecord, explanation: Explanation) -> None:
    record.continues = explanation.against is not None
    record.again = min(explanation.lost, record.computed)
    if not record.again:
        return
    record.reason = _clip(plain_reason(explanation), _MAX_REASON)
    if cause := _cause(explanation):
        record.computed_text = _clip(cause.computed, _MAX_TEXT)
        record.asked_text = _clip(cause.asked, _MAX_TEXT)


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _cause(explanation: Explanation) -> Difference | None:
    """Return the difference that is the reason; None if the reason is one of the cache's own."""
    return None if explanation.restored.miss in _CACHE_REASONS else explanation.cause


def plain_reason(explanation: Explanation) -> str:
    """Return the reason why tokens had to be read again, as a part of a sentence."""
    of_cache = _CACHE_REASONS.get(explanation.restored.miss or "")
    if of_cache:
        return of_cache
    cause = explanation.cause
    return _in_words(cause) if cause else explanation.reason_without_cause


def _in_words(cause: Difference) -> str:
    if cause.message is None:
        return f"the request {cause.what.replace('have ', 'has ', 1)}"
    place = f"message {cause.message + 1} ({cause.role})"
    return f"{cause.rule!r} in {place} {cause.what}" if cause.rule else f"{place} {cause.what}"


_CACHE_REASONS = {
    "evicted": "they had been dropped to make room for others",
    "no_state": "this model can only resume at certain points, and none was kept nearer to their end",
    "off": "the cache is off",
}
