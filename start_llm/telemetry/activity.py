"""Remember what requests do and did lately, for the status page and `/activity`.

Records are bounded in number, and each text in length, so that all of them together stay below 2 MB whatever
clients send. They hold neither prompts nor replies; where tokens had to be read again because a client has
changed a message, they hold a few words on both sides of the first difference.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from start_llm.core.events import Usage
from start_llm.core.explanation import Difference, Explanation
from start_llm.telemetry.savings import LEAST_TIMED_TOKENS, PromptReading, Saving, Savings

type Phase = Literal["waiting", "reading", "writing"]

_MAX_FINISHED = 100
_MAX_REFUSED = 50
_MAX_CONVERSATIONS = 20
_MAX_TURNS = 24
_MAX_DIGITS = 18
_LABEL_DIGITS = 6
_MAX_NAME, _MAX_PATH, _MAX_REASON, _MAX_TEXT = 100, 120, 240, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What is known of a request before it runs.

    Attributes:
        tenant: whose request it is.
        client: the program that sent it; empty if it does not say.
        unknown_model: the name of a model that it asks for and nobody has; else empty.
        session: a digest that names its session and reveals nothing.
        name: the end of the session id that the client sent; empty if it sent none.
        has_turns: it is a turn of a conversation.
        adapter: the adapters of the request; None for the base model.
    """

    id: str
    tenant: bytes
    endpoint: str
    model: str
    session: str
    name: str
    has_turns: bool
    prompt_tokens: int
    client: str = ""
    unknown_model: str = ""
    adapter: str | None = None


def endpoint_name(facts: RequestFacts) -> str:
    """Return the endpoint in one word, such as `chat` or `messages`."""
    return facts.endpoint.removeprefix("/v1/").partition("/")[0]


def session_label(facts: RequestFacts) -> str:
    """Return what terminal and status page call a session: six digits, and its name if it has one.

    The page shows names to the key alone that sent them, and the digits to everybody.
    """
    return f"{facts.session[:_LABEL_DIGITS]} {facts.name}".rstrip()


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request that is not finished. Written by its HTTP thread only; readers may see it slightly late.

    Attributes:
        began: seconds since 1970.
        cached: prompt tokens that the cache had.
        done: prompt tokens that are read, the cached ones included.
        written: tokens of the reply.
        reading_since, writing_since, told_at: on the clock of `time.perf_counter`; the last is when a line of
            the terminal told of it.
    """

    facts: RequestFacts
    began: float
    phase: Phase = "waiting"
    cached: int = 0
    done: int = 0
    written: int = 0
    reading_since: float = 0.0
    writing_since: float = 0.0
    told_at: float = 0.0

    def note_restored(self, tokens: int, at: float) -> None:
        self.phase, self.cached, self.done = "reading", tokens, tokens
        self.reading_since = at

    def note_text(self, tokens: int, at: float) -> None:
        if self.phase != "writing":
            self.writing_since = at
        self.phase, self.done = "writing", self.facts.prompt_tokens
        self.written += tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of this phase: computed prompt tokens, or those of the reply; None if there is none yet."""
        tokens = self.written - 1 if self.phase == "writing" else self.done - self.cached
        seconds = time.perf_counter() - self.phase_since
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    @property
    def phase_since(self) -> float:
        """When reading or writing began, on the clock of `time.perf_counter`."""
        return self.writing_since if self.phase == "writing" else self.reading_since


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """How a request has ended.

    Attributes:
        ending: a finish reason, `deadline`, `repetition`, `failed` or `cancelled`.
        written: tokens of the reply.
        ttft_s: seconds to the first token; None if there was none.
        prefill_s: the part of them from the start of the prefill.
        decoded, decode_s: tokens after those that came first, and the seconds from these to the last ones,
            on the engine's clock.
        explanation: of the cache's part; None if the prefill never began.
    """

    ending: str
    cached: int
    computed: int
    written: int
    seconds: float
    ttft_s: float | None
    prefill_s: float | None
    explanation: Explanation | None
    decoded: int = 0
    decode_s: float = 0.0

    @property
    def usage(self) -> Usage:
        """What was read and written, also of a request that did not come to its end."""
        return Usage(prompt=self.cached + self.computed, cached=self.cached, completion=self.written)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that has ended.

    Attributes:
        number: of this record; later ones have higher numbers.
        ended: seconds since 1970.
        prefill_s, decoded, decode_s: see `RequestOutcome`.
        again: computed prompt tokens that had been computed before.
        reason: why, in plain words; None if there are none.
        continues: it is known to continue a conversation.
        computed_text, asked_text: the words around the first difference, as they were computed last and as
            the request has them; empty if no difference of words is the reason.
    """

    number: int
    facts: RequestFacts
    ended: float
    ending: str
    cached: int
    computed: int
    written: int
    seconds: float
    ttft_s: float | None
    prefill_s: float | None = None
    decoded: int = 0
    decode_s: float = 0.0
    again: int = 0
    reason: str | None = None
    continues: bool = False
    computed_text: str = ""
    asked_text: str = ""

    @property
    def read_per_s(self) -> float | None:
        """Computed prompt tokens per second; None if there were too few to tell."""
        if not self.prefill_s or self.computed < LEAST_TIMED_TOKENS:
            return None
        return self.computed / self.prefill_s

    @property
    def written_per_s(self) -> float | None:
        """Tokens of the reply per second, from its first one on; None if there was no second one."""
        return self.decoded / self.decode_s if self.decoded and self.decode_s > 0 else None

    @property
    def has_difference(self) -> bool:
        return bool(self.computed_text or self.asked_text)


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
        self._running: dict[int, RunningRequest] = {}
        self._finished: deque[FinishedRequest] = deque(maxlen=_MAX_FINISHED)
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

    def begin(self, facts: RequestFacts) -> RunningRequest:
        """Add a request. `end` removes it."""
        clipped = replace(
            facts,
            id=facts.id[:_MAX_NAME],
            model=facts.model[:_MAX_NAME],
            name=facts.name[:_MAX_NAME],
            client=facts.client[:_MAX_NAME],
            unknown_model=facts.unknown_model[:_MAX_NAME],
        )
        running = RunningRequest(clipped, self._clock())
        with self._lock:
            self._running[id(running)] = running
        return running

    def end(self, running: RunningRequest, outcome: RequestOutcome) -> FinishedRequest:
        """Remove a request, and return the record of it."""
        if explanation := outcome.explanation:
            self._savings.add(
                PromptReading.of_request(
                    cached=outcome.cached,
                    computed=outcome.computed,
                    prefill_s=outcome.prefill_s,
                    disk_s=explanation.restored.disk_s,
                )
            )
        with self._lock:
            self._last_number += 1
            self._running.pop(id(running), None)
            finished = _finished(self._last_number, running.facts, outcome, self._clock())
            self._finished.append(finished)
            if outcome.explanation and running.facts.has_turns:
                self._add_turn(finished)
        return finished

    def _add_turn(self, finished: FinishedRequest) -> None:
        key = finished.facts.tenant, finished.facts.session
        history = self._conversations.pop(key, None) or ConversationHistory(finished.facts)
        history.facts = finished.facts
        history.turns.append(
            ConversationTurn(
                number=finished.number,
                ended=finished.ended,
                cached=finished.cached,
                new=finished.computed - finished.again,
                again=finished.again,
                reason=finished.reason,
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
            same = [one for one in self._refused if replace(one, number=0, last=0.0, times=1) == clipped]
            for one in same:
                self._refused.remove(one)
            times = 1 + sum(one.times for one in same)
            self._refused.append(replace(clipped, number=self._last_number, last=self._clock(), times=times))

    def running(self) -> Sequence[RunningRequest]:
        """Return the running requests, the oldest first."""
        with self._lock:
            return tuple(self._running.values())

    def finished(self) -> Sequence[FinishedRequest]:
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
            return tuple((one.facts, tuple(one.turns)) for one in reversed(self._conversations.values()))

    def savings(self) -> tuple[Saving, Saving]:
        """Return what was saved over the last hour and over the last day."""
        return self._savings.of_hour_and_day()


def _finished(number: int, facts: RequestFacts, outcome: RequestOutcome, ended: float) -> FinishedRequest:
    explanation = outcome.explanation
    again = min(explanation.lost, outcome.computed) if explanation else 0
    cause = _cause(explanation) if explanation and again else None
    return FinishedRequest(
        number=number,
        facts=facts,
        ended=ended,
        ending=outcome.ending,
        cached=outcome.cached,
        computed=outcome.computed,
        written=outcome.written,
        seconds=outcome.seconds,
        ttft_s=outcome.ttft_s,
        prefill_s=outcome.prefill_s,
        decoded=outcome.decoded,
        decode_s=outcome.decode_s,
        again=again,
        reason=_clip(plain_reason(explanation), _MAX_REASON) if explanation and again else None,
        continues=explanation is not None and explanation.against is not None,
        computed_text=_clip(cause.computed, _MAX_TEXT) if cause else "",
        asked_text=_clip(cause.asked, _MAX_TEXT) if cause else "",
    )


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
