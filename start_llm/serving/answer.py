"""The answer to one request while it is generated: the engine's text becomes events."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from start_llm.core.events import Event, Failed, Finished, Idle, Output, Prefilling, Restored, Text, Usage
from start_llm.core.prompt_report import Divergence
from start_llm.core.repetition import RUNAWAY_TOKENS, RepetitionHandling
from start_llm.output.stream import OutputStream, merge_adjacent
from start_llm.output.tool_aliases import ToolAliases
from start_llm.serving.prompt_account import PromptAccount
from start_llm.telemetry.account import RequestAccount
from start_llm.transcripts.turn import Turn

_POLL_TIMEOUT_S = 0.1
_RUNAWAY = "repeats a piece of {} tokens for {:,} tokens; {}"


class GenerationPort(Protocol):
    """A request that the engine is working on."""

    def take(self, timeout_s: float) -> list[Event]:
        """Return the events that are ready. Never empty: `[Idle()]` if none comes in `timeout_s` seconds."""
        ...

    def cancel(self, *, is_over: bool = False) -> None:
        """Stop computing. `is_over`: the client has all that it wants; else it counts as given up."""
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class Answer:
    """The reply to one request while it is generated. Leaving the context cancels what is unfinished.

    It hands each event to four others: `output` splits text into reasoning, content and calls; `turn`
    records the reply, so that the next request can resume from it; `account` counts for trace and terminal,
    and `prompt` for the client.

    Attributes:
        aliases: the model's names for tools.
        remember: called at the end, and before the client knows of it.
    """

    generation: GenerationPort
    output: OutputStream
    turn: Turn
    account: RequestAccount
    repetition: RepetitionHandling
    aliases: ToolAliases
    prompt: PromptAccount
    remember: Callable[[], None]
    _repetition_was_reported: bool = False

    def __enter__(self) -> Self:
        with ExitStack() as begun:
            begun.push(self)
            self.account.begin()
            if self.repetition.calls_notice:
                self.account.note_repetition(self.repetition.calls_notice)
            begun.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.generation.cancel()
        try:
            self.turn.note_delivered()
            self.remember()
        finally:
            self.account.end(self.turn.texts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the model reads it."""
        return len(self.turn.tokens)

    @property
    def divergence(self) -> Divergence | None:
        """Where the prompt leaves that of the request which the client compares it with."""
        return self.prompt.divergence

    def events(self) -> Iterator[Event]:
        """Yield events up to `Finished` or `Failed`, and `Idle` at least every 100 ms of silence.

        Text that is held back, because it may begin a mark or a stop string, counts as silence.
        """
        while True:
            outputs = map(self.aliases.for_client, self._outputs(self.generation.take(_POLL_TIMEOUT_S)))
            for event in list(map(self._with_account, outputs)) or [Idle()]:
                self.account.note(event)  # as the client gets it; `Text` and `Restored` were noted before
                if isinstance(event, Finished):
                    self.remember()  # before the client can name it
                yield event
                if isinstance(event, Finished | Failed):
                    return

    def _with_account(self, event: Event) -> Event:
        """Return the event with what is known of the prompt."""
        match event:
            case Prefilling():
                return self.prompt.progress()
            case Finished():
                return replace(event, receipt=self.prompt.receipt(), divergence=self.divergence)
            case _:
                return event

    def _outputs(self, events: list[Event]) -> Iterator[Event]:
        """Convert the engine's text into output events. Merge adjacent ones; drop superseded progress."""
        outputs: list[Output] = []
        newest = max((at for at, event in enumerate(events) if isinstance(event, Prefilling)), default=-1)
        for index, event in enumerate(events):
            self._note_progress(event)
            match event:
                case Restored():
                    self.account.note(event)
                    if index > newest:
                        yield self.prompt.progress()
                case Text():
                    outputs += self._recorded(self._feed(event))
                    if early := self._ended_early(event):
                        yield from merge_adjacent([*outputs, *early[0]])
                        yield early[1]
                        return
                case Finished():
                    rest, end = self._ended(event)
                    yield from merge_adjacent([*outputs, *rest])
                    yield end
                    return
                case Prefilling() if index < newest:
                    pass  # a later one tells more
                case _:
                    yield from merge_adjacent(outputs)
                    outputs = []
                    yield event
        yield from merge_adjacent(outputs)

    def _ended(self, event: Finished) -> tuple[list[Output], Finished]:
        """Record the reply, and return its last events. Without a token there is none."""
        if not event.usage.completion:
            return [], event
        rest, end = self.output.close(event)
        outputs = self._recorded(rest)
        self.turn.record_reply(
            replace(event, stop=end.stop),
            is_whole=self.output.is_whole,
            reply_surprisal_bits=self.output.reply_surprisal_bits,
            reasoning_surprisal_bits=self.output.reasoning_surprisal_bits,
        )
        return outputs, end

    def _note_progress(self, event: Event) -> None:
        """Note how much of the prompt has been computed."""
        self.prompt.note(event)
        match event:
            case Restored():
                self.turn.note_prefilled(event.tokens)
            case Prefilling():
                self.turn.note_prefilled(event.done)
            case _:
                pass

    def _feed(self, piece: Text) -> list[Output]:
        self.account.note(piece)
        self.turn.add_generated_tokens(piece.tokens)
        return self.output.feed(piece)

    def _cut_short(self) -> Finished:
        """End a reply at a stop sequence or after its last permitted call, and cancel the rest."""
        self.generation.cancel(is_over=True)
        usage = Usage(prompt=self.prompt_tokens, cached=self.prompt.cached, completion=self.turn.reply_length)
        end = self.output.cut(usage)
        self.turn.record_reply(
            end,
            is_whole=False,
            reply_surprisal_bits=self.output.reply_surprisal_bits,
            reasoning_surprisal_bits=self.output.reasoning_surprisal_bits,
        )
        return end

    def _ended_early(self, piece: Text) -> tuple[list[Output], Finished] | None:
        """Return the last events of a reply that ends here, although the model goes on."""
        if self.output.is_over:
            return [], self._cut_short()
        return self._ended_for_repetition() if self._runs_away(piece) else None

    def _runs_away(self, piece: Text) -> bool:
        """Tell the user, once, that the reply repeats itself. Returns whether it is ended for that."""
        repetition = self.repetition
        period = (
            repetition.detector.feed(piece.tokens)
            if repetition.detector and not self._repetition_was_reported
            else 0
        )
        if not period:
            return False
        self._repetition_was_reported = True
        is_ended = repetition.may_stop and not self.output.may_be_in_call
        end = "it was ended" if is_ended else "it goes on"
        self.account.note_repetition(_RUNAWAY.format(period, RUNAWAY_TOKENS, end))
        return is_ended

    def _ended_for_repetition(self) -> tuple[list[Output], Finished]:
        """End the reply as if it had reached its limit. It is not recorded: nobody wants to go on from it."""
        self.generation.cancel(is_over=True)
        usage = Usage(prompt=self.prompt_tokens, cached=self.prompt.cached, completion=self.turn.reply_length)
        rest, end = self.output.close(Finished("length", usage, cut_by="repetition"))
        return self._recorded(rest), end

    def _recorded(self, outputs: list[Output]) -> list[Output]:
        """Record them in the turn, and return them."""
        for output in outputs:
            self.turn.add_output(output)
        return outputs
