"""Which path answers what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from start_llm.core.chat import GenerationRequest, Json
from start_llm.core.errors import MethodNotAllowed, NotFound, RequestError
from start_llm.protocols import anthropic_messages, openai_chat, openai_completions, openai_responses
from start_llm.protocols.anthropic_errors import anthropic_refusal
from start_llm.protocols.base import Context, Parser, openai_refusal
from start_llm.protocols.explained import explained
from start_llm.protocols.fields import Fields
from start_llm.protocols.responses_list import input_items
from start_llm.server.status import Status
from start_llm.service import Service

type Ask = Callable[[Service, GenerationRequest], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the replies at some paths have in common, also those to requests that are never read.

    Attributes:
        id_header: tells the id of the request.
        refusal: the body of an error, for a request with this id.
    """

    id_header: str
    refusal: Callable[[RequestError, str], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Wire:
    """An endpoint that generates: the path to call it by, and how to read a body."""

    path: str
    parse: Parser


@dataclass(frozen=True, slots=True)
class Question:
    """An endpoint that takes what `wire` takes, and says something of it without computing anything."""

    wire: Wire
    ask: Ask


@dataclass(frozen=True, slots=True)
class Own:
    """An endpoint that shows or changes what is kept for a tenant, at once."""

    render: Callable[[Context], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Page:
    """An endpoint that tells: a status code and a JSON body, at once."""

    render: Callable[[Status], tuple[int, Mapping[str, Json]]]


def _count(wire: Wire, told: Callable[[int], Mapping[str, Json]]) -> Question:
    """How many tokens the prompt of such a request has."""
    return Question(wire, lambda service, request: told(service.count(request)))


OPENAI = Dialect("x-request-id", lambda error, _: openai_refusal(error))
_ANTHROPIC = Dialect("request-id", anthropic_refusal)
_OF_RESPONSES = Dialect(OPENAI.id_header, lambda error, _: openai_responses.refusal(error))

_CHAT = Wire("/v1/chat/completions", openai_chat.parse)
_TEXT = Wire("/v1/completions", openai_completions.parse)
_MESSAGES = Wire("/v1/messages", anthropic_messages.parse)
_MESSAGE_TOKENS = _count(
    Wire("/v1/messages/count_tokens", anthropic_messages.parse_count),
    anthropic_messages.count_json,
)
_RESPONSES = Wire("/v1/responses", openai_responses.parse)
_RESPONSE_TOKENS = _count(_RESPONSES, openai_responses.counted)
_EXPLAIN = Question(_CHAT, lambda service, request: explained(service.explain(request)))
_MODELS = Page(Status.models)

type Endpoint = Wire | Question | Own | Page
WIRES: Mapping[str, Wire | Question] = {
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
PAGES: Mapping[str, Page] = {
    "/": Page(Status.greeting),
    "/api/hello": Page(Status.greeting),
    "/health": Page(Status.health),
    "/stats": Page(Status.stats),
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
"""Of a path and all below it."""
_READING = ("GET", "HEAD")


OPEN = frozenset({"/", "/api/hello", "/health"})
"""They ask for no key: who looks whether a server is there may have none, and they tell nothing else."""


def asks_key(target: str) -> bool:
    """Whether who sends this request line has to have a key."""
    return (target.partition("?")[0].rstrip("/") or "/") not in OPEN


def dialect(target: str) -> Dialect:
    """What a reply to this request line is told in, whether or not anything is there."""
    path = target.partition("?")[0]
    found = (one for root, one in _DIALECTS.items() if path == root or path.startswith(f"{root}/"))
    return next(found, OPENAI)


def find(method: str, target: str) -> Endpoint:
    """The endpoint for a request line. A trailing slash does not matter.

    Raises:
        NotFound: no such path.
        MethodNotAllowed: the path exists, and answers other methods.
    """
    path, _, query = target.partition("?")
    path = path.rstrip("/") or "/"
    endpoints = _endpoints(path, query)
    if not endpoints:
        raise NotFound(f"There is nothing at {path}. Endpoints: {', '.join([*WIRES, *PAGES])}.")
    if method not in endpoints:
        allowed = tuple(endpoints)
        raise MethodNotAllowed(f"{path} answers {' and '.join(allowed)}, not {method}.", allowed=allowed)
    return endpoints[method]


def _endpoints(path: str, query: str) -> Mapping[str, Endpoint]:
    """What is at a path, by method."""
    if path in WIRES:
        return {"POST": WIRES[path]}
    page = PAGES.get(path) or _one_model(path)
    return dict.fromkeys(_READING, page) if page else _one_response(path, query)


def _one_model(path: str) -> Page | None:
    if not path.startswith(_MODEL_PREFIX):
        return None
    name = unquote(path.removeprefix(_MODEL_PREFIX))
    return Page(lambda status: status.model(name))


def _one_response(path: str, query: str) -> Mapping[str, Endpoint]:
    """A response that is kept, or what it answered."""
    prefix = next((prefix for prefix in _RESPONSE_PREFIXES if path.startswith(prefix)), None)
    if prefix is None:
        return {}
    quoted = path.removeprefix(prefix)
    name = unquote(quoted.removesuffix(_INPUT_ITEMS))
    if quoted.endswith(_INPUT_ITEMS):
        asked = Fields(dict(parse_qsl(query)))
        items = Own(lambda context: input_items(context, name, asked))
        return dict.fromkeys(_READING, items)
    if "/" in quoted:
        return {}
    told = Own(lambda context: openai_responses.kept(context, name))
    return dict.fromkeys(_READING, told) | {
        "DELETE": Own(lambda context: openai_responses.deleted(context, name))
    }
