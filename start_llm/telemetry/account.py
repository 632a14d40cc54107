"""Report what happens to a request to the counters, the terminal and the trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from start_llm.core.events import Event, Failed, Finished, Prefilling, Restored, Text, Usage
from start_llm.core.explanation import Explanation
from start_llm.telemetry.activity import Activity, RequestFacts, RequestOutcome
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.prometheus import RequestObserver, ServerMetrics
from start_llm.telemetry.terminal import RequestLine, Terminal
from start_llm.telemetry.trace import Texts, Trace, TracedReply, TracedRequest


@dataclass(frozen=True, slots=True)
class Reports:
    """The receivers of reports.

    Attributes:
        trace: None if no trace is written.
        observer: for the histograms of `/metrics`.
        shows_images: the terminal shows where images stand in prompts (VLM_CACHE_DEBUG).
    """

    metrics: RequestMetrics
    terminal: Terminal
    trace: Trace | None = None
    observer: RequestObserver = field(default_factory=lambda: ServerMetrics().observer(""))
    shows_images: bool = False
    activity: Activity = field(default_factory=Activity)


type Explain = Callable[[Restored], Explanation]
"""Explains why no more of a prompt was restored."""


class RequestAccount:
    """Follows one request to its end. Owned by its HTTP thread."""

    def __init__(self, reports: Reports, line: RequestLine, asked: TracedRequest, explain: Explain) -> None:
        self._reports = reports
        self._line = line
        self._asked = asked
        self._explain = explain
        self._explanation: Explanation | None = None
        self._restored: Restored | None = None
        self._prefilled = 0
        self._ending = "cancelled"
        self._usage: Usage | None = None
        self._submitted = self._turn_came = time.perf_counter()
        self._last_text: float | None = None
        self._decoded = 0

    def begin(self) -> None:
        self._reports.metrics.begin()
        self._running = self._reports.activity.begin(self._facts())

    def _facts(self) -> RequestFacts:
        asked, line = self._asked, self._line
        return RequestFacts(
            id=asked.request_id,
            tenant=line.tenant,
            endpoint=asked.endpoint,
            model=asked.model,
            session=asked.session,
            name=line.name,
            has_turns=asked.session_source != "none",
            prompt_tokens=line.prompt_tokens,
            client=line.client,
            unknown_model=line.unknown_model,
            adapter=line.adapter,
        )

    def note(self, event: Event) -> None:
        """Handle the next event of the request."""
        match event:
            case Restored():
                self._note_restored(event)
            case Prefilling():
                self._prefilled = self._running.done = event.done
                self._reports.terminal.progress(self._running)
            case Text():
                self._line.note_text(event.at)
                self._note_tokens(len(event.tokens), event.at)
                self._running.note_text(len(event.tokens), event.at)
                self._reports.terminal.progress(self._running)
            case Finished():
                self._ending = event.cut_by or event.reason
                self._usage = event.usage
            case Failed():
                self._ending = "failed"
                self._reports.terminal.failed(self._running.facts, event.message)
            case _:
                pass

    def note_repetition(self, what: str) -> None:
        """Tell the user that the model goes round in circles, and count it."""
        self._reports.metrics.note_repetition()
        self._reports.terminal.repeats(self._running.facts, what)

    def _note_tokens(self, count: int, at: float) -> None:
        observer = self._reports.observer
        if self._last_text is None:
            observer.note_first_token(at - self._line.began, at - self._turn_came)
        else:
            observer.note_tokens(count, at - self._last_text)
            self._decoded += count
        self._last_text = at

    def _note_restored(self, restored: Restored) -> None:
        self._restored = restored
        self._turn_came = restored.at
        self._reports.observer.note_turn(self._turn_came - self._submitted)
        self._running.note_restored(restored.tokens, restored.at)
        self._explanation = self._explain(restored)
        terminal = self._reports.terminal
        if self._line.images and self._reports.shows_images:
            terminal.images(self._running.facts, self._line, restored)
        if restored.disk_tokens:
            terminal.restored(self._running.facts, restored)

    def end(self, reply_length: int, texts: Texts) -> None:
        """Report the end of the request.

        It counts as in flight until its trace line is written, so that a stopping server waits for it.

        Args:
            reply_length: tokens of the reply that were received.
            texts: prompt and reply, for the trace if it needs them.
        """
        reports, outcome = self._reports, self._outcome(reply_length)
        reports.terminal.finished(reports.activity.end(self._running, outcome))
        self._observe_end(reply_length)
        if reports.trace:
            reports.trace.write(self._asked, self._ended(reply_length), texts)
        reports.metrics.end(self._ending, self._usage or outcome.usage)

    def _observe_end(self, reply_length: int) -> None:
        observer, prompt = self._reports.observer, self._line.prompt_tokens
        if self._restored:
            observer.note_sources(self._restored, self._computed(self._restored.tokens))
        total_s = time.perf_counter() - self._line.began
        observer.note_end(self._ending, total_s, prompt, self._reply_tokens(reply_length))

    def _reply_tokens(self, reply_length: int) -> int:
        return self._usage.completion if self._usage else reply_length

    def _ended(self, reply_length: int) -> TracedReply:
        now, line, restored = time.perf_counter(), self._line, self._restored or Restored(0)
        explanation = self._explanation or self._explain(restored)
        cause = explanation.cause
        return TracedReply(
            ending=self._ending,
            cached_tokens=restored.tokens,
            computed_tokens=self._computed(restored.tokens),
            completion_tokens=self._reply_tokens(reply_length),
            ttft_seconds=round(line.first_text - line.began, 4) if line.first_text else None,
            total_seconds=round(now - line.began, 4),
            cache_hit=restored.tokens > 0 if self._restored else None,
            miss_reason=restored.miss,
            kept_tokens=restored.kept,
            lost_tokens=explanation.lost,
            disk_tokens=restored.disk_tokens,
            disk_seconds=round(restored.disk_s, 4),
            divergent_message=cause.message if cause else None,
            divergent_token=cause.token if cause else None,
            drift_class=cause.drift if cause else None,
            drift_rule=cause.rule if cause else None,
            cache_metrics_bumped_this_request={
                "vlm_retreat": int(restored.image_was_cut),
                "hybrid_trim_miss": int(restored.miss == "no_state"),
                "exact_key_rejected_by_model_lcp": restored.rejected_keys,
            },
        )

    def _outcome(self, reply_length: int) -> RequestOutcome:
        line, cached = self._line, self._restored.tokens if self._restored else 0
        return RequestOutcome(
            ending=self._ending,
            cached=cached,
            computed=self._computed(cached),
            written=self._reply_tokens(reply_length),
            seconds=time.perf_counter() - line.began,
            ttft_s=line.first_text - line.began if line.first_text else None,
            prefill_s=line.first_text - self._turn_came if line.first_text and self._restored else None,
            explanation=self._explanation,
            decoded=self._decoded,
            decode_s=self._last_text - line.first_text if self._last_text and line.first_text else 0.0,
        )

    def _computed(self, cached: int) -> int:
        """Return the computed prompt tokens. The first decode step computes the last one."""
        is_complete = self._usage is not None or self._line.first_text is not None
        return (self._line.prompt_tokens if is_complete else max(self._prefilled, cached)) - cached
