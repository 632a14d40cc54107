"""Maps request paths to endpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from start_llm.core.chat import GenerationRequest, Json
from start_llm.core.errors import MethodNotAllowed, NotFound, RequestError
from start_llm.protocols.anthropic import messages as anthropic_messages
from start_llm.protocols.anthropic.errors import anthropic_refusal
from start_llm.protocols.base import Parser, RequestContext, openai_refusal
from start_llm.protocols.explained import explanation_body
from start_llm.protocols.fields import Fields
from start_llm.protocols.openai import chat as openai_chat
from start_llm.protocols.openai import completions as openai_completions
from start_llm.protocols.responses import create as openai_responses
from start_llm.protocols.responses.listing import input_items
from start_llm.server.status import Status
from start_llm.service import Service

type Ask = Callable[[Service, GenerationRequest], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The reply conventions of a group of paths. They also apply to requests that are refused unread.

    Attributes:
        id_header: name of the header with the request's id.
        refusal: returns the body of an error, for a request with this id.
    """

    id_header: str
    refusal: Callable[[RequestError, str], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class GenerateRoute:
    """An endpoint that generates: its path and its body parser."""

    path: str
    parse: Parser


@dataclass(frozen=True, slots=True)
class QueryRoute:
    """An endpoint that accepts the same body as `wire` and answers without generating."""

    wire: GenerateRoute
    ask: Ask


@dataclass(frozen=True, slots=True)
class StoredRoute:
    """An endpoint that reads or changes a tenant's stored responses."""

    render: Callable[[RequestContext], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class StatusRoute:
    """An endpoint that reports status: returns a status code and a JSON body."""

    render: Callable[[Status], tuple[int, Mapping[str, Json]]]


def _count(wire: GenerateRoute, told: Callable[[int], Mapping[str, Json]]) -> QueryRoute:
    """Return the endpoint that counts the prompt tokens of such a request."""
    return QueryRoute(wire, lambda service, request: told(service.count(request)))


OPENAI = Dialect("x-request-id", lambda error, _: openai_refusal(error))
_ANTHROPIC = Dialect("request-id", anthropic_refusal)
_OF_RESPONSES = Dialect(OPENAI.id_header, lambda error, _: openai_responses.refusal(error))

_CHAT = GenerateRoute("/v1/chat/completions", openai_chat.parse)
_TEXT = GenerateRoute("/v1/completions", openai_completions.parse)
_MESSAGES = GenerateRoute("/v1/messages", anthropic_messages.parse)
_MESSAGE_TOKENS = _count(
    GenerateRoute("/v1/messages/count_tokens", anthropic_messages.parse_count),
    anthropic_messages.count_json,
)
_RESPONSES = GenerateRoute("/v1/responses", openai_responses.parse)
_RESPONSE_TOKENS = _count(_RESPONSES, openai_responses.input_token_count_body)
_EXPLAIN = QueryRoute(_CHAT, lambda service, request: explanation_body(service.explain(request)))
_MODELS = StatusRoute(Status.models)

type Endpoint = GenerateRoute | QueryRoute | StoredRoute | StatusRoute
POST_ROUTES: Mapping[str, GenerateRoute | QueryRoute] = {
    _CHAT.path: _CHAT,
    "/chat/completions": _CHAT,
    _TEXT.path: _TEXT,
    "/completions": _TEXT,
    _MESSAGES.path: _MESSAGES,
    _MESSAGE_TOKENS.wire.path: _MESSAGE_TOKENS,
    _RESPONSES.path: _RESPONSES,
    "/responses": _RESPONSES,
    f"{_RESPONSES.path}/input_tokens": _RESPONSE_TOKENS,
    "/responses/input_tokens": _RESPONSE_TOKENS,
    "/v1/cache/explain": _EXPLAIN,
}
STATUS_ROUTES: Mapping[str, StatusRoute] = {
    "/": StatusRoute(Status.greeting),
    "/api/hello": StatusRoute(Status.greeting),
    "/health": StatusRoute(Status.health),
    "/stats": StatusRoute(Status.stats),
    "/v1/models": _MODELS,
    "/models": _MODELS,
}
_MODEL_PREFIX = "/v1/models/"
_RESPONSE_PREFIXES = ("/v1/responses/", "/responses/")
_INPUT_ITEMS = "/input_items"
_DIALECTS: Mapping[str, Dialect] = {
    "/v1/messages": _ANTHROPIC,
    "/v1/responses": _OF_RESPONSES,
    "/responses": _OF_RESPONSES,
}
"""Dialects by path. Each also applies to all paths below."""
_READING = ("GET", "HEAD")


KEYLESS_PATHS = frozenset({"/", "/api/hello", "/health"})
"""Paths that need no key: health checks may have none, and these paths reveal nothing else."""


def requires_key(target: str) -> bool:
    """Return True if a request with this target needs a key."""
    return (target.partition("?")[0].rstrip("/") or "/") not in KEYLESS_PATHS


def dialect(target: str) -> Dialect:
    """Return the dialect of replies to this target, even if the path does not exist."""
    path = target.partition("?")[0]
    found = (one for root, one in _DIALECTS.items() if path == root or path.startswith(f"{root}/"))
    return next(found, OPENAI)


def find(method: str, target: str) -> Endpoint:
    """Return the endpoint for a request line. A trailing slash does not matter.

    Raises:
        NotFound: no such path.
        MethodNotAllowed: the path exists, but not for this method.
    """
    path, _, query = target.partition("?")
    path = path.rstrip("/") or "/"
    endpoints = _endpoints(path, query)
    if not endpoints:
        raise NotFound(f"There is nothing at {path}. Endpoints: {', '.join([*POST_ROUTES, *STATUS_ROUTES])}.")
    if method not in endpoints:
        allowed = tuple(endpoints)
        raise MethodNotAllowed(f"{path} answers {' and '.join(allowed)}, not {method}.", allowed=allowed)
    return endpoints[method]


def _endpoints(path: str, query: str) -> Mapping[str, Endpoint]:
    """Return the endpoints of a path, by method."""
    if path in POST_ROUTES:
        return {"POST": POST_ROUTES[path]}
    page = STATUS_ROUTES.get(path) or _one_model(path)
    return dict.fromkeys(_READING, page) if page else _one_response(path, query)


def _one_model(path: str) -> StatusRoute | None:
    if not path.startswith(_MODEL_PREFIX):
        return None
    name = unquote(path.removeprefix(_MODEL_PREFIX))
    return StatusRoute(lambda status: status.model(name))


def _one_response(path: str, query: str) -> Mapping[str, Endpoint]:
    """Return the endpoints of a stored response or of its input items."""
    prefix = next((prefix for prefix in _RESPONSE_PREFIXES if path.startswith(prefix)), None)
    if prefix is None:
        return {}
    quoted = path.removeprefix(prefix)
    name = unquote(quoted.removesuffix(_INPUT_ITEMS))
    if quoted.endswith(_INPUT_ITEMS):
        asked = Fields(dict(parse_qsl(query)))
        items = StoredRoute(lambda context: input_items(context, name, asked))
        return dict.fromkeys(_READING, items)
    if "/" in quoted:
        return {}
    told = StoredRoute(lambda context: openai_responses.stored_body(context, name))
    return dict.fromkeys(_READING, told) | {
        "DELETE": StoredRoute(lambda context: openai_responses.deletion_body(context, name))
    }
