"""The story of one request, from what the client asked to the events of the reply."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from start_llm.core.chat import ChatRequest, GenerationRequest, Origin
from start_llm.core.errors import ContextOverflow, OverBudget
from start_llm.core.events import Event, Failed, Finished, Idle, Output, Prefilling, Restored, Text, Usage
from start_llm.core.explanation import Explanation
from start_llm.core.family import Family
from start_llm.core.ids import name_in
from start_llm.core.job import Job, ThoughtLimit
from start_llm.core.prompt import Prompt
from start_llm.core.sampling import Sampling, SamplingChoice, first_said
from start_llm.output.form import FormKeeper, FormTokenizer
from start_llm.output.splitter import PlainSplitter, Splitter
from start_llm.output.stream import OutputStream, joined
from start_llm.prompt.prepare import Preparer
from start_llm.prompt.template import TemplateTokenizer
from start_llm.telemetry.account import Account, Reports
from start_llm.telemetry.terminal import RequestLine
from start_llm.telemetry.trace import Asked, session_digest
from start_llm.transcripts.turn import Transcripts, Turn

_PATIENCE_S = 0.05


class Generation(Protocol):
    """A job in the engine."""

    def take(self, patience_s: float) -> list[Event]:
        """The events that are ready, at least one; `Idle` if nothing comes for `patience_s` seconds."""
        ...

    def cancel(self) -> None: ...


class EnginePort(Protocol):
    """What the service needs of an engine."""

    def submit(self, job: Job) -> Generation: ...

    def peek(self, job: Job) -> Restored:
        """What the cache would restore of its prompt."""
        ...


class ServiceTokenizer(TemplateTokenizer, FormTokenizer, Protocol):
    """What the service needs of a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWindow:
    """Tokens that prompt and reply may have together in the memory of `budget_bytes` for everything."""

    tokens: int
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What the service has to know of the loaded model.

    Attributes:
        vocabulary: width of the logits.
        family: the form of what it writes.
        context_window: tokens that prompt and reply may have together.
        default_max_tokens: length of a reply whose request sets no limit; None is the rest of the window.
        sampling_defaults: sources below the request, the stronger first.
        memory: a further limit, unless there is none.
    """

    vocabulary: int
    family: Family
    context_window: int
    default_max_tokens: int | None
    sampling_defaults: tuple[SamplingChoice, ...]
    memory: MemoryWindow | None = None

    @property
    def room(self) -> int:
        """Tokens that prompt and reply may have together, whatever limits them."""
        return min(self.context_window, self.memory.tokens) if self.memory else self.context_window


class Service:
    """Answers requests, whatever protocol they came in. Safe to use from any thread."""

    def __init__(
        self,
        *,
        engine: EnginePort,
        tokenizer: ServiceTokenizer,
        preparer: Preparer,
        transcripts: Transcripts,
        traits: ModelTraits,
        reports: Reports,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._preparer = preparer
        self._transcripts = transcripts
        self._traits = traits
        self._reports = reports
        self._forms = FormKeeper(tokenizer, traits.family, traits.vocabulary)

    def respond(self, request: GenerationRequest, origin: Origin) -> Answer:
        """Do everything that can refuse the request, then hand it to the engine.

        Raises:
            RequestError: the request cannot be served, and nothing of it is left behind.
        """
        began = time.perf_counter()
        prompt = self._preparer.prepare(request)
        guide = self._forms.guide(request, prompt) if isinstance(request, ChatRequest) else None
        turn = self._transcripts.begin(prompt, self._traits.room)
        job = replace(self._plan(request, prompt, turn), guide=guide)
        output = OutputStream(
            self._splitter(request, prompt), most_calls=_most_calls(request), stops=request.options.stop
        )
        generation = self._engine.submit(job)
        turn.asked(name_in(origin.id))
        line = RequestLine(session=request.session_id, prompt_tokens=len(turn.tokens), began=began)
        account = Account(self._reports, line, _asked(request, origin, prompt, turn), turn.explained)
        return Answer(generation, output, turn, account)

    def count(self, request: GenerationRequest) -> int:
        """Tokens of the prompt that `respond` would make of this request now. Nothing of it is left behind.

        Raises:
            RequestError: the prompt cannot be made. One that is too long is counted all the same.
        """
        prompt = self._preparer.prepare(request)
        return len(self._transcripts.begin(prompt, self._traits.room).tokens)

    def explain(self, request: GenerationRequest) -> Explanation:
        """What is known of the prompt of a request, and why not more. Generates and remembers nothing.

        Raises:
            RequestError: the request cannot be served.
            EngineDied: the engine does not answer.
        """
        prompt = self._preparer.prepare(request)
        turn = self._transcripts.begin(prompt, self._traits.room)
        return turn.explained(self._engine.peek(self._plan(request, prompt, turn)))

    def _plan(self, request: GenerationRequest, prompt: Prompt, turn: Turn) -> Job:
        return Job(
            prompt=turn.tokens,
            max_tokens=self._reply_limit(request, len(turn.tokens)),
            thought=self._thought_limit(request, prompt),
            boundaries=turn.checkpoints,
            known=turn.known,
            salt=request.tenant,
            session=_session(request, prompt),
            is_background=request.is_background,
            sampling=self._sampling(request),
            top_logprobs=request.options.top_logprobs,
            trims_leading_space=isinstance(request, ChatRequest) and self._tokenizer.trims_leading_space,
        )

    def _reply_limit(self, request: GenerationRequest, prompt_length: int) -> int:
        """A large limit is a ceiling, not a claim: the reply gets what the prompt leaves of the window."""
        window, memory = self._traits.context_window, self._traits.memory
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        if prompt_length >= window:
            raise ContextOverflow(prompt_tokens=prompt_length, window=window, param=param)
        if memory and prompt_length >= memory.tokens:
            raise OverBudget(
                prompt_tokens=prompt_length,
                window=memory.tokens,
                budget_bytes=memory.budget_bytes,
                param=param,
            )
        room = self._traits.room - prompt_length
        return min(request.options.max_tokens or self._traits.default_max_tokens or room, room)

    def _thought_limit(self, request: GenerationRequest, prompt: Prompt) -> ThoughtLimit | None:
        """The budget of the thought, for families whose thoughts end with a mark."""
        marks = self._traits.family.thought
        if not isinstance(request, ChatRequest) or request.thinking.budget is None or marks is None:
            return None
        return ThoughtLimit(
            most_tokens=request.thinking.budget,
            starts_open=prompt.thought_is_open,
            opening=marks.opening,
            closing=marks.closing,
            closing_tokens=tuple(self._tokenizer.encode(self._forms.cut(request), as_document=False)),
        )

    def _splitter(self, request: GenerationRequest, prompt: Prompt) -> Splitter:
        if not isinstance(request, ChatRequest):
            return PlainSplitter()
        return self._forms.splitter(request, prompt)

    def _sampling(self, request: GenerationRequest) -> Sampling:
        options = request.options
        decided = first_said(options.sampling, *self._traits.sampling_defaults)
        bias = self._forms.bias(request) if isinstance(request, ChatRequest) else {}
        return Sampling(
            **decided,  # pyright: ignore[reportArgumentType] - each field's own type, field by field
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias={**options.logit_bias, **bias},
            seed=options.seed,
        )


def _most_calls(request: GenerationRequest) -> int | None:
    return 1 if isinstance(request, ChatRequest) and request.form.one_call else None


def _session(request: GenerationRequest, prompt: Prompt) -> str:
    """What its requests have in common, whether or not the client gives them a name."""
    return (prompt.conversation.session if prompt.conversation else request.session_id) or ""


def _asked(request: GenerationRequest, origin: Origin, prompt: Prompt, turn: Turn) -> Asked:
    """The request as its trace tells it: names of the client's choice as digests."""

    def digest(name: str | None) -> str | None:
        return None if name is None else session_digest(request.tenant, name)

    conversation, findings = prompt.conversation, turn.findings
    return Asked(
        request_id=origin.id,
        session=session_digest(request.tenant, _session(request, prompt)),
        session_source="client" if request.session_id else "conversation" if conversation else "none",
        parent_session=digest(request.lineage.parent),
        branch=digest(request.lineage.branch),
        endpoint=origin.endpoint,
        model=origin.model,
        messages=len(request.messages) if isinstance(request, ChatRequest) else 0,
        prompt_tokens=len(turn.tokens),
        stable_prefix_msg_count=findings.seen,
        cache_key_delta_chars=prompt.left_out,
        bound_messages=findings.messages,
        bound_tokens=findings.tokens,
        replaced_tokens=findings.replaced,
        binding_refusal=findings.refusal,
    )


class Answer:
    """The reply to one request, while it is being made. Leaving the context gives up what is unfinished."""

    def __init__(self, generation: Generation, output: OutputStream, turn: Turn, account: Account) -> None:
        self._generation = generation
        self._output = output
        self._turn = turn
        self._account = account
        self._cached = 0

    def __enter__(self) -> Self:
        self._account.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._generation.cancel()
        self._turn.left()
        self._account.end(self._turn.replied, self._turn.texts)

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt as the model reads it."""
        return len(self._turn.tokens)

    def events(self) -> Iterator[Event]:
        """Events up to and including `Finished` or `Failed`; `Idle` at least every 50 ms of silence.

        Text that is held back, until what follows tells what it is, is silence too.
        """
        while True:
            for event in list(self._understood(self._generation.take(_PATIENCE_S))) or [Idle()]:
                self._account.note(event)
                yield event
                if isinstance(event, Finished | Failed):
                    return

    def _understood(self, events: list[Event]) -> Iterator[Event]:
        """Text as what it is. Of what has piled up, neighbours become one, and the newest progress counts."""
        outputs: list[Output] = []
        for index, event in enumerate(events):
            self._follow(event)
            match event:
                case Restored():
                    self._cached = event.tokens
                    self._account.note(event)
                case Text():
                    outputs += self._heard(self._take(event))
                    if self._output.is_over:
                        yield from joined(outputs)
                        yield self._cut_short()
                        return
                case Finished():
                    rest, end = self._output.close(event)
                    outputs += self._heard(rest)
                    self._turn.ended(
                        replace(event, stop=end.stop),
                        is_whole=self._output.is_whole,
                        told_bits=self._output.told_bits,
                        thought_bits=self._output.thought_bits,
                    )
                    yield from joined(outputs)
                    yield end
                    return
                case Prefilling() if any(isinstance(later, Prefilling) for later in events[index + 1 :]):
                    pass
                case _:
                    yield from joined(outputs)
                    outputs = []
                    yield event
        yield from joined(outputs)

    def _follow(self, event: Event) -> None:
        """How much of the prompt is computed."""
        match event:
            case Restored():
                self._turn.computed(event.tokens)
            case Prefilling():
                self._turn.computed(event.done)
            case _:
                pass

    def _take(self, piece: Text) -> list[Output]:
        self._account.note(piece)
        self._turn.wrote(piece.tokens)
        return self._output.feed(piece)

    def _cut_short(self) -> Finished:
        """The end of a reply that goes on with what nobody asked for."""
        self._generation.cancel()
        usage = Usage(prompt=self.prompt_tokens, cached=self._cached, completion=self._turn.replied)
        end = self._output.cut(usage)
        self._turn.ended(
            end,
            is_whole=False,
            told_bits=self._output.told_bits,
            thought_bits=self._output.thought_bits,
        )
        return end

    def _heard(self, outputs: list[Output]) -> list[Output]:
        for output in outputs:
            self._turn.said(output)
        return outputs
