"""Serves requests: finds the endpoint of each, lets it answer, and refuses what may not be answered."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

from start_llm.access.backend_secret import Caller
from start_llm.access.request_target import origin_form
from start_llm.core.chat import ChatRequest, GenerationRequest, RequestOrigin
from start_llm.core.client_presence import check_client, client_watched
from start_llm.core.errors import (
    ClientGone,
    EngineDied,
    Forbidden,
    HeadersTooLarge,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    RequestError,
    StartLLMError,
    Unauthorized,
)
from start_llm.core.events import Content, Event, Failed, Finished, Output, Piece, Prefilling, Usage
from start_llm.core.standard_error import print_traceback
from start_llm.core.unenforced import unenforced_keywords
from start_llm.protocols.base import ParsedRequest, Parser, Reply, RequestContext
from start_llm.protocols.dialects import dialect
from start_llm.protocols.fields import Fields
from start_llm.protocols.history import reported_paths, with_mended_history
from start_llm.protocols.routes import READING, ROUTES, Route, RouteMatch, RouteTable, shown
from start_llm.protocols.urgency import is_background
from start_llm.server.endpoints import (
    ENDPOINTS,
    GenerateEndpoint,
    ModelEndpoint,
    PageEndpoint,
    QueryEndpoint,
)
from start_llm.server.http_connection import HttpConnection
from start_llm.server.life_signs import repeated
from start_llm.server.page_request import Document, Page, PageRequest
from start_llm.server.served_models import ServedModel
from start_llm.serving.answer import Answer
from start_llm.serving.service import Service
from start_llm.telemetry.activity import Refusal

_TABLE = RouteTable(ROUTES)
_STARTING = {"status": "starting", "reason": "the first model is being loaded"}
_METHODS = (*READING, "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_NOTHING = Finished("length", Usage(prompt=0, cached=0, completion=0))
_STDLIB_REFUSALS = {414: HeadersTooLarge, 431: HeadersTooLarge, 501: MethodNotAllowed}


class Handler(HttpConnection):
    """Serves the requests of one client, one after another."""

    def serve(self) -> None:
        """Serve one request whose headers have been read.

        Raises:
            ClientGone: the client has left before their end, which http.server takes for their end.
        """
        if self._reader.has_ended:
            raise ClientGone("the client hung up in the middle of its headers")
        self.path, host = origin_form(self.path)
        if host is not None:
            self.headers.add_header("Host", host)  # beside the other one, so both have to be the same
        with self.server.connections.busy(self.connection):
            self._serve()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = serve  # noqa: N815 - names of http.server

    def _serve(self) -> None:
        self._dialect = dialect(self._path)
        self._unread_body = self._may_have_body()
        try:
            self._admit()
            if self.server.is_starting and self._asks_for_health:
                self._send_json(503, _STARTING)
            elif self._is_preflight:
                self._send_body(204, self._origins.preflight(self._lower_headers()), b"")
            else:
                with client_watched(self._has_left), self._defects_as_errors():
                    self._answer(_TABLE.find(self.command, self._path))
        except RequestError as error:
            self._refuse(error)
        except EngineDied as error:
            self._refuse(InternalError(str(error)))
        if self._unread_body:
            self.close_connection = True

    @contextmanager
    def _defects_as_errors(self) -> Generator[None]:
        """Answer a defect of this server with an `InternalError`: else its client sees a lost connection,
        which is what it has to see once the reply has begun.
        """
        try:
            yield
        except (StartLLMError, OSError):
            raise
        except Exception as error:
            if self._has_replied:
                raise
            print_traceback()
            self.close_connection = True
            raise InternalError(
                f"The server failed ({type(error).__name__}); its output has the details."
            ) from error

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0]

    @property
    def _asks_for_health(self) -> bool:
        return self.command in READING and self._path == "/health"

    @property
    def _is_preflight(self) -> bool:
        return self._origins.is_preflight(self.command, self._lower_headers())

    def _answer(self, match: RouteMatch) -> None:
        """Let the endpoint answer. The server waits for the end of everything that changes something."""
        with ExitStack() as stack:
            if match.route.method not in READING:
                stack.enter_context(self.server.context.drain.admit_request())
            match ENDPOINTS[match.route.name]:
                case PageEndpoint(answer):
                    self._send_page(answer(self.server.context, self._page_request(match)))
                case ModelEndpoint(answer, computes):
                    if computes:
                        self._limit_key(stack)
                    fields = self._fields(match.route)
                    model = stack.enter_context(self._lease(fields.value("model"), streams=False))
                    key = self._caller().tenant.encode()
                    self._send_json(200, answer(fields, model, self._tenant(), key))
                case QueryEndpoint(parse, answer):
                    parsed = self._parsed(match.route, parse, may_stream=False)
                    model, _, request, _ = stack.enter_context(parsed)
                    self._send_json(200, answer(model.service, request))
                case GenerateEndpoint(parse):
                    self._limit_key(stack)
                    self._generate(match.route, parse)

    def _limit_key(self, stack: ExitStack) -> None:
        """Count the request among those of its key, while the stack is open.

        Raises:
            RateLimited: the key has as many as it may have.
        """
        context = self.server.context
        if context.tenants.is_readiness_check(self._lower_headers()):
            return
        if left := stack.enter_context(context.key_limits.request(self._caller().tenant.encode())):
            self._limit_headers = self._dialect.limit_headers(left)

    def _page_request(self, match: RouteMatch) -> PageRequest:
        self._proof = self.server.context.tenants.proof(self._lower_headers(), self.command, self.path)
        return PageRequest(
            tenant=self._tenant(),
            fields=self._fields(match.route),
            headers=self._lower_headers(),
            name=unquote(match.name),
        )

    def _fields(self, route: Route) -> Fields:
        """Return the fields of the body, or of the query if the endpoint has no body."""
        return self._read_fields() if route.body else Fields(dict(parse_qsl(self.path.partition("?")[2])))

    def _send_page(self, page: Page | Document) -> None:
        match page:
            case Document(body, headers):
                self._send_body(200, headers, body)
            case (status, payload):
                self._send_json(status, payload)

    def _tenant(self) -> bytes:
        return self.server.context.tenants.of(self._lower_headers(), self.command, self.path)

    def _caller(self) -> Caller:
        return self.server.context.tenants.caller(self._lower_headers(), self.command, self.path)

    def _request_context(self, model: ServedModel) -> RequestContext:
        context = self.server.context
        return RequestContext(model, self._tenant(), context.seal, context.responses, context.notices)

    @contextmanager
    def _parsed(
        self, route: Route, parse: Parser, *, may_stream: bool = True
    ) -> Generator[tuple[ServedModel, ParsedRequest, GenerationRequest, Fields]]:
        """Parse the body, with the model that it names, and attach the tenant. The model stays loaded.

        Yields the body as well, in which is noted what was mended.
        """
        body = self._read_fields()
        check_client()
        streams = may_stream and body.boolean("stream")
        with self._lease(body.value("model"), streams=streams) as model:
            check_client()
            context = self._request_context(model)
            body = with_mended_history(route.body, body)
            try:
                parsed = parse(body, self._lower_headers(), context)
            except RecursionError as error:
                raise InvalidRequest("The body is nested too deeply.") from error
            self._note_unenforced(parsed.request, context)
            gives_way = is_background(body, self._lower_headers(), parsed.request)
            request = replace(parsed.request, tenant=context.tenant, is_background=gives_way)
            yield model, parsed, request, body

    def _note_unenforced(self, request: GenerationRequest, context: RequestContext) -> None:
        answer = request.form.answer if isinstance(request, ChatRequest) else None
        if answer and not answer.is_strict and (keywords := unenforced_keywords(answer.schema)):
            self._unenforced = ", ".join(keywords)
            context.notices.tell(
                f"Replies may break what no grammar enforces of a schema: {self._unenforced}."
            )

    def _unknown_model(self, body: Fields) -> str:
        """Return the name that a request asks for, if no model has it."""
        name = body.value("model")
        return name if isinstance(name, str) and not self.server.context.models.knows(name) else ""

    @contextmanager
    def _lease(self, name: object, *, streams: bool) -> Generator[ServedModel]:
        """Lease a model. While a streamed reply waits for it to be loaded, its stream begins."""
        models = self.server.context.models
        self._answering = models.answering(name)
        with ExitStack() as stack:
            if not streams:
                model = stack.enter_context(models.lease(name, self.server.limits.load_wait_s))
            elif (model := stack.enter_context(models.lease_if_loaded(name))) is None:
                with repeated(self._send_life_sign, self.server.limits.keep_alive_s):
                    model = stack.enter_context(models.lease(name))
            self._answering = model.card.id
            yield model

    def _send_life_sign(self) -> None:
        self._begin_stream().send_comment(self.server.context.models.loading_progress(self._answering))

    def _admit(self) -> None:
        """Apply the access policy. Must run before the request is parsed and its body is read."""
        try:
            address = str(self.connection.getsockname()[0])
        except OSError as error:
            # Some systems no longer know the local address of a reset connection.
            raise ClientGone(str(error)) from error
        asks_key = _TABLE.asks_key(self._path) and not self._is_preflight
        self.server.access_policy.admit(self.headers.items(), address, asks_key=asks_key)

    def _generate(self, route: Route, parse: Parser) -> None:
        with self._parsed(route, parse) as (model, parsed, request, body):
            headers = self._lower_headers()
            if self.server.context.tenants.is_readiness_check(headers):
                self._send_json(200, parsed.reply.whole([], _NOTHING))
                return
            if parsed.unavailable:
                self._answer_unavailable(parsed)
                return
            caller = self._caller()
            origin = RequestOrigin(
                id=parsed.reply.id,
                endpoint=route.path,
                model=model.card.id,
                client=caller.program,
                mended=reported_paths(body.mended),
                unknown_model=self._unknown_model(body),
                key=caller.tenant.encode(),
            )
            self._respond(model.service, parsed, request, origin)

    def _respond(
        self, service: Service, parsed: ParsedRequest, request: GenerationRequest, origin: RequestOrigin
    ) -> None:
        with service.respond(request, origin) as answer:
            # Use the id that the client and the trace have for the request.
            self._request_id = parsed.reply.id
            if parsed.stream:
                self._stream(parsed.reply, answer)
            else:
                self._send_whole(parsed.reply, answer)

    def _answer_unavailable(self, parsed: ParsedRequest) -> None:
        """Answer without the model: what is demanded is a tool that nobody can run here."""
        content, end = Content(parsed.unavailable), replace(_NOTHING, reason="stop")
        self._request_id = parsed.reply.id
        if not parsed.stream:
            self._send_json(200, parsed.reply.whole([content], end))
            return
        stream = self._begin_stream()
        for frames in (parsed.reply.opening(0), parsed.reply.output(content), parsed.reply.closing(end)):
            stream.send(frames)
        stream.end()

    def _stream(self, reply: Reply, answer: Answer) -> None:
        stream = self._begin_stream()
        stream.send(reply.opening(answer.prompt_tokens, answer.divergence))
        for event in answer.events():
            self._check_client(event)
            match event:
                case Finished():
                    stream.send(reply.closing(event))
                    stream.end()
                case Failed(message):
                    stream.send([reply.failure(message)])
                    # Without the last chunk the client sees that the stream was cut. The proxy would
                    # then drop unread data, including the error message (lesson 41).
                    if self.server.context.tenants.is_proxy(self._lower_headers()):
                        stream.end()
                    self.close_connection = True
                case _:
                    if isinstance(event, Piece):
                        stream.send(reply.output(event))
                    elif isinstance(event, Prefilling):
                        stream.send(reply.progress(event))
                    # The model may also write text that is not sent, or not yet.
                    if stream.silent_for_s >= self.server.limits.keep_alive_s:
                        stream.send([reply.keep_alive()])

    def _send_whole(self, reply: Reply, answer: Answer) -> None:
        outputs: list[Output] = []
        for event in answer.events():
            self._check_client(event)
            match event:
                case Piece():
                    outputs.append(event)
                case Finished():
                    self._send_json(200, reply.whole(outputs, event))
                case Failed(message):
                    self._send_error_body(InternalError(message))
                case _:
                    pass

    def _check_client(self, event: Event) -> None:
        """Raise `ClientGone` if the client has closed the connection."""
        if not isinstance(event, Finished | Failed):
            check_client()

    def _refuse(self, error: RequestError) -> None:
        """Refuse a request that the engine has not seen, and tell the terminal and the status page."""
        self._note_refusal(
            Refusal(
                tenant=self._tenant_of_refused(error),
                method=self.command,
                path=self._path,
                status=error.status,
                reason=error.message,
            )
        )
        self._send_error_body(error)

    def _note_refusal(self, refusal: Refusal) -> None:
        if self.server.is_starting:  # nothing is there yet to tell it
            return
        self.server.context.activity.refuse(refusal)
        self.server.context.show_refusal(refusal)

    def _tenant_of_refused(self, error: RequestError) -> bytes | None:
        """Return whose request it is; None if nobody was let in yet, or this one was not."""
        if self.server.is_starting or isinstance(error, Unauthorized | Forbidden):
            return None
        return self._tenant()

    def _note_response(self, status: int) -> None:
        if self.server.is_starting:
            return
        method = self.command if self.command in _METHODS else "other"
        template = _TABLE.template(self._path) if self.path else None
        self.server.context.prometheus.note_response(shown(template or "other"), method, status)

    def _send_error_body(self, error: RequestError) -> None:
        if self._stream_begun:
            # The status went out while the model was being loaded; only then could the request be checked.
            self._stream_begun.send(self._dialect.stream_refusal(error, self._request_id))
            self._stream_begun.end()
        else:
            self._send_json(error.status, self._dialect.refusal(error, self._request_id), error.headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Send http.server's own errors, such as for an unreadable request line, as JSON."""
        kind = _STDLIB_REFUSALS.get(code, InvalidRequest)
        self.close_connection = True
        self._unread_body = True
        if not hasattr(self, "headers"):
            self.command = ""
        phrase = HTTPStatus(code).phrase
        unread = Refusal(
            tenant=None, method="", path="", status=code, reason=f"{phrase}: no readable request"
        )
        self._note_refusal(unread)
        self._send_error_body(kind(f"{message or phrase}."))
