"""Print lines on the terminal: what the server says, and one for each request."""

import io
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from start_llm.core.events import Restored
from start_llm.core.explanation import counted_tokens
from start_llm.core.images import FIRST_IMAGE_TOKEN, ImageSpan
from start_llm.telemetry.activity import Refusal
from start_llm.telemetry.request_record import Phase, RequestFacts, RequestRecord, printable
from start_llm.telemetry.screen import Line, LiveView, Screen, is_lively

_SESSION_WIDTH = 19
_BETWEEN_PROGRESS_S: Mapping[Phase, float] = {"reading": 2.0, "writing": 10.0}
_ENDINGS: Mapping[str, str] = {
    "stop": "complete",
    "length": "at limit",
    "tool_calls": "tool calls",
    "deadline": "timed out",
    "repetition": "ran away",
}
_SHOWN_REFUSALS = 10
_REFUSALS_S = 60.0
_MAX_ASKED, _MAX_REASON = 60, 120


class Terminal:
    """Prints whole lines, one at a time, from any thread.

    Until `follow` a line is written by the thread that says it. From then on a thread of its own writes, so
    that a terminal that is not read holds no request up.

    Attributes:
        names_models: each line names the model, as there are several.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._errors = stream or sys.stdout, sys.stderr
        self._lock = threading.Lock()
        self._screen: Screen | None = None
        self._refusals = _RefusalLimit()
        self.names_models = False

    def follow(self, view: LiveView[Any], environment: Mapping[str, str]) -> None:
        """Show a live view below the lines, if this is a terminal that can. Call `close` at the end."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):
            return
        self._stream.flush()
        self._screen = Screen(descriptor, view if is_lively(descriptor, environment) else None)
        if self.is_live and self._errors.isatty():
            sys.stderr = _StderrLines(self.say)

    @property
    def is_live(self) -> bool:
        """True if a live view shows what running requests do."""
        return self._screen is not None and self._screen.is_live

    def close(self) -> None:
        """Write what is left, and remove the live view. Nothing is printed afterwards."""
        if self._screen:
            sys.stderr = self._errors
            self._screen.close()

    def abandon(self) -> None:
        """Remove the live view at once. A signal handler may call this, so it takes no lock (lesson 6)."""
        if self._screen:
            self._screen.abandon()

    def say(self, line: str) -> None:
        """Print one line. A closed terminal is ignored."""
        self._print(Line((line,)))

    def _print(self, line: Line) -> None:
        if self._screen:
            self._screen.put(line)
            return
        with self._lock:
            try:
                self._stream.write(f"{line}\n")
                self._stream.flush()
            except (OSError, ValueError):
                # The terminal was closed or its pipe is gone; requests are still answered.
                return

    def summary(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print aligned name and value pairs."""
        pairs = list(rows)
        width = max((len(name) for name, _ in pairs), default=0)
        for name, value in pairs:
            self.say(f"  {name:<{width}}  {value}")

    def paste(self, title: str, lines: Sequence[str]) -> None:
        """Print a titled block of lines to copy."""
        self.say(f"\n  {title}")
        for line in lines:
            self.say(f"    {line}")

    def progress(self, running: RequestRecord) -> None:
        """Print how far a long request has come, now and then, unless a live view shows it."""
        pause_s, now = _BETWEEN_PROGRESS_S.get(running.phase), time.perf_counter()
        if pause_s is None or self.is_live or now - max(running.phase_since, running.printed_at) < pause_s:
            return
        running.printed_at = now
        total = running.facts.prompt_tokens
        speed = _speed(running.tokens_per_s)
        done = (
            f"{running.written:,} written so far"
            if running.phase == "writing"
            else f"reading {running.done:,} of {total:,} ({running.done / total:.0%})"
        )
        self._print(Line((_who(running.facts), f"{done} {speed}".rstrip())))

    def restored(self, facts: RequestFacts, restored: Restored) -> None:
        """Print what was read from the disk for a request."""
        text = f"restored {counted_tokens(restored.disk_tokens)} from disk in {restored.disk_s:.1f} s"
        self._print(Line((_who(facts), text)))

    def images(
        self, facts: RequestFacts, beginning: Sequence[int], images: Sequence[ImageSpan], restored: Restored
    ) -> None:
        """Print where images stand in a prompt, by the names of their tokens, and what the cache had."""
        self._print(Line((_who(facts), f"begins {' '.join(map(_token_name, beginning))}")))
        for start, end, run in images:
            kept = "restored" if end <= restored.tokens else "cut" if start < restored.tokens else "computed"
            text = f"image {_token_name(run.tokens[0])} at {start:,} to {end:,}  {kept}"
            self._print(Line((_who(facts), text)))

    def finished(self, request: RequestRecord) -> None:
        """Print one line for each request, however it ended."""
        ending = _ENDINGS.get(request.ending, request.ending)
        who = f"{_who(request.facts)} {ending:<10}"
        why = f"read {counted_tokens(request.again)} again: {request.reason}"
        reasons = [printable(why)] if request.reason and request.continues else []
        under = [f"adapter {printable(request.facts.adapter)}"] if request.facts.adapter else []
        self._print(Line((who, _figures(request), *self._model(request.facts), *under, *reasons)))

    def _model(self, facts: RequestFacts) -> Sequence[str]:
        """Return who has answered, where that is not plain."""
        if facts.unknown_model:
            return (printable(f"model {facts.model} for {facts.unknown_model}"),)
        return (printable(f"model {facts.model}"),) if self.names_models else ()

    def refused(self, refusal: Refusal) -> None:
        """Print a refused request. A flood of them prints a few lines a minute."""
        for parts in self._refusals.parts(refusal, time.monotonic()):
            self._print(Line((f"{_clock()} refused    ", *parts)))

    def say_of(self, facts: RequestFacts, what: str) -> None:
        """Print what has happened to a request, such as a failure."""
        self._print(Line((_who(facts), printable(what))))


class _StderrLines(io.TextIOBase):
    """Says each line that is written to it. In place of the standard error, which would tear the view."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._rest = ""

    def write(self, text: str, /) -> int:
        *lines, self._rest = f"{self._rest}{text}".split("\n")
        for line in lines:
            self._say(line)
        return len(text)


class _RefusalLimit:
    """Limits how many refusals are printed in a minute. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._minute_began = -_REFUSALS_S
        self._count = 0

    def parts(self, refusal: Refusal, now: float) -> Sequence[Sequence[str]]:
        """Return the parts of each line that this refusal is worth."""
        with self._lock:
            untold = 0
            if now - self._minute_began >= _REFUSALS_S:
                untold = max(self._count - _SHOWN_REFUSALS, 0)
                self._minute_began, self._count = now, 0
            self._count += 1
            count = self._count
        if count > _SHOWN_REFUSALS + 1:
            return ()
        if count > _SHOWN_REFUSALS:
            return (("many more; for a minute they are only counted (GET /activity)",),)
        missed = ((f"{untold:,} more requests, which were not shown",),) if untold else ()
        return (*missed, _refused(refusal))


def _refused(refusal: Refusal) -> Sequence[str]:
    asked, reason = f"{refusal.status} {refusal.method} {refusal.path}".strip(), refusal.reason
    clipped = reason if len(reason) <= _MAX_REASON else f"{reason[: _MAX_REASON - 1]}…"
    return printable(asked[:_MAX_ASKED]), printable(clipped)


def _who(facts: RequestFacts) -> str:
    who = f"{facts.endpoint_name:<11} {facts.client or '-':<12} {facts.session_label:<{_SESSION_WIDTH}}"
    return f"{_clock()} {who}"


def _figures(request: RequestRecord) -> str:
    first = "-" if request.ttft_s is None else f"{request.ttft_s:.2f} s"
    return (
        f"{request.cached:>7,} cached {request.computed:>7,} read {_speed(request.read_per_s):>8}"
        f" {request.written:>6,} written {_speed(request.written_per_s):>7}  first {first:>7}"
    )


def _speed(tokens_per_s: float | None) -> str:
    if tokens_per_s is None:
        return ""
    return f"{tokens_per_s:,.0f}/s" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}/s"


def _token_name(token: int) -> str:
    """Return a token; one of an image in hexadecimal digits, which begin the digest that names the image."""
    return str(token) if token < FIRST_IMAGE_TOKEN else f"{token:08x}"


def _clock() -> str:
    return time.strftime("%H:%M:%S")


MOMENT_S = 3.0


@contextmanager
def announced_if_slow(say: Callable[[str], None], step: str) -> Generator[None]:
    """Say what the block does if it takes longer than a moment.

    Args:
        say: called on a thread of its own.
        step: a sentence.
    """
    timer = threading.Timer(MOMENT_S, say, [step])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
