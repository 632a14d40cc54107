"""Report what happens to a request to the counters, the terminal and the trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from start_llm.core.events import Event, Failed, Finished, Prefilling, Restored, Text
from start_llm.core.explanation import Explanation
from start_llm.core.images import ImageSpan
from start_llm.telemetry.activity import Activity
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.prometheus import RequestObserver, ServerMetrics
from start_llm.telemetry.request_record import RequestRecord
from start_llm.telemetry.terminal import Terminal
from start_llm.telemetry.trace import Texts, Trace


@dataclass(frozen=True, slots=True)
class Reports:
    """The receivers of reports.

    Attributes:
        trace: None if no trace is written.
        observer: for the histograms of `/metrics`.
        shows_images: the terminal shows where images stand in prompts (VLM_CACHE_DEBUG).
        count_tokens: counts the tokens that were computed for an API key.
    """

    metrics: RequestMetrics
    terminal: Terminal
    trace: Trace | None = None
    observer: RequestObserver = field(default_factory=lambda: ServerMetrics().observer(""))
    shows_images: bool = False
    activity: Activity = field(default_factory=Activity)
    count_tokens: Callable[[bytes, int], None] = lambda _key, _count: None


type Explain = Callable[[Restored], Explanation]
"""Explains why no more of a prompt was restored."""


class RequestAccount:
    """Follows one request to its end. Owned by its HTTP thread.

    Args:
        images: where images stand in the prompt.
        beginning: the first tokens of the prompt, to be shown with images.
    """

    def __init__(
        self,
        reports: Reports,
        record: RequestRecord,
        explain: Explain,
        *,
        images: Sequence[ImageSpan] = (),
        beginning: Sequence[int] = (),
    ) -> None:
        self._reports = reports
        self._record = record
        self._explain = explain
        self._images = images
        self._beginning = beginning
        self._is_counted = False

    def begin(self) -> None:
        self._reports.metrics.begin()
        self._reports.activity.begin(self._record)

    def note(self, event: Event) -> None:
        """Handle the next event of the request."""
        record, terminal = self._record, self._reports.terminal
        match event:
            case Restored():
                self._note_restored(event)
            case Prefilling():
                record.done = event.done
                terminal.progress(record)
            case Text():
                self._observe_tokens(len(event.tokens), event.at)
                record.note_text(len(event.tokens), event.at)
                terminal.progress(record)
            case Finished():
                record.note_finished(event)
                self._count_tokens()  # before the client sends its next request
            case Failed():
                record.ending = "failed"
                terminal.say_of(record.facts, event.message)
            case _:
                pass

    def note_repetition(self, what: str) -> None:
        """Tell the user that the model goes round in circles, and count it."""
        self._reports.metrics.note_repetition()
        self._reports.terminal.say_of(self._record.facts, what)

    def _count_tokens(self) -> None:
        """Count what was computed for the request's key, once."""
        if not self._is_counted:
            self._is_counted, record = True, self._record
            self._reports.count_tokens(record.facts.key, record.computed + record.written)

    def _observe_tokens(self, count: int, at: float) -> None:
        observer, record = self._reports.observer, self._record
        if record.last_text is None:
            observer.note_first_token(at - record.arrived, at - record.turn_came)
        else:
            observer.note_tokens(count, at - record.last_text)

    def _note_restored(self, restored: Restored) -> None:
        record, terminal = self._record, self._reports.terminal
        self._reports.observer.note_turn(restored.at - record.submitted)
        record.note_restored(restored)
        if self._images and self._reports.shows_images:
            terminal.images(record.facts, self._beginning, self._images, restored)
        if restored.disk_tokens:
            terminal.restored(record.facts, restored)

    def end(self, texts: Texts) -> None:
        """Report the end of the request.

        It counts as in flight until its trace line is written, so that a stopping server waits for it.

        Args:
            texts: prompt and reply, for the trace if it needs them.
        """
        try:
            self._report_end(texts)
        finally:
            self._reports.metrics.end(self._record.ending, self._record.final_usage)

    def _report_end(self, texts: Texts) -> None:
        reports, record = self._reports, self._record
        record.note_left()
        self._count_tokens()
        explanation = None
        try:
            explanation = record.explanation = self._explain(record.restored) if record.restored else None
        finally:  # whatever fails, it runs no more
            reports.activity.end(record)
            reports.terminal.finished(record)
            reports.observer.note_end(record)
        if reports.trace:
            reports.trace.write(record, explanation or self._explain(Restored(0)), texts)
