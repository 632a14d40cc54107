"""Print status lines on the terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from start_llm.core.events import Prefilling, Restored, Usage
from start_llm.core.explanation import Explanation
from start_llm.core.images import FIRST_IMAGE_TOKEN, ImageSpan

_QUIET_PREFILL_S = 2.0
_BETWEEN_PROGRESS_S = 2.0


@dataclass(slots=True)
class RequestLine:
    """One request's name and times, on the clock of `time.perf_counter`.

    Attributes:
        adapter: the adapters of the request; None for the base model.
        tenant: whose request it is; never printed.
        beginning: the first tokens of a prompt with images.
        images: where they stand in it.
    """

    session: str | None
    prompt_tokens: int
    began: float
    adapter: str | None = None
    tenant: bytes = b""
    beginning: tuple[int, ...] = ()
    images: Sequence[ImageSpan] = ()
    first_text: float | None = None
    last_progress: float = 0.0

    def note_text(self) -> None:
        if self.first_text is None:
            self.first_text = time.perf_counter()

    @property
    def name(self) -> str:
        """The end of the session id, without characters that could move the terminal's cursor."""
        return (
            "".join(char if char.isprintable() else "?" for char in self.session[-12:])
            if self.session
            else "-"
        )


class Terminal:
    """Prints whole lines, one at a time, from any thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """Print one line. A closed terminal is ignored."""
        with self._lock:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                # The terminal was closed or its pipe is gone; requests are still answered.
                return

    def summary(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print aligned name and value pairs."""
        pairs = list(rows)
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            self.say(f"  {name:<{width}}  {value}")

    def paste(self, title: str, lines: Sequence[str]) -> None:
        """Print a titled block of lines to copy."""
        self.say(f"\n  {title}")
        for line in lines:
            self.say(f"    {line}")

    def prefilling(self, line: RequestLine, progress: Prefilling) -> None:
        """Print the progress of a long prefill, every two seconds."""
        now = time.perf_counter()
        elapsed = now - line.began
        if elapsed < _QUIET_PREFILL_S or now - line.last_progress < _BETWEEN_PROGRESS_S:
            return
        line.last_progress = now
        share = progress.done / progress.total
        self.say(
            f"{_clock()} {line.name:<12}  prefill {progress.done:,}/{progress.total:,} ({share:.0%})"
            f"  {progress.done / elapsed:,.0f} tok/s"
        )

    def restored(self, line: RequestLine, restored: Restored) -> None:
        """Print what was read from the disk for a request."""
        told = f"restored {restored.disk_tokens:,} tokens from disk in {restored.disk_s:.1f} s"
        self.say(f"{_clock()} {line.name:<12}  {told}")

    def images(self, line: RequestLine, restored: Restored) -> None:
        """Print where images stand in a prompt, by the names of their tokens, and what the cache had."""
        begins = f"{_clock()} {line.name:<12}"
        self.say(f"{begins}  begins {' '.join(map(_token_name, line.beginning))}")
        for start, end, run in line.images:
            kept = "restored" if end <= restored.tokens else "cut" if start < restored.tokens else "computed"
            self.say(f"{begins}  image {_token_name(run.tokens[0])} at {start:,} to {end:,}  {kept}")

    def missed(self, line: RequestLine, explanation: Explanation) -> None:
        """Print why a known conversation has to be read again."""
        self.say(f"{_clock()} {line.name:<12}  {explanation.line}")

    def finished(self, line: RequestLine, ending: str, usage: Usage | None) -> None:
        """Print one line for each request, however it ended."""
        now = time.perf_counter()
        ttft = f"{line.first_text - line.began:.2f} s" if line.first_text else "-"
        speed = "-"
        if usage and line.first_text and usage.completion > 1 and now > line.first_text:
            speed = f"{(usage.completion - 1) / (now - line.first_text):.1f} tok/s"
        under = f"  adapter {line.adapter}" if line.adapter else ""
        cached, out = (usage.cached, usage.completion) if usage else (0, 0)
        self.say(
            f"{_clock()} {line.name:<12}  in {line.prompt_tokens:,}  cached {cached:,}  out {out:,}"
            f"  ttft {ttft}  {speed}  {ending}{under}"
        )

    def failed(self, line: RequestLine, message: str) -> None:
        self.say(f"{_clock()} {line.name:<12}  {message}")


def _token_name(token: int) -> str:
    """Return a token; one of an image in hexadecimal digits, which begin the digest that names the image."""
    return str(token) if token < FIRST_IMAGE_TOKEN else f"{token:08x}"


def _clock() -> str:
    return time.strftime("%H:%M:%S")
