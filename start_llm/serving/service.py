"""One request from start to end: prepare its prompt, bind it to the tokens of earlier turns, and have it
generated. `serving.answer` turns the text into events.
"""

import time
from array import array
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

from start_llm.core.adapters import BASE_MODEL, adapter_label
from start_llm.core.chat import ChatRequest, GenerationRequest, RequestOrigin, TextRequest
from start_llm.core.client_presence import check_client
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Restored
from start_llm.core.explanation import Explanation
from start_llm.core.ids import name_in
from start_llm.core.images import ImageSpan, image_spans
from start_llm.core.prompt_report import Divergence, Receipt
from start_llm.core.repetition import (
    RepetitionHandling,
    RepetitionPolicy,
    RunawayDetector,
    is_worth_reporting,
    repeated_calls,
)
from start_llm.core.sampling import Sampling, SamplingChoice, first_set
from start_llm.output.stream import OutputStream
from start_llm.serving.answer import Answer, GenerationPort
from start_llm.serving.prompt_account import PromptAccount
from start_llm.serving.read_ahead import ReadAhead
from start_llm.serving.request_preparation import PreparedRequest, RequestPreparer, demand_room
from start_llm.serving.warming import warm
from start_llm.telemetry.account import Reports, RequestAccount
from start_llm.telemetry.request_record import RequestFacts, RequestRecord, session_name
from start_llm.telemetry.trace import session_digest
from start_llm.transcripts.beginnings import Beginning
from start_llm.transcripts.divergence import AnsweredRequest, AnsweredRequests
from start_llm.transcripts.recent import ComputedRequest
from start_llm.transcripts.transcripts import Transcripts
from start_llm.transcripts.turn import Turn

_SHOWN_TOKENS = 64
_MOST_WARMED = 4
"""Beginnings that are read for one request: a program has one for each kind of its agents."""


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


@dataclass(frozen=True, slots=True)
class AfterReply:
    """What learns of each reply.

    Attributes:
        answered: remembers requests, so that clients can compare later ones with them.
        read_ahead: reads what next requests will begin with; None: nothing that nobody asked for is read.
    """

    answered: AnsweredRequests
    read_ahead: ReadAhead | None = None


_NO_DEFAULTS = ReplyDefaults()
_REPEATED_CALLS = "calls {} with the same arguments and the same result, {} times in a row"


class Service:
    """Answers requests of all protocols. Safe to use from any thread.

    Args:
        after: what learns of each reply; None: this service alone remembers it.
    """

    def __init__(
        self,
        *,
        engine: EnginePort,
        requests: RequestPreparer,
        transcripts: Transcripts,
        reports: Reports,
        defaults: ReplyDefaults = _NO_DEFAULTS,
        after: AfterReply | None = None,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._model = requests.model
        self._transcripts = transcripts
        self._reports = reports
        self._defaults = defaults
        self._after = after or AfterReply(AnsweredRequests())

    def respond(self, request: GenerationRequest, origin: RequestOrigin) -> Answer:
        """Validate the request completely, then hand it to the engine.

        Raises:
            RequestError: The request cannot be served. Transcripts and cache are unchanged.
            ClientGone: The client has left. The same holds.
            EngineDied: The engine does not answer.
        """
        arrived = time.perf_counter()
        if isinstance(request, TextRequest) and isinstance(request.prompt, tuple):
            # before anything is done with so many tokens
            demand_room(self._model, len(request.prompt), "prompt")
        prepared = self._requests.prepare(request)
        # What holds the reply to its output constraint takes long to make, so only here.
        guide = None if request.options.is_prewarm else prepared.compile_guide()
        turn = Turn.begin(self._transcripts, prepared.prompt, self._model.context_window)
        engine_request = replace(self._engine_request(prepared, turn), guide=guide)
        output = OutputStream(prepared.splitter, max_calls=prepared.max_calls, stops=request.options.stop)
        spans = _image_spans(engine_request)
        self._decode_images(spans, engine_request)
        record = RequestRecord(_facts(prepared, origin, turn, images=len(spans)), arrived)
        shown = turn.tokens.ids[:_SHOWN_TOKENS]
        account = RequestAccount(self._reports, record, turn.explain, images=spans, beginning=shown)
        repetition = self._repetition_handling(prepared.original, is_guided=guide is not None)
        check_client()  # the last moment at which nothing has been done for it
        generation = self._engine.submit(engine_request)
        with ExitStack() as submitted:
            submitted.callback(generation.cancel)
            turn.record_submitted(name_in(origin.id))
            answer = Answer(
                generation=generation,
                output=output,
                turn=turn,
                account=account,
                repetition=repetition,
                aliases=prepared.aliases,
                prompt=self._prompt_account(prepared, turn),
                remember=partial(self._remember, prepared, origin, turn),
            )
            submitted.pop_all()
        return answer

    def _model_of(self, prepared: PreparedRequest) -> str:
        """Return a name for what answers the request: the model and its adapters."""
        return "\n".join([self._model.id, adapter_label(prepared.original.options.adapter) or ""])

    def _prompt_account(self, prepared: PreparedRequest, turn: Turn) -> PromptAccount:
        session, ids = (prepared.request.tenant, prepared.session), turn.tokens.ids
        ahead = self._after.read_ahead
        find = partial(ahead.note_restored, session, ids) if ahead else lambda _: 0
        return PromptAccount(ids, turn.note, self._divergence(prepared, turn), turn.kept, find)

    def _divergence(self, prepared: PreparedRequest, turn: Turn) -> Divergence | None:
        """Return where a request leaves the one that its client names; None also if it names none."""
        request = prepared.original
        if not isinstance(request, ChatRequest) or request.compared_with is None:
            return None
        before = self._after.answered.find(request.tenant, request.compared_with)
        return turn.divergence(before, self._model_of(prepared)) if before else Divergence("unknown")

    def _remember(self, prepared: PreparedRequest, origin: RequestOrigin, turn: Turn) -> None:
        """Remember a request, and have the beginning of the next one read once its reply has ended."""
        if turn.computed is not None:
            self._remember_request(prepared, origin, turn, turn.computed)
        request, read_ahead = prepared.original, self._after.read_ahead
        reply = turn.take_reply() if read_ahead else None
        if read_ahead and reply and isinstance(request, ChatRequest):
            kept = request.messages[: len(request.messages) - turn.transient_messages]
            read_ahead.note_reply(replace(request, messages=kept), reply)

    def _remember_request(
        self, prepared: PreparedRequest, origin: RequestOrigin, turn: Turn, computed: ComputedRequest
    ) -> None:
        """Remember a request, so that clients can compare later ones with it, and how its agent begins."""
        request = prepared.original
        answered = AnsweredRequest(self._model_of(prepared), computed)
        self._after.answered.note(request.tenant, name_in(origin.id), answered)
        if isinstance(request, ChatRequest) and _is_of_an_agent(request, prepared):
            is_known = bool(turn.boundaries) and turn.boundaries[0].message == 0
            ids = turn.tokens.ids[: turn.boundaries[0].tokens + 1] if is_known else ()
            beginning = Beginning(prepared.request.tenant, origin.client, array("I", ids))
            self._transcripts.beginnings.note(beginning)

    def _repetition_handling(self, request: GenerationRequest, *, is_guided: bool) -> RepetitionHandling:
        if self._defaults.repetition == "off" or request.options.is_prewarm:
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

    def warm(self, tenant: bytes, programs: Collection[str], key: bytes) -> list[Receipt]:
        """Read what the conversations of a tenant's programs begin with into memory. See `warming.warm`.

        Args:
            programs: their names, as `RequestOrigin.client` has them; empty: all that the tenant has.
            key: digest of the API key for which what is computed counts.
        """
        beginnings = self._transcripts.beginnings.of(tenant, programs, self._model.context_window - 1)
        receipts: list[Receipt] = []
        for beginning in beginnings[:_MOST_WARMED]:
            receipts.append(warm(self._engine.submit, beginning))
            self._reports.count_tokens(key, receipts[-1].read)
        return receipts

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
            kept=tuple(place for place in turn.kept if place.tokens),
            repeated_tokens=turn.repeated_tokens,
            salt=request.tenant,
            # The turn that it prepares must not be due later for it, as prompts of one session are.
            session="" if prepared.request.options.is_prewarm else prepared.session,
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
        asked = prepared.request.options.max_tokens
        limit = (self._defaults.max_tokens or remaining) if asked is None else asked
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


def _is_of_an_agent(request: ChatRequest, prepared: PreparedRequest) -> bool:
    """Return whether others of its conversations will begin as this one does, with rules of the client."""
    is_usual = prepared.adapters == BASE_MODEL and not (request.images or request.is_background)
    first = next(iter(prepared.prompt.boundaries), None)
    return is_usual and request.messages[0].role == "system" and bool(first) and first.message == 0


def _image_spans(request: EngineRequest) -> Sequence[ImageSpan]:
    runs = {run.tokens[0]: run for run in request.images}
    return image_spans(request.prompt.ids, runs) if runs else ()


def _facts(prepared: PreparedRequest, origin: RequestOrigin, turn: Turn, *, images: int) -> RequestFacts:
    """Return what is reported of a request. The names of its session become digests."""
    request, conversation, prefix_match = prepared.request, prepared.prompt.conversation, turn.prefix_match

    def digest(name: str | None) -> str | None:
        return None if name is None else session_digest(request.tenant, name)

    return RequestFacts(
        **asdict(origin),
        tenant=prepared.original.tenant,
        name=session_name(request.session_id),
        session=session_digest(request.tenant, prepared.session),
        session_source="client" if request.session_id else "conversation" if conversation else "none",
        parent_session=digest(request.lineage.parent),
        branch=digest(request.lineage.branch),
        adapter=adapter_label(request.options.adapter),
        messages=prepared.messages,
        images=images,
        prompt_tokens=len(turn.tokens),
        stable_prefix_msg_count=prefix_match.seen,
        cache_key_delta_chars=prepared.prompt.omitted_chars,
        bound_messages=prefix_match.messages,
        bound_tokens=prefix_match.tokens,
        replaced_tokens=prefix_match.replaced_tokens,
        binding_refusal=prefix_match.refusal,
        is_prewarm=request.options.is_prewarm,
    )
