"""Turns the engine's text events into output events, assigns every token to one, and finds stop strings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Finished,
    Output,
    Reasoning,
    Text,
    TokenLogprobs,
    Usage,
)
from start_llm.core.markers import longest_beginning
from start_llm.output.splitter import Splitter


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Text that is safe to send, and the stop string that completed, if any."""

    text: str
    stop: str | None = None


class StopSequenceMatcher:
    """Holds back the longest suffix that could begin a stop string.

    The match that completes first wins; of two that complete together, the longer. So the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        if not self._stops:
            return StopMatch(text)
        buffer = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if ends:
            _, start, stop = min(ends)
            self._held = ""
            return StopMatch(buffer[:start], stop)
        keep = longest_beginning(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return StopMatch(buffer[: len(buffer) - keep])

    def close(self) -> str:
        """Return the text still held back. No more text follows."""
        held, self._held = self._held, ""
        return held


_MUCH_HELD = 64
"""Tokens."""


class OutputStream:
    """Feeds a splitter and attaches every token of the reply to one of its events.

    Args:
        max_calls: number of calls to emit; None: all.
        stops: strings that end the reply where they occur in its answer.

    Attributes:
        is_over: a call beyond `max_calls` has begun, or a stop string is complete. Nothing is emitted after.
        reply_surprisal_bits, reasoning_surprisal_bits: bits of surprisal outside of reasoning and inside it
            (`Text`).
    """

    def __init__(
        self, splitter: Splitter, *, max_calls: int | None = None, stops: Sequence[str] = ()
    ) -> None:
        self._splitter = splitter
        self._max_calls = max_calls
        self._scanner = StopSequenceMatcher(stops)
        self._stop: str | None = None
        self._emitted_calls = 0
        self.is_over = False
        self.reply_surprisal_bits, self.reasoning_surprisal_bits = 0.0, 0.0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reasoning_tokens = 0
        self._undecided_tokens = 0

    def feed(self, piece: Text) -> list[Output]:
        """Return the events of a piece of text; an empty list if they depend on the next piece."""
        self._tokens += piece.tokens
        self._logprobs += piece.logprobs
        was_in_reasoning = self._splitter.in_reasoning
        outputs = self._emitted(self._splitter.feed(piece.text))
        in_reasoning = was_in_reasoning or self._splitter.in_reasoning
        self._count(len(piece.tokens), in_reasoning, bool(outputs))
        if in_reasoning:
            self.reasoning_surprisal_bits += piece.surprisal
        elif not self.is_over:
            self.reply_surprisal_bits += piece.surprisal
        return self._accounted(outputs)

    def close(self, end: Finished) -> tuple[list[Output], Finished]:
        """Return the events held back, and the final event for clients."""
        outputs = self._emitted(self._splitter.close(end.ended_itself))
        if not self.is_over:
            outputs += self._held_back()
        if self._tokens and not outputs:
            outputs.append(Content(""))
        if self.is_over:
            return self._accounted(outputs), replace(self.cut(end.usage), cut_by=end.cut_by)
        calls = self._splitter.counter.completed and not self._splitter.was_cut_in_call
        reason = "tool_calls" if calls else end.reason
        usage = replace(end.usage, reasoning=min(self._reasoning_tokens, end.usage.completion))
        return self._accounted(outputs), replace(end, reason=reason, usage=usage)

    def cut(self, usage: Usage) -> Finished:
        """Return the final event of a reply that is over."""
        reasoning = min(self._reasoning_tokens, usage.completion)
        reason = "tool_calls" if self._emitted_calls else "stop"
        return Finished(reason, replace(usage, reasoning=reasoning), self._stop)

    def _emitted(self, outputs: Iterable[Output]) -> list[Output]:
        """Return the events to emit, up to a stop string or the limit of calls."""
        emitted: list[Output] = []
        for output in outputs:
            emitted += self._up_to_stop(output) if isinstance(output, Content) else self._up_to_limit(output)
            if self.is_over:
                return emitted if emitted or self._stop is None else self._nothing()
        return emitted

    def _up_to_stop(self, content: Content) -> list[Output]:
        scan = self._scanner.feed(content.text)
        self._stop, self.is_over = scan.stop, scan.stop is not None
        return [Content(scan.text)] if scan.text else []

    def _up_to_limit(self, output: Output) -> list[Output]:
        """Emit the text held for a stop string first: an event that is not content rules the match out."""
        before = self._held_back()
        if isinstance(output, CallStarted) and output.index == self._max_calls:
            self.is_over = True
            return before
        self._emitted_calls += isinstance(output, CallEnded)
        return [*before, output]

    def _held_back(self) -> list[Output]:
        held = self._scanner.close()
        return [Content(held)] if held else []

    def _nothing(self) -> list[Output]:
        """Return an empty event for the tokens of a stop string, without their log-probabilities."""
        self._logprobs.clear()
        return [Content("")]

    @property
    def may_be_in_call(self) -> bool:
        """True inside a call, or while much text is held back, which only what may become a call is."""
        return self._splitter.counter.is_open or len(self._tokens) > _MUCH_HELD

    @property
    def is_whole(self) -> bool:
        """True if the output so far is what the model wrote, and ends outside of reasoning and markup."""
        splitter = self._splitter
        if splitter.was_repaired:
            return False
        is_in_call = splitter.counter.is_open or splitter.was_cut_in_call
        return not (self.is_over or splitter.in_reasoning or is_in_call or splitter.has_loose_end)

    def _count(self, tokens: int, in_reasoning: bool, has_output: bool) -> None:
        """Count reasoning tokens. Tokens without output count too if they turn out to open reasoning."""
        self._undecided_tokens += tokens
        if in_reasoning:
            self._reasoning_tokens += self._undecided_tokens
        if in_reasoning or has_output:
            self._undecided_tokens = 0

    def _accounted(self, outputs: list[Output]) -> list[Output]:
        if not outputs:
            return []
        first = replace(outputs[0], tokens=tuple(self._tokens), logprobs=tuple(self._logprobs))
        self._tokens.clear()
        self._logprobs.clear()
        return [first, *outputs[1:]]


def merge_adjacent(outputs: Iterable[Output]) -> Iterator[Output]:
    """Merge adjacent events of one kind, so that queued events go out together."""
    return (_merged(list(pile)) for _, pile in groupby(outputs, _kind))


def _kind(output: Output) -> object:
    """Return what events that are merged have in common. That of any other event equals nothing else."""
    match output:
        case Content() | Reasoning():
            return type(output)
        case CallArguments():
            return output.index
        case _:
            return object()


def _merged(pile: list[Output]) -> Output:
    first = pile[0]
    if len(pile) == 1 or not isinstance(first, Content | Reasoning | CallArguments):
        return first
    texts = [event for event in pile if isinstance(event, Content | Reasoning | CallArguments)]
    return replace(
        first,
        text="".join(event.text for event in texts),
        tokens=tuple(token for event in texts for token in event.tokens),
        logprobs=tuple(logprob for event in texts for logprob in event.logprobs),
    )
