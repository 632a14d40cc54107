"""Handles one connection: parses HTTP requests, dispatches them to routes and writes replies."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import cast
from urllib.parse import parse_qsl

from start_llm.core.accept import prefers_html
from start_llm.core.access_policy import body_length, demand_json, is_chunked
from start_llm.core.allocator import give_back_free_memory
from start_llm.core.answering_model import ANSWERING_MODEL, in_a_header
from start_llm.core.chat import ChatRequest, GenerationRequest, Json, RequestOrigin
from start_llm.core.client_presence import LOOK_S, check_client, client_watched, held_in_turn
from start_llm.core.content_coding import content_coding, decoded
from start_llm.core.cross_origin import AllowedOrigins
from start_llm.core.errors import (
    ClientGone,
    EngineDied,
    Forbidden,
    HeadersTooLarge,
    InternalError,
    InvalidRequest,
    LengthRequired,
    MethodNotAllowed,
    RequestError,
    RequestTimeout,
    Unauthorized,
)
from start_llm.core.events import Content, Event, Failed, Finished, Output, Piece, Usage
from start_llm.core.request_target import origin_form
from start_llm.core.unenforced import UNENFORCED, unenforced_keywords
from start_llm.protocols.base import ParsedRequest, Reply, RequestContext, TenantResponses, new_id
from start_llm.protocols.fields import Fields, parse_body
from start_llm.protocols.history import told_paths, with_mended_history
from start_llm.protocols.sessions import background
from start_llm.server.chunked_body import read_chunked
from start_llm.server.connection import BoundedWriter, DeadlineReader, drain, is_closed_by_peer
from start_llm.server.library_pages import LibraryRequest
from start_llm.server.life_signs import repeated
from start_llm.server.listener import Listener
from start_llm.server.routes import (
    OPENAI,
    ActivityRoute,
    AdapterRoute,
    Ask,
    BrowserRoute,
    Endpoint,
    FieldsRoute,
    GenerateRoute,
    LibraryRoute,
    MetricsRoute,
    ModelRoute,
    QueryRoute,
    StatusRoute,
    StoredRoute,
    dialect,
    find,
    pattern,
    requires_key,
)
from start_llm.server.served_models import ServedModel
from start_llm.server.sse import EventStream
from start_llm.server.status_page import HtmlPage, status_page
from start_llm.service import Answer, Service
from start_llm.telemetry.activity import Refusal

_LARGE_BODY = 4 * 2**20
_LARGE_PARSING = threading.Lock()
_READING = ("GET", "HEAD")
_STARTING = {"status": "starting", "reason": "the first model is being loaded"}
_METHODS = (*_READING, "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_NOTHING = Finished("length", Usage(prompt=0, cached=0, completion=0))
_STDLIB_REFUSALS = {414: HeadersTooLarge, 431: HeadersTooLarge, 501: MethodNotAllowed}


class Handler(BaseHTTPRequestHandler):
    """Serves the requests of one client, one after another."""

    server: Listener  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    # Version assumed for an unreadable request line. http.server's default, 0.9, has no status line.
    default_request_version = "HTTP/1.0"
    server_version = "start_llm"
    sys_version = ""

    def setup(self) -> None:
        limits = self.server.limits
        self.connection = cast("socket.socket", self.request)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._reader = DeadlineReader(self.connection)
        self.rfile = self._buffer = io.BufferedReader(self._reader, 65536)
        self.wfile = cast("io.BufferedIOBase", BoundedWriter(self.connection, limits.write_s))
        self._unread_body = False
        self._last_look = 0.0
        self._stream_begun: EventStream | None = None

    def finish(self) -> None:
        if self._unread_body:
            drain(self.connection)

    def handle_one_request(self) -> None:
        self._stream_begun, self._had_large_body, self._answering = None, False, ""
        self._unenforced = ""
        self._dialect, self._request_id, self.path = OPENAI, new_id("req_"), ""
        try:
            self._reader.allow(self.server.limits.idle_s)
            if not self._buffer.peek(1):
                self.close_connection = True
                return
            self.server.connections.receives(self.connection)
            self._reader.allow(self.server.limits.header_s)
            super().handle_one_request()
        except (ClientGone, ConnectionError, TimeoutError):
            # Nobody is left to answer: the client closed the connection or never sent a complete request.
            self.close_connection = True
        finally:
            if self._had_large_body:
                give_back_free_memory()

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

    def _serve(self) -> None:
        self._dialect = dialect(self.path)
        self._unread_body = self._may_have_body()
        try:
            self._admit()
            if self.server.is_starting and self._asks_for_health:
                self._send_json(503, _STARTING)
            elif self._is_preflight:
                self._send_body(204, self._origins.preflight(self._lower_headers()), b"")
            else:
                with client_watched(self._has_left):
                    self._answer(find(self.command, self.path))
        except RequestError as error:
            self._refuse(error)
        except EngineDied as error:
            self._refuse(InternalError(str(error)))
        if self._unread_body:
            self.close_connection = True

    def _has_left(self) -> bool:
        """Return whether the client has closed the connection. Looks at most every 50 ms."""
        now = time.monotonic()
        if now - self._last_look < LOOK_S:
            return False
        self._last_look = now
        return is_closed_by_peer(self.connection)

    @property
    def _origins(self) -> AllowedOrigins:
        return self.server.access_policy.origins

    @property
    def _asks_for_health(self) -> bool:
        return self.command in _READING and self.path.partition("?")[0] == "/health"

    @property
    def _is_preflight(self) -> bool:
        return self._origins.is_preflight(self.command, self._lower_headers())

    def _answer(self, endpoint: Endpoint) -> None:
        match endpoint:
            case StatusRoute() | BrowserRoute() as route:
                self._send_status(route)
            case MetricsRoute():
                content_type, body = self.server.context.prometheus.exposition(self.headers.get("accept", ""))
                self._send_body(200, _headers(content_type, body), body)
            case StoredRoute(render):
                self._send_json(200, render(TenantResponses(self._tenant(), self.server.context.responses)))
            case LibraryRoute() | AdapterRoute() | ModelRoute() | ActivityRoute() as route:
                with self._fields(route) as asked:
                    self._send_json(*self._page(route, asked))
            case QueryRoute(wire, ask):
                self._handle_query(wire, ask)
            case GenerateRoute() as wire:
                self._generate(wire)

    def _send_status(self, route: StatusRoute | BrowserRoute) -> None:
        context = self.server.context
        match route:
            case BrowserRoute() if prefers_html(self.headers.get("accept", "")):
                self._send_page(status_page(asks_key=bool(self.server.access_policy.keys)))
            case BrowserRoute(otherwise):
                self._send_status(otherwise)
            case StatusRoute(as_anthropic=render) if render and "anthropic-version" in self.headers:
                self._send_json(*render(context.models))
            case StatusRoute(render, takes_time=False):
                self._send_json(*render(context.models))
            case StatusRoute(render):
                with context.drain.admit_request():
                    self._send_json(*render(context.models))

    def _may_have_body(self) -> bool:
        """Return True if a body may follow. A body of unknown length leaves the connection unusable."""
        announced = "content-length" in self.headers or "transfer-encoding" in self.headers
        return announced or self.command not in (*_READING, "OPTIONS")

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = serve  # noqa: N815 - names of http.server

    def _lower_headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}

    def _tenant(self) -> bytes:
        return self.server.context.tenants.of(self._lower_headers(), self.command, self.path)

    def _request_context(self, model: ServedModel) -> RequestContext:
        context = self.server.context
        return RequestContext(model.facts, self._tenant(), context.seal, context.responses, context.notices)

    @contextmanager
    def _call(
        self, wire: GenerateRoute, *, may_stream: bool = True
    ) -> Generator[tuple[ServedModel, ParsedRequest, GenerationRequest]]:
        """Parse the body, with the model that it names, and attach the tenant. The model stays loaded."""
        body = self._parsed(self._read_body())
        check_client()
        streams = may_stream and body.boolean("stream")
        with self._lease(body.value("model"), streams=streams) as model:
            check_client()
            context = self._request_context(model)
            body = with_mended_history(wire.path, body)
            call = replace(
                wire.parse(body, self._lower_headers(), context),
                mended=told_paths(body.mended),
                unknown_model=self._unknown_model(body),
            )
            self._note_unenforced(call.request, context)
            is_background = background(self._lower_headers())
            yield model, call, replace(call.request, tenant=context.tenant, is_background=is_background)

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
            if streams and models.must_wait(name):
                with repeated(self._send_life_sign, self.server.limits.keep_alive_s):
                    model = stack.enter_context(models.lease(name))
            else:
                model = stack.enter_context(models.lease(name, self.server.limits.load_wait_s))
            self._answering = model.facts.id
            yield model

    def _send_life_sign(self) -> None:
        self._begin_stream().send_comment(self.server.context.models.loading_progress())

    def _begin_stream(self) -> EventStream:
        """Return the stream of the reply. Its head is sent if it has not been."""
        if self._stream_begun is None:
            stream = EventStream(self.wfile.write, chunked=self.request_version == "HTTP/1.1")
            self._send_head(HTTPStatus.OK, stream.headers)
            self._stream_begun = stream
        return self._stream_begun

    def _admit(self) -> None:
        """Apply the access policy. Must run before the request is parsed and its body is read."""
        try:
            address = str(self.connection.getsockname()[0])
        except OSError as error:
            # Some systems no longer know the local address of a reset connection.
            raise ClientGone(str(error)) from error
        asks_key = requires_key(self.path) and not self._is_preflight
        self.server.access_policy.admit(self.headers.items(), address, asks_key=asks_key)

    def _handle_query(self, wire: GenerateRoute, ask: Ask) -> None:
        admitted = self.server.context.drain.admit_request()
        with admitted, self._call(wire, may_stream=False) as (model, _, request):
            self._send_json(200, ask(model.service, request))

    @contextmanager
    def _fields(self, route: FieldsRoute) -> Generator[Fields]:
        """Return the fields of the body or of the query. The server waits for what is sent to it."""
        if self.command in _READING:
            yield Fields(dict(parse_qsl(route.query)))
            return
        with self.server.context.drain.admit_request():
            yield self._parsed(self._read_body()) if route.has_body else Fields(dict(parse_qsl(route.query)))

    def _page(self, route: FieldsRoute, asked: Fields) -> tuple[int, Mapping[str, Json]]:
        context, tenant = self.server.context, self._tenant()
        match route:
            case LibraryRoute(answer):
                return answer(context.library, LibraryRequest(tenant, asked))
            case ActivityRoute(answer):
                return answer(context.activity_pages, tenant, asked)
            case AdapterRoute(answer):
                return answer(context.adapters, asked)
            case ModelRoute(answer):
                with self._lease(asked.value("model"), streams=False) as model:
                    return 200, answer(asked, model)

    def _generate(self, wire: GenerateRoute) -> None:
        with self.server.context.drain.admit_request(), self._call(wire) as (model, call, request):
            headers = self._lower_headers()
            if self.server.context.tenants.is_warm_up(headers):
                self._send_json(200, call.reply.whole([], _NOTHING))
                return
            if call.unavailable:
                self._answer_unavailable(call)
                return
            program = self.server.context.tenants.caller(headers, self.command, self.path).program
            origin = RequestOrigin(
                call.reply.id, wire.path, model.facts.id, program, call.mended, call.unknown_model
            )
            self._respond(model.service, call, request, origin)

    def _respond(
        self, service: Service, call: ParsedRequest, request: GenerationRequest, origin: RequestOrigin
    ) -> None:
        with service.respond(request, origin) as answer:
            # Use the id that the client and the trace have for the request.
            self._request_id = call.reply.id
            if call.stream:
                self._stream(call.reply, answer)
            else:
                self._send_whole(call.reply, answer)

    def _answer_unavailable(self, call: ParsedRequest) -> None:
        """Answer without the model: what is demanded is a tool that nobody can run here."""
        said, end = Content(call.unavailable), replace(_NOTHING, reason="stop")
        self._request_id = call.reply.id
        if not call.stream:
            self._send_json(200, call.reply.whole([said], end))
            return
        stream = self._begin_stream()
        for frames in (call.reply.opening(0), call.reply.output(said), call.reply.closing(end)):
            stream.send(frames)
        stream.end()

    def _stream(self, reply: Reply, answer: Answer) -> None:
        stream = self._begin_stream()
        stream.send(reply.opening(answer.prompt_tokens))
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

    def _read_body(self) -> bytes:
        coding = content_coding(self._joined_header("content-encoding"))
        length = self._body_length()
        demand_json(self.headers.get("content-type"))
        self._reader.allow(self.server.limits.body_s)
        try:
            with self.server.connections.not_busy(self.connection):
                body = self._received(length)
        except TimeoutError as error:
            seconds = self.server.limits.body_s
            raise RequestTimeout(f"The body did not arrive within {seconds:g} seconds.") from error
        self._unread_body = False
        return decoded(body, coding, self.server.limits.max_body_bytes)

    def _received(self, length: int | None) -> bytes:
        """Return the bytes of the body; of no length are those in chunks."""
        if length is None:
            return read_chunked(self._buffer, self.server.limits.max_body_bytes)
        body = self.rfile.read(length)
        if len(body) < length:
            raise ClientGone("the client hung up in the middle of its request")
        return body

    def _joined_header(self, name: str) -> str | None:
        """Return the values of a header that may be given several times."""
        values = self.headers.get_all(name)
        return None if values is None else ", ".join(values)

    def _parsed(self, raw: bytes) -> Fields:
        """Parse a body. While Python's parser is at work, nobody else is, so large ones take turns."""
        if len(raw) < _LARGE_BODY:
            return parse_body(raw)
        self._had_large_body = True
        with held_in_turn(_LARGE_PARSING):
            return parse_body(raw)

    def _body_length(self) -> int | None:
        """Return the length of the body, None if it comes in chunks."""
        headers = {name.lower(): ", ".join(set(self.headers.get_all(name, []))) for name in self.headers}
        if (coding := self._joined_header("transfer-encoding")) is not None:
            headers["transfer-encoding"] = coding
            if self.request_version != "HTTP/1.1":
                raise InvalidRequest("Transfer-Encoding belongs to HTTP/1.1.")
        length = body_length(headers, self.server.limits.max_body_bytes)
        if length is None and not is_chunked(headers):
            raise LengthRequired("The request needs Content-Length, or Transfer-Encoding: chunked.")
        return length

    def _refuse(self, error: RequestError) -> None:
        """Refuse a request that the engine has not seen, and tell the terminal and the status page."""
        self._note_refusal(
            Refusal(
                tenant=self._tenant_of_refused(error),
                method=self.command,
                path=self.path.partition("?")[0],
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
        """Return whose request it is; None if it was not let in, so that it is nobody's."""
        if isinstance(error, Unauthorized | Forbidden):
            return None
        return self._tenant()

    def _send_error_body(self, error: RequestError) -> None:
        if self._stream_begun:
            # The status was sent while the model was loaded, without which the request could not be checked.
            self._stream_begun.send([self._dialect.stream_refusal(error, self._request_id)])
            self._stream_begun.end()
        else:
            self._send_json(error.status, self._dialect.refusal(error, self._request_id), error.headers)

    def _send_page(self, page: HtmlPage) -> None:
        self._send_body(200, {**page.headers, "Content-Length": str(len(page.body))}, page.body)

    def _send_json(
        self, status: int, payload: Mapping[str, Json], extra: Mapping[str, str] | None = None
    ) -> None:
        body = json.dumps(payload, ensure_ascii=False).encode()
        self._send_body(status, {**_headers("application/json", body), **(extra or {})}, body)

    def _send_body(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        if self._unread_body or self.close_connection:
            headers = {**headers, "Connection": "close"}
        self._send_head(status, headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        method = self.command if self.command in _METHODS else "other"
        if not self.server.is_starting:
            self.server.context.prometheus.note_response(pattern(self.path), method, status)
        self.send_response(status)
        self.send_header(self._dialect.id_header, self._request_id)
        if self._answering:
            self.send_header(ANSWERING_MODEL, in_a_header(self._answering))
        if self._unenforced:
            self.send_header(UNENFORCED, self._unenforced)
        asked = self._lower_headers() if self.command else {}
        for name, value in {**headers, **self._origins.headers(asked)}.items():
            self.send_header(name, value)
        self.end_headers()

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

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in http.server
        """Do nothing. The service logs requests, because it knows their outcome."""


def _headers(content_type: str, body: bytes) -> dict[str, str]:
    return {"Content-Type": content_type, "Content-Length": str(len(body))}
