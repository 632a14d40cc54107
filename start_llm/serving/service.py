"""One request from start to end: prepare its prompt, bind it to the tokens of earlier turns, generate, and
turn text into events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from start_llm.core.adapters import adapter_label
from start_llm.core.chat import ChatRequest, GenerationRequest, RequestOrigin, TextRequest
from start_llm.core.client_presence import check_client
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Event, Failed, Finished, Idle, Output, Prefilling, Restored, Text, Usage
from start_llm.core.explanation import Explanation
from start_llm.core.ids import name_in
from start_llm.core.images import ImageSpan, image_spans
from start_llm.core.repetition import (
    RUNAWAY_TOKENS,
    RepetitionHandling,
    RepetitionPolicy,
    RunawayDetector,
    is_worth_reporting,
    repeated_calls,
)
from start_llm.core.sampling import Sampling, SamplingChoice, first_set
from start_llm.output.stream import OutputStream, merge_adjacent
from start_llm.output.tool_aliases import ToolAliases
from start_llm.serving.request_preparation import PreparedRequest, RequestPreparer, demand_room
from start_llm.telemetry.account import Reports, RequestAccount
from start_llm.telemetry.request_record import RequestFacts, RequestRecord, session_name
from start_llm.telemetry.trace import session_digest
from start_llm.transcripts.transcripts import Transcripts
from start_llm.transcripts.turn import Turn

_POLL_TIMEOUT_S = 0.05
_SHOWN_TOKENS = 64


class GenerationPort(Protocol):
    """A request that the engine is working on."""

    def take(self, timeout_s: float) -> list[Event]:
        """Return the events that are ready. Never empty: `[Idle()]` if none comes in `timeout_s` seconds."""
        ...

    def cancel(self, *, is_over: bool = False) -> None:
        """Stop computing. `is_over`: the client has all that it wants; else it counts as given up."""
        ...


class EnginePort(Protocol):
    """The engine interface that the service needs."""

    def submit(self, request: EngineRequest) -> GenerationPort:
        """Put the request into the engine's queue.

        Raises:
            Overloaded: the queue is full.
            EngineDied: the engine has stopped.
        """
        ...

    def peek(self, request: EngineRequest) -> Restored:
        """Return what the cache would restore of the prompt."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDefaults:
    """What holds where a request sets nothing.

    Attributes:
        max_tokens: Limit of a reply; None allows the rest of the window.
        sampling: The first that sets a value decides.
        repetition: What happens if the model goes round in circles.
    """

    max_tokens: int | None = None
    sampling: tuple[SamplingChoice, ...] = ()
    repetition: RepetitionPolicy = "stop"


_NO_DEFAULTS = ReplyDefaults()
_REPEATED_CALLS = "calls {} with the same arguments and the same result, {} times in a row"
_RUNAWAY = "repeats a piece of {} tokens for {:,} tokens; {}"


class Service:
    """Answers requests of all protocols. Safe to use from any thread."""

    def __init__(
        self,
        *,
        engine: EnginePort,
        requests: RequestPreparer,
        transcripts: Transcripts,
        reports: Reports,
        defaults: ReplyDefaults = _NO_DEFAULTS,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._model = requests.model
        self._transcripts = transcripts
        self._reports = reports
        self._defaults = defaults

    def respond(self, request: GenerationRequest, origin: RequestOrigin) -> Answer:
        """Validate the request completely, then hand it to the engine.

        Raises:
            RequestError: The request cannot be served. Transcripts and cache are unchanged.
            ClientGone: The client has left. The same holds.
        """
        arrived = time.perf_counter()
        if isinstance(request, TextRequest) and isinstance(request.prompt, tuple):
            # before anything is done with so many tokens
            demand_room(self._model, len(request.prompt), "prompt")
        prepared = self._requests.prepare(request)
        guide = prepared.compile_guide()  # holds the reply to its output constraint; takes long, so only here
        turn = Turn.begin(self._transcripts, prepared.prompt, self._model.context_window)
        engine_request = replace(self._engine_request(prepared, turn), guide=guide)
        output = OutputStream(prepared.splitter, max_calls=prepared.max_calls, stops=request.options.stop)
        spans = _image_spans(engine_request)
        self._decode_images(spans, engine_request)
        record = RequestRecord(_facts(prepared, origin, turn, images=len(spans)), arrived)
        shown = turn.tokens.ids[:_SHOWN_TOKENS]
        account = RequestAccount(self._reports, record, turn.explain, images=spans, beginning=shown)
        repetition = self._repetition_handling(request, is_guided=guide is not None)
        check_client()  # the last moment at which nothing has been done for it
        generation = self._engine.submit(engine_request)
        with ExitStack() as submitted:
            submitted.callback(generation.cancel)
            turn.record_submitted(name_in(origin.id))
            submitted.pop_all()
        return Answer(generation, output, turn, account, repetition, prepared.aliases)

    def _repetition_handling(self, request: GenerationRequest, *, is_guided: bool) -> RepetitionHandling:
        if self._defaults.repetition == "off":
            return RepetitionHandling()
        calls, count = repeated_calls(request.messages) if isinstance(request, ChatRequest) else ("", 0)
        notice = _REPEATED_CALLS.format(calls, count) if is_worth_reporting(count) else ""
        return RepetitionHandling(
            notice, RunawayDetector(), may_stop=self._defaults.repetition == "stop" and not is_guided
        )

    def _decode_images(self, spans: Sequence[ImageSpan], request: EngineRequest) -> None:
        """Decode the images that the cache does not have, so that the engine does not have to.

        Raises:
            RequestError: An image cannot be decoded.
        """
        cached = self._engine.peek(request).tokens if spans else 0
        for span in spans:
            if span.end > cached:
                span.run.inputs()

    def count(self, request: GenerationRequest) -> int:
        """Return the number of tokens of the prompt that `respond` would make now. Nothing is kept.

        A prompt that is too long is counted as well, unless its length alone proves that.

        Raises:
            RequestError: The prompt cannot be made.
        """
        prompt = self._requests.prepare(request).prompt
        return len(Turn.begin(self._transcripts, prompt, self._model.context_window).tokens)

    def tokens(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the prompt as the network would read it if nothing of it had been recorded.

        Raises:
            RequestError: The prompt cannot be made.
        """
        prompt = self._requests.prepare(request).prompt
        names = {
            name: own for run in prompt.images for name, own in zip(run.tokens, run.network_ids, strict=True)
        }
        return tuple(names.get(token, token) for token in prompt.tokens.ids)

    @property
    def window(self) -> int:
        """Maximum tokens of prompt and reply together."""
        return self._model.context_window

    def explain(self, request: GenerationRequest) -> Explanation:
        """Explain how much of the prompt is cached, and why no more. Generates nothing and keeps nothing.

        Raises:
            RequestError: The request cannot be served.
            EngineDied: The engine does not answer.
        """
        prepared = self._requests.prepare(request)
        turn = Turn.begin(self._transcripts, prepared.prompt, self._model.context_window)
        return turn.explain(self._engine.peek(self._engine_request(prepared, turn)))

    def _engine_request(self, prepared: PreparedRequest, turn: Turn) -> EngineRequest:
        request = prepared.request
        return EngineRequest(
            prompt=turn.tokens,
            images=prepared.prompt.images,
            max_tokens=self._max_tokens(prepared, len(turn.tokens)),
            reasoning=prepared.reasoning_limit,
            boundaries=turn.resume_positions,
            repeated_tokens=turn.repeated_tokens,
            salt=request.tenant,
            session=prepared.session,
            is_background=request.is_background,
            sampling=self._sampling(prepared),
            top_logprobs=request.options.top_logprobs,
            trims_leading_space=prepared.trims_leading_space,
            adapters=prepared.adapters,
            draft_texts=prepared.draft_texts,
        )

    def _max_tokens(self, prepared: PreparedRequest, prompt_length: int) -> int:
        """Return the reply's limit: the requested one, at most what the prompt leaves of the window."""
        demand_room(self._model, prompt_length, prepared.prompt_field)
        remaining = self._model.context_window - prompt_length
        limit = prepared.request.options.max_tokens or self._defaults.max_tokens or remaining
        return min(limit, remaining)

    def _sampling(self, prepared: PreparedRequest) -> Sampling:
        options = prepared.request.options
        decided = first_set(options.sampling, *self._defaults.sampling)
        return Sampling(
            **decided,  # pyright: ignore[reportArgumentType] - each field's own type, field by field
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=prepared.logit_bias,
            seed=options.seed,
        )


def _image_spans(request: EngineRequest) -> Sequence[ImageSpan]:
    runs = {run.tokens[0]: run for run in request.images}
    return image_spans(request.prompt.ids, runs) if runs else ()


def _facts(prepared: PreparedRequest, origin: RequestOrigin, turn: Turn, *, images: int) -> RequestFacts:
    """Return what is reported of a request. The names of its session become digests."""
    request, conversation, prefix_match = prepared.request, prepared.prompt.conversation, turn.prefix_match

    def digest(name: str | None) -> str | None:
        return None if name is None else session_digest(request.tenant, name)

    return RequestFacts(
        id=origin.id,
        tenant=request.tenant,
        client=origin.client,
        unknown_model=origin.unknown_model,
        name=session_name(request.session_id),
        session=session_digest(request.tenant, prepared.session),
        session_source="client" if request.session_id else "conversation" if conversation else "none",
        parent_session=digest(request.lineage.parent),
        branch=digest(request.lineage.branch),
        endpoint=origin.endpoint,
        model=origin.model,
        adapter=adapter_label(request.options.adapter),
        messages=prepared.messages,
        mended=origin.mended,
        images=images,
        prompt_tokens=len(turn.tokens),
        stable_prefix_msg_count=prefix_match.seen,
        cache_key_delta_chars=prepared.prompt.omitted_chars,
        bound_messages=prefix_match.messages,
        bound_tokens=prefix_match.tokens,
        replaced_tokens=prefix_match.replaced_tokens,
        binding_refusal=prefix_match.refusal,
    )


class Answer:
    """The reply to one request while it is generated. Leaving the context cancels what is unfinished.

    It hands each event to three others: `output` splits text into reasoning, content and calls; `turn`
    records the reply, so that the next request can resume from it; `account` counts for trace and terminal.
    """

    def __init__(
        self,
        generation: GenerationPort,
        output: OutputStream,
        turn: Turn,
        account: RequestAccount,
        repetition: RepetitionHandling,
        aliases: ToolAliases,
    ) -> None:
        self._generation = generation
        self._output = output
        self._turn = turn
        self._account = account
        self._repetition = repetition
        self._aliases = aliases
        self._repetition_was_reported = False
        self._cached = 0

    def __enter__(self) -> Self:
        with ExitStack() as begun:
            begun.push(self)
            self._account.begin()
            if self._repetition.calls_notice:
                self._account.note_repetition(self._repetition.calls_notice)
            begun.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._generation.cancel()
        try:
            self._turn.note_delivered()
        finally:
            self._account.end(self._turn.texts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the model reads it."""
        return len(self._turn.tokens)

    def events(self) -> Iterator[Event]:
        """Yield events up to `Finished` or `Failed`, and `Idle` at least every 50 ms of silence.

        Text that is held back, because it may begin a mark or a stop string, counts as silence.
        """
        while True:
            outputs = map(self._aliases.for_client, self._outputs(self._generation.take(_POLL_TIMEOUT_S)))
            for event in list(outputs) or [Idle()]:
                self._account.note(event)  # as the client gets it; `Text` and `Restored` were noted before
                yield event
                if isinstance(event, Finished | Failed):
                    return

    def _outputs(self, events: list[Event]) -> Iterator[Event]:
        """Convert the engine's text into output events. Merge adjacent ones; drop superseded progress."""
        outputs: list[Output] = []
        for index, event in enumerate(events):
            self._note_progress(event)
            match event:
                case Restored():
                    self._cached = event.tokens
                    self._account.note(event)
                case Text():
                    outputs += self._recorded(self._feed(event))
                    if early := self._ended_early(event):
                        yield from merge_adjacent([*outputs, *early[0]])
                        yield early[1]
                        return
                case Finished():
                    rest, end = self._output.close(event)
                    outputs += self._recorded(rest)
                    self._turn.record_reply(
                        replace(event, stop=end.stop),
                        is_whole=self._output.is_whole,
                        reply_surprisal_bits=self._output.reply_surprisal_bits,
                        reasoning_surprisal_bits=self._output.reasoning_surprisal_bits,
                    )
                    yield from merge_adjacent(outputs)
                    yield end
                    return
                case Prefilling() if any(isinstance(later, Prefilling) for later in events[index + 1 :]):
                    pass  # a later one tells more
                case _:
                    yield from merge_adjacent(outputs)
                    outputs = []
                    yield event
        yield from merge_adjacent(outputs)

    def _note_progress(self, event: Event) -> None:
        """Tell the transcript how much of the prompt has been computed."""
        match event:
            case Restored():
                self._turn.note_prefilled(event.tokens)
            case Prefilling():
                self._turn.note_prefilled(event.done)
            case _:
                pass

    def _feed(self, piece: Text) -> list[Output]:
        self._account.note(piece)
        self._turn.add_generated_tokens(piece.tokens)
        return self._output.feed(piece)

    def _cut_short(self) -> Finished:
        """End a reply at a stop sequence or after its last permitted call, and cancel the rest."""
        self._generation.cancel(is_over=True)
        usage = Usage(prompt=self.prompt_tokens, cached=self._cached, completion=self._turn.reply_length)
        end = self._output.cut(usage)
        self._turn.record_reply(
            end,
            is_whole=False,
            reply_surprisal_bits=self._output.reply_surprisal_bits,
            reasoning_surprisal_bits=self._output.reasoning_surprisal_bits,
        )
        return end

    def _ended_early(self, piece: Text) -> tuple[list[Output], Finished] | None:
        """Return the last events of a reply that ends here, although the model goes on."""
        if self._output.is_over:
            return [], self._cut_short()
        return self._ended_for_repetition() if self._runs_away(piece) else None

    def _runs_away(self, piece: Text) -> bool:
        """Tell the user, once, that the reply repeats itself. Returns whether it is ended for that."""
        repetition = self._repetition
        period = (
            repetition.detector.feed(piece.tokens)
            if repetition.detector and not self._repetition_was_reported
            else 0
        )
        if not period:
            return False
        self._repetition_was_reported = True
        is_ended = repetition.may_stop and not self._output.may_be_in_call
        end = "it was ended" if is_ended else "it goes on"
        self._account.note_repetition(_RUNAWAY.format(period, RUNAWAY_TOKENS, end))
        return is_ended

    def _ended_for_repetition(self) -> tuple[list[Output], Finished]:
        """End the reply as if it had reached its limit. It is not recorded: nobody wants to go on from it."""
        self._generation.cancel(is_over=True)
        usage = Usage(prompt=self.prompt_tokens, cached=self._cached, completion=self._turn.reply_length)
        rest, end = self._output.close(Finished("length", usage, cut_by="repetition"))
        return self._recorded(rest), end

    def _recorded(self, outputs: list[Output]) -> list[Output]:
        """Record them in the turn, and return them."""
        for output in outputs:
            self._turn.add_output(output)
        return outputs
