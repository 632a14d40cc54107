"""One request, told to all who keep count: the counters, the terminal, the trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from start_llm.core.events import Event, Failed, Finished, Prefilling, Restored, Text, Usage
from start_llm.core.explanation import Explanation
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.terminal import RequestLine, Terminal
from start_llm.telemetry.trace import Asked, Ended, Texts, Trace


@dataclass(frozen=True, slots=True)
class Reports:
    """Where it is told what became of requests. `trace` is None if nothing is to be written."""

    metrics: RequestMetrics
    terminal: Terminal
    trace: Trace | None = None


type Explain = Callable[[Restored], Explanation]
"""Why not more of a prompt is known than what was restored."""


class Account:
    """What becomes of a request. Owned by its HTTP thread."""

    def __init__(self, reports: Reports, line: RequestLine, asked: Asked, explain: Explain) -> None:
        self._reports = reports
        self._line = line
        self._asked = asked
        self._explain = explain
        self._explanation: Explanation | None = None
        self._restored: Restored | None = None
        self._prefilled = 0
        self._ending = "cancelled"
        self._usage: Usage | None = None

    def begin(self) -> None:
        self._reports.metrics.begin()

    def note(self, event: Event) -> None:
        """Something has happened."""
        match event:
            case Restored():
                self._restored = event
                self._explanation = self._explain(event)
                if self._explanation.is_miss:
                    self._reports.terminal.missed(self._line, self._explanation)
            case Prefilling():
                self._prefilled = event.done
                self._reports.terminal.prefilling(self._line, event)
            case Text():
                self._line.note_text()
            case Finished():
                self._ending = "deadline" if event.was_cut else event.reason
                self._usage = event.usage
            case Failed():
                self._ending = "failed"
                self._reports.terminal.failed(self._line, event.message)
            case _:
                pass

    def end(self, replied: int, texts: Texts) -> None:
        """Nothing more will happen. It is in flight until its line is written: the server waits for it.

        Args:
            replied: tokens of the reply that had come.
            texts: for the trace, if it wants them.
        """
        self._reports.terminal.finished(self._line, self._ending, self._usage)
        if self._reports.trace:
            self._reports.trace.write(self._asked, self._ended(replied), texts)
        self._reports.metrics.end(self._ending, self._usage)

    def _ended(self, replied: int) -> Ended:
        now, line, restored = time.perf_counter(), self._line, self._restored or Restored(0)
        explanation = self._explanation or self._explain(restored)
        cause = explanation.cause
        return Ended(
            ending=self._ending,
            cached_tokens=restored.tokens,
            computed_tokens=self._computed(restored.tokens),
            completion_tokens=self._usage.completion if self._usage else replied,
            ttft_seconds=round(line.first_text - line.began, 4) if line.first_text else None,
            total_seconds=round(now - line.began, 4),
            cache_hit=restored.tokens > 0 if self._restored else None,
            miss_reason=restored.miss,
            kept_tokens=restored.kept,
            lost_tokens=explanation.lost,
            divergent_message=cause.message if cause else None,
            divergent_token=cause.token if cause else None,
            drift_class=cause.drift if cause else None,
            drift_rule=cause.rule if cause else None,
            cache_metrics_bumped_this_request={
                "vlm_retreat": 0,
                "hybrid_trim_miss": int(restored.miss == "no_state"),
                "exact_key_rejected_by_model_lcp": restored.rejected_keys,
            },
        )

    def _computed(self, cached: int) -> int:
        """Prompt tokens. The last one is computed by the first step of the reply."""
        is_complete = self._usage is not None or self._line.first_text is not None
        return (self._line.prompt_tokens if is_complete else max(self._prefilled, cached)) - cached
