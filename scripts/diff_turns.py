"""Show where consecutive requests of a session diverge, from the trace that the server writes.

    python scripts/diff_turns.py [logs/2026-11-22/cache-session-0123456789abcdef.log]

Without a file, the script takes the newest one under --logs. If the server runs with LOG_PROMPTS=true, the
trace has the prompts and replies. The script then finds the first character at which a prompt differs from
the earlier prompt and reply with which it shares most. Without prompts, the counts of two consecutive lines
show how many messages were seen before, and how many tokens were computed again. Missing counts are named.

The exit status is 1 if a request diverges from the one that it continues, and 2 if there is no trace.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chat_client import Unmeasured
from probing import run, verdict

_OPENING_CHARACTERS, _OPENING_TOKENS = 48, 16
"""The longest generation prompt. The next prompt may open the reply in another way."""
_CLOSER_CHARACTERS = 16
"""The longest end of a reply that a template may write differently before a next message."""
_SHOWN = 60
_TRANSIENT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
"""The start of a message that OpenClaw appends to one request only."""
_COUNTS = ("messages", "prompt_tokens", "cached_tokens", "stable_prefix_msg_count", "bound_messages")


@dataclass(frozen=True)
class Request:
    """One line of the trace, with its line number."""

    number: int
    fields: Mapping[str, Any]

    def count(self, name: str) -> int | None:
        value = self.fields.get(name)
        return value if type(value) is int else None

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        return value if isinstance(value, str) else None

    @property
    def computed(self) -> int | None:
        """Computed prompt tokens; if the line has no such count, prompt tokens - cached tokens."""
        counted, prompt, cached = map(self.count, ("computed_tokens", "prompt_tokens", "cached_tokens"))
        if counted is not None or prompt is None or cached is None:
            return counted
        return prompt - cached

    @property
    def missing(self) -> list[str]:
        return [name for name in _COUNTS if self.count(name) is None]


@dataclass(frozen=True)
class Comparison:
    """The result for one request.

    Attributes:
        before: the number of the request that it continues.
        description: the result in words.
        details: lines with more details.
    """

    before: int
    description: str
    diverges: bool
    details: Sequence[str] = ()


# ---------------------------------------------------------------------------------------------- with prompts


def common_length(text: str, other: str) -> int:
    """Return the length of the common prefix, in characters."""
    least, most = 0, min(len(text), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if text[:middle] == other[:middle] else (least, middle - 1)
    return least


def compare_prompts(earlier: Sequence[Request], this: Request) -> Comparison | None:
    """Compare a prompt with the earlier prompt and reply that share its longest prefix.

    Return None if the trace has no two prompts.
    """
    prompt = this.text("prompt")
    candidates = [request for request in earlier if request.text("prompt")]
    if not prompt or not candidates:
        return None
    last = max(
        candidates, key=lambda request: (common_length(_prompt_and_reply(request), prompt), request.number)
    )
    return _compared(last, _prompt_and_reply(last), this, prompt)


def _prompt_and_reply(request: Request) -> str:
    return (request.text("prompt") or "") + (request.text("reply") or "")


def _compared(last: Request, expected: str, this: Request, prompt: str) -> Comparison:
    place, read = common_length(expected, prompt), len(last.text("prompt") or "")
    end = len(expected) - (_CLOSER_CHARACTERS if last.text("reply") else _opening(expected, prompt))
    if place >= end:
        description = f"goes on, with {len(prompt) - place:,} new characters"
        return Comparison(last.number, description, diverges=False)
    if _TRANSIENT in expected[place : place + _SHOWN] and _TRANSIENT not in prompt[place : place + _SHOWN]:
        return Comparison(
            last.number, "goes on from where a transient message of OpenClaw stood", diverges=False
        )
    where = f"character {place:,} of {read:,}" if place < read else f"character {place - read:,} of the reply"
    shown = [
        f"both …{_quoted(prompt[max(place - _SHOWN, 0) : place])}",
        f"last {_quoted(expected[place : place + _SHOWN])}…",
        f"this {_quoted(prompt[place : place + _SHOWN])}…",
    ]
    description = f"diverges at {where} ({place / len(expected):.0%})"
    return Comparison(last.number, description, diverges=True, details=[*shown, *_reasons(last, this)])


def _opening(prompt: str, other: str) -> int:
    """Return the length of the generation prompt: both prompts' common suffix, at most 48 characters."""
    return min(common_length(prompt[::-1], other[::-1]), _OPENING_CHARACTERS)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ------------------------------------------------------------------------------------------- without prompts


def compare_counts(last: Request, this: Request) -> Comparison:
    """Compare two consecutive requests by the counts in their lines."""
    cached, read, seen = this.count("cached_tokens"), last.count("prompt_tokens"), _first_new(last, this)
    if seen is None and None in (cached, read):
        return Comparison(last.number, "cannot be compared", diverges=False)
    again = max((read or 0) - cached, 0) if cached is not None else 0
    reasons = _reasons(last, this)
    if again > _OPENING_TOKENS or seen is not None:
        change = f"message {seen + 1} is another one" if seen is not None else "diverges"
        return Comparison(
            last.number, f"{change}; {again:,} tokens read again", diverges=True, details=reasons
        )
    return Comparison(last.number, "goes on", diverges=False, details=reasons)


def _first_new(last: Request, this: Request) -> int | None:
    """Return how many messages were seen before, if the previous request had more; else None."""
    seen, before = this.count("stable_prefix_msg_count"), last.count("messages")
    return seen if seen is not None and before is not None and seen < before else None


def _reasons(last: Request, this: Request) -> list[str]:
    """Return lines about messages that were seen or bound, and about the reason for a miss."""
    seen = this.count("stable_prefix_msg_count")
    lines: list[str] = []
    if seen is not None:
        lines.append(f"messages seen before: {seen}; the last request had {last.count('messages')}")
    if (bound := this.count("bound_messages")) is not None:
        lines.append(f"messages bound to recorded tokens: {bound}")
    if reason := this.text("miss_reason"):
        lines.append(f"miss_reason: {reason}")
    return lines


# ---------------------------------------------------------------------------------------------------- program


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace file, after the older ones in `path`.1 if it exists.

    Raises:
        Unmeasured: the file cannot be read, or has no line of a request.
    """
    older = path.with_name(f"{path.name}.1")
    try:
        texts = [file.read_text(encoding="utf-8") for file in (older, path) if file == path or file.exists()]
    except (OSError, UnicodeDecodeError) as error:
        raise Unmeasured(f"{path} cannot be read: {error}") from error
    requests = list(_requests("".join(texts).splitlines()))
    if not requests:
        raise Unmeasured(f"{path} has no line of a request")
    return requests


def _requests(lines: Sequence[str]) -> Iterator[Request]:
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            fields = None
        if isinstance(fields, dict):
            yield Request(number, fields)
        else:
            print(f"line {number} is no JSON object, and is passed over")


def newest(logs: Path) -> Path:
    """Return the newest trace file.

    Raises:
        Unmeasured: there is none.
    """
    traces = sorted(logs.glob("*/cache-session-*.log"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise Unmeasured(f"there is no trace under {logs}: */cache-session-*.log")
    return traces[-1]


def compare_all(requests: Sequence[Request]) -> list[str]:
    """Print the result for each request, and return a line for each request that diverges."""
    print_counts(requests[0])
    diverging: list[str] = []
    for index, this in enumerate(requests[1:], start=1):
        result = compare_prompts(requests[:index], this) or compare_counts(requests[index - 1], this)
        print_counts(this)
        print(f"    {result.before} → {this.number}: {result.description}")
        for line in result.details:
            print(f"        {line}")
        diverging += [f"request {this.number} {result.description}"] if result.diverges else []
    return diverging


def print_counts(request: Request) -> None:
    counts = (request.count("prompt_tokens"), request.count("cached_tokens"), request.computed)
    prompt, cached, computed = ("?" if count is None else f"{count:,}" for count in counts)
    print(f"request {request.number}: prompt {prompt}, cached {cached}, computed {computed} tokens")
    if missing := request.missing:
        print(f"    the line has no {', '.join(missing)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", help="a trace (default: the newest under --logs)")
    parser.add_argument(
        "--logs", type=Path, default=Path("logs"), help="LOG_ROOT of the server (%(default)s)"
    )
    options = parser.parse_args()
    path = options.file or newest(options.logs)
    print(path)
    return verdict(compare_all(read_trace(path)))


if __name__ == "__main__":
    run(main)
