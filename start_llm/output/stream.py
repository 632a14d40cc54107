"""From the text events of the engine to what they mean, tokens accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

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
from start_llm.output.splitter import Splitter
from start_llm.output.stops import StopScanner


class OutputStream:
    """Feeds a splitter and gives every token of the reply to one of its events.

    Args:
        most_calls: that are told of; None: all.
        stops: strings that end the reply where they stand in its answer.

    Attributes:
        is_over: one more call has begun, or a stop string is complete. Nothing from it on is told.
        told_bits, thought_bits: of chance, in what is told outside of thoughts and in thoughts (`Text`).
    """

    def __init__(
        self, splitter: Splitter, *, most_calls: int | None = None, stops: Sequence[str] = ()
    ) -> None:
        self._splitter = splitter
        self._most_calls = most_calls
        self._scanner = StopScanner(stops)
        self._stop: str | None = None
        self._told_calls = 0
        self.is_over = False
        self.told_bits, self.thought_bits = 0.0, 0.0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reasoning_tokens = 0
        self._undecided_tokens = 0

    def feed(self, piece: Text) -> list[Output]:
        """What a piece of text turns out to be; nothing, if that depends on the next one."""
        self._tokens += piece.tokens
        self._logprobs += piece.logprobs
        was_in_thought = self._splitter.in_thought
        outputs = self._told(self._splitter.feed(piece.text))
        in_thought = was_in_thought or self._splitter.in_thought
        self._count(len(piece.tokens), in_thought, bool(outputs))
        if in_thought:
            self.thought_bits += piece.surprisal
        elif not self.is_over:
            self.told_bits += piece.surprisal
        return self._accounted(outputs)

    def close(self, end: Finished) -> tuple[list[Output], Finished]:
        """What was held back, and the end as clients are told it."""
        outputs = self._told(self._splitter.close(end.ended_itself))
        if not self.is_over:
            outputs += self._held_back()
        if self._tokens and not outputs:
            outputs.append(Content(""))
        if self.is_over:
            return self._accounted(outputs), replace(self.cut(end.usage), was_cut=end.was_cut)
        calls = self._splitter.calls and not self._splitter.was_cut_in_call
        reason = "tool_calls" if calls else end.reason
        usage = replace(end.usage, reasoning=min(self._reasoning_tokens, end.usage.completion))
        return self._accounted(outputs), replace(end, reason=reason, usage=usage)

    def cut(self, usage: Usage) -> Finished:
        """The end of a reply that is over, as clients are told it."""
        reasoning = min(self._reasoning_tokens, usage.completion)
        reason = "tool_calls" if self._told_calls else "stop"
        return Finished(reason, replace(usage, reasoning=reasoning), self._stop)

    def _told(self, outputs: Iterable[Output]) -> list[Output]:
        """What clients are told of it."""
        told: list[Output] = []
        for output in outputs:
            told += self._up_to_stop(output) if isinstance(output, Content) else self._up_to_limit(output)
            if self.is_over:
                return told if told or self._stop is None else self._nothing()
        return told

    def _up_to_stop(self, content: Content) -> list[Output]:
        scan = self._scanner.feed(content.text)
        self._stop, self.is_over = scan.stop, scan.stop is not None
        return [Content(scan.text)] if scan.text else []

    def _up_to_limit(self, output: Output) -> list[Output]:
        """What might have begun a stop string has not."""
        before = self._held_back()
        if isinstance(output, CallStarted) and output.index == self._most_calls:
            self.is_over = True
            return before
        self._told_calls += isinstance(output, CallEnded)
        return [*before, output]

    def _held_back(self) -> list[Output]:
        held = self._scanner.close()
        return [Content(held)] if held else []

    def _nothing(self) -> list[Output]:
        """For the tokens of a stop string: their log-probabilities are not told."""
        self._logprobs.clear()
        return [Content("")]

    @property
    def is_whole(self) -> bool:
        """What has come so far ends outside of thoughts, calls and markup."""
        splitter = self._splitter
        is_in_call = splitter.call_is_open or splitter.was_cut_in_call
        return not (self.is_over or splitter.in_thought or is_in_call or splitter.has_loose_end)

    def _count(self, tokens: int, in_thought: bool, has_said: bool) -> None:
        """Tokens that say nothing may be the mark that opens a thought, which is part of it."""
        self._undecided_tokens += tokens
        if in_thought:
            self._reasoning_tokens += self._undecided_tokens
        if in_thought or has_said:
            self._undecided_tokens = 0

    def _accounted(self, outputs: list[Output]) -> list[Output]:
        if not outputs:
            return []
        first = replace(outputs[0], tokens=tuple(self._tokens), logprobs=tuple(self._logprobs))
        self._tokens.clear()
        self._logprobs.clear()
        return [first, *outputs[1:]]


def joined(outputs: Iterable[Output]) -> Iterator[Output]:
    """Neighbours of one kind as one event: what has piled up goes out together."""
    pile: list[Output] = []
    for output in outputs:
        if pile and not _is_one(pile[-1], output):
            yield _merged(pile)
            pile = []
        pile.append(output)
    if pile:
        yield _merged(pile)


def _is_one(left: Output, right: Output) -> bool:
    match left, right:
        case (Content(), Content()) | (Reasoning(), Reasoning()):
            return True
        case CallArguments(), CallArguments():
            return left.index == right.index
        case _:
            return False


def _merged(pile: list[Output]) -> Output:
    first = pile[0]
    if len(pile) == 1 or not isinstance(first, Content | Reasoning | CallArguments):
        return first
    texts = [one for one in pile if isinstance(one, Content | Reasoning | CallArguments)]
    return replace(
        first,
        text="".join(one.text for one in texts),
        tokens=tuple(token for one in texts for token in one.tokens),
        logprobs=tuple(logprob for one in texts for logprob in one.logprobs),
    )
