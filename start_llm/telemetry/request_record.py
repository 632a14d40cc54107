"""The one record of a request. Counters, terminal, trace and status page show views of it."""

import time
from dataclasses import dataclass, field
from typing import Literal

from start_llm.core.chat import RequestOrigin
from start_llm.core.events import Finished, Restored, Usage
from start_llm.core.explanation import Explanation
from start_llm.telemetry.savings import LEAST_TIMED_TOKENS

type Phase = Literal["waiting", "reading", "writing"]

_NAME_END = 12
_LABEL_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts(RequestOrigin):
    """What is known of a request before it runs. What is added and is not named here are fields of the trace.

    Attributes:
        tenant: whose request it is; shown to nobody, as its key.
        session: a digest that names its session and reveals nothing.
        name: the end of the session id that the client sent; empty if it sent none.
        adapter: the adapters of the request; None for the base model.
        images: the number of images in its prompt.
        is_prewarm: its prompt is read, and nothing is generated.
    """

    tenant: bytes
    session: str
    session_source: Literal["client", "conversation", "none"]
    prompt_tokens: int
    name: str = ""
    adapter: str | None = None
    parent_session: str | None = None
    branch: str | None = None
    messages: int = 0
    images: int = 0
    stable_prefix_msg_count: int = 0
    cache_key_delta_chars: int = 0
    bound_messages: int = 0
    bound_tokens: int = 0
    replaced_tokens: int = 0
    binding_refusal: str | None = None
    is_prewarm: bool = False

    @property
    def has_turns(self) -> bool:
        """It is a turn of a conversation."""
        return self.session_source != "none" and not self.is_prewarm

    @property
    def endpoint_name(self) -> str:
        """The endpoint in one word, such as `chat` or `messages`."""
        return self.endpoint.removeprefix("/v1/").partition("/")[0]

    @property
    def session_label(self) -> str:
        """What terminal and status page call a session: six digits, and its name if it has one.

        The page shows names to the key alone that sent them, and the digits to everybody.
        """
        return f"{self.session[:_LABEL_DIGITS]} {self.name}".rstrip()


@dataclass(eq=False, slots=True)
class RequestRecord:
    """One request, from its arrival to its end and for a while after.

    Written by its HTTP thread only; readers may see it slightly late. Moments are on the clock of
    `time.perf_counter`, apart from `began` and `ended`, which are seconds since 1970.

    Attributes:
        done: prompt tokens that are read, the cached ones included.
        written: tokens of the reply.
        decoded: those of them after the ones that came first.
        first_text, last_text: when tokens came first and last.
        usage: what the reply says of itself at its end.
        ending: a finish reason, `deadline`, `repetition`, `failed` or `cancelled`.
        explanation: of the cache's part; dropped at the end, when the fields below keep what is shown of it.
        printed_at: when the terminal last printed a line about it.
        number: of this record among those that have ended; later ones have higher numbers.
        again: computed prompt tokens that had been computed before.
        reason: why, in plain words; None if there are none.
        continues: it is known to continue a conversation.
        computed_text, asked_text: the words around the first difference, as they were computed last and as
            the request has them; empty if no difference of words is the reason.
    """

    facts: RequestFacts
    arrived: float = field(default_factory=time.perf_counter)
    submitted: float = field(default_factory=time.perf_counter)
    began: float = 0.0
    restored: Restored | None = None
    explanation: Explanation | None = None
    done: int = 0
    written: int = 0
    decoded: int = 0
    first_text: float | None = None
    last_text: float | None = None
    usage: Usage | None = None
    ending: str = "cancelled"
    left: float | None = None
    printed_at: float = 0.0
    number: int = 0
    ended: float = 0.0
    again: int = 0
    reason: str | None = None
    continues: bool = False
    computed_text: str = ""
    asked_text: str = ""

    def note_restored(self, restored: Restored) -> None:
        self.restored, self.done = restored, restored.tokens

    def note_text(self, tokens: int, at: float) -> None:
        if self.first_text is None:
            self.first_text = at
        else:
            self.decoded += tokens
        self.last_text, self.done = at, self.facts.prompt_tokens
        self.written += tokens

    def note_finished(self, end: Finished) -> None:
        self.ending = end.cut_by or end.reason
        self.usage, self.written = end.usage, end.usage.completion

    def note_left(self) -> None:
        self.left = time.perf_counter()

    @property
    def phase(self) -> Phase:
        if self.first_text is not None:
            return "writing"
        return "reading" if self.restored else "waiting"

    @property
    def turn_came(self) -> float:
        """When the prefill began; of a request that still waits, when that began."""
        return self.restored.at if self.restored else self.submitted

    @property
    def phase_since(self) -> float:
        return self.turn_came if self.first_text is None else self.first_text

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of this phase: computed prompt tokens, or those of the reply; None if there is none yet."""
        tokens = self.written - 1 if self.phase == "writing" else self.done - self.cached
        seconds = time.perf_counter() - self.phase_since
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    @property
    def cached(self) -> int:
        """Prompt tokens that the cache had."""
        return self.restored.tokens if self.restored else 0

    @property
    def computed(self) -> int:
        """Computed prompt tokens. The first decode step computes the last one, unless nothing is decoded."""
        has_decoded = self.usage is not None and self.usage.completion > 0
        is_complete = has_decoded or self.first_text is not None
        return (self.facts.prompt_tokens if is_complete else max(self.done, self.cached)) - self.cached

    @property
    def final_usage(self) -> Usage:
        """What was read and written, also of a request that did not come to its end."""
        so_far = Usage(prompt=self.cached + self.computed, cached=self.cached, completion=self.written)
        return self.usage or so_far

    @property
    def seconds(self) -> float:
        """From its arrival to its end."""
        return (time.perf_counter() if self.left is None else self.left) - self.arrived

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None if there was none."""
        return None if self.first_text is None else self.first_text - self.arrived

    @property
    def prefill_s(self) -> float | None:
        """The part of `ttft_s` from the start of the prefill."""
        return self.first_text - self.restored.at if self.first_text is not None and self.restored else None

    @property
    def read_per_s(self) -> float | None:
        """Computed prompt tokens per second; None if there were too few to tell."""
        if not self.prefill_s or self.computed < LEAST_TIMED_TOKENS:
            return None
        return self.computed / self.prefill_s

    @property
    def written_per_s(self) -> float | None:
        """Tokens of the reply per second, from its first one on; None if there was no second one."""
        if self.first_text is None or self.last_text is None or not self.decoded:
            return None
        seconds = self.last_text - self.first_text
        return self.decoded / seconds if seconds > 0 else None

    @property
    def has_difference(self) -> bool:
        return bool(self.computed_text or self.asked_text)


def session_name(session_id: str | None) -> str:
    """Return the end of a session id, as it may be shown."""
    return printable((session_id or "")[-_NAME_END:])


def printable(text: str) -> str:
    """Replace characters that could move the terminal's cursor."""
    return "".join(char if char.isprintable() else "?" for char in text)
