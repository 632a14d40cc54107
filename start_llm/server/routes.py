"""Maps request paths to endpoints.

GET and HEAD never load or evict a model, ask anybody or write: a web page can send them without an Origin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from urllib.parse import parse_qsl, unquote

from start_llm.core.chat import GenerationRequest, Json
from start_llm.core.errors import MethodNotAllowed, NotFound, RequestError
from start_llm.core.request_target import hint_about, with_one_version
from start_llm.protocols import tokenization
from start_llm.protocols.anthropic import messages as anthropic_messages
from start_llm.protocols.anthropic.errors import anthropic_refusal
from start_llm.protocols.base import KeptResponses, Parser, SSEFrame, openai_refusal
from start_llm.protocols.explained import explanation_body
from start_llm.protocols.fields import Fields
from start_llm.protocols.openai import chat as openai_chat
from start_llm.protocols.openai import completions as openai_completions
from start_llm.protocols.responses import create as openai_responses
from start_llm.protocols.responses.listing import input_items
from start_llm.server import model_pages
from start_llm.server.activity_pages import ActivityPages
from start_llm.server.adapter_pages import AdapterPages
from start_llm.server.embedding_page import embeddings
from start_llm.server.library_pages import LibraryPages, LibraryRequest, Page
from start_llm.server.served_models import ServedModel, ServedModels
from start_llm.service import Service

type Ask = Callable[[Service, GenerationRequest], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The reply conventions of a group of paths. They also apply to requests that are refused unread.

    Attributes:
        id_header: name of the header with the request's id.
        refusal: returns the body of an error, for a request with this id.
        stream_refusal: returns the event of an error, if the stream began while the model was loaded.
    """

    id_header: str
    refusal: Callable[[RequestError, str], Mapping[str, Json]]
    stream_refusal: Callable[[RequestError, str], SSEFrame]


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
class ModelRoute:
    """An endpoint that a model answers without a reply of tokens. Its fields come from a body."""

    answer: Callable[[Fields, ServedModel], Mapping[str, Json]]
    has_body: bool = True
    query: str = ""


@dataclass(frozen=True, slots=True)
class StoredRoute:
    """An endpoint that reads or changes a tenant's stored responses."""

    render: Callable[[KeptResponses], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class StatusRoute:
    """An endpoint about the models that are served: returns a status code and a JSON body.

    Attributes:
        takes_time: a model may be loaded or unloaded, so the server waits for it when it stops.
        as_anthropic: what clients of Anthropic's protocol get in its place, if that is something else.
    """

    render: Callable[[ServedModels], tuple[int, Mapping[str, Json]]]
    takes_time: bool = False
    as_anthropic: Callable[[ServedModels], tuple[int, Mapping[str, Json]]] | None = None


@dataclass(frozen=True, slots=True)
class MetricsRoute:
    """The endpoint that Prometheus scrapes."""


@dataclass(frozen=True, slots=True)
class LibraryRoute:
    """An endpoint about models on disk. Its fields come from the query, or from a body."""

    answer: Callable[[LibraryPages, LibraryRequest], Page]
    has_body: bool = False
    query: str = ""


@dataclass(frozen=True, slots=True)
class AdapterRoute:
    """An endpoint about adapters. Its fields come from the query, or from a body."""

    answer: Callable[[AdapterPages, Fields], Page]
    has_body: bool = False
    query: str = ""


@dataclass(frozen=True, slots=True)
class ActivityRoute:
    """An endpoint about the activity that a tenant may see. Its fields come from the query."""

    answer: Callable[[ActivityPages, bytes, Fields], Page]
    has_body: bool = False
    query: str = ""


@dataclass(frozen=True, slots=True)
class BrowserRoute:
    """The status page for a browser, and something else for other clients."""

    otherwise: StatusRoute


def _count(wire: GenerateRoute, told: Callable[[int], Mapping[str, Json]]) -> QueryRoute:
    """Return the endpoint that counts the prompt tokens of such a request."""
    return QueryRoute(wire, lambda service, request: told(service.count(request)))


OPENAI = Dialect(
    "x-request-id",
    refusal=lambda error, _: openai_refusal(error),
    stream_refusal=lambda error, _: SSEFrame(openai_refusal(error)),
)
_ANTHROPIC = Dialect(
    "request-id",
    refusal=anthropic_refusal,
    stream_refusal=lambda error, name: SSEFrame(anthropic_refusal(error, name), event="error"),
)
_OF_RESPONSES = Dialect(
    OPENAI.id_header,
    refusal=lambda error, _: openai_responses.refusal(error),
    stream_refusal=lambda error, _: openai_responses.refused_stream(error),
)

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
_TOKENIZE = QueryRoute(
    GenerateRoute("/tokenize", tokenization.parse),
    lambda service, request: tokenization.tokens_body(service.tokens(request), service.window),
)
_MODELS = StatusRoute(model_pages.model_list, as_anthropic=model_pages.anthropic_model_list)

_ACTIVITY = "/activity"
_DOWNLOADS = "/downloads"
_FIT = "/fit"
_ADAPTERS = "/v1/adapters"

type FieldsRoute = LibraryRoute | AdapterRoute | ModelRoute | ActivityRoute
type PostRoute = GenerateRoute | QueryRoute | ModelRoute | LibraryRoute | AdapterRoute
type ReadRoute = StatusRoute | LibraryRoute | AdapterRoute | ActivityRoute | BrowserRoute | MetricsRoute
type Endpoint = PostRoute | StoredRoute | ReadRoute
POST_ROUTES: Mapping[str, PostRoute] = {
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
    _TOKENIZE.wire.path: _TOKENIZE,
    "/v1/embeddings": ModelRoute(embeddings),
    "/embeddings": ModelRoute(embeddings),
    "/detokenize": ModelRoute(lambda body, model: tokenization.text_body(body, model.facts)),
    _FIT: LibraryRoute(LibraryPages.fit_on_hub, has_body=True),
    _DOWNLOADS: LibraryRoute(LibraryPages.start, has_body=True),
    _ADAPTERS: AdapterRoute(AdapterPages.mount, has_body=True),
}
STATUS_ROUTES: Mapping[str, ReadRoute] = {
    "/": BrowserRoute(StatusRoute(model_pages.greeting)),
    "/api/hello": StatusRoute(model_pages.greeting),
    "/health": StatusRoute(model_pages.health),
    "/stats": StatusRoute(model_pages.stats),
    "/metrics": MetricsRoute(),
    _ACTIVITY: ActivityRoute(ActivityPages.overview),
    "/v1/models": _MODELS,
    "/models": _MODELS,
    "/library": LibraryRoute(LibraryPages.models),
    _FIT: LibraryRoute(LibraryPages.fit),
    _DOWNLOADS: LibraryRoute(LibraryPages.downloads),
    _ADAPTERS: AdapterRoute(AdapterPages.listed),
}
_ONE_DOWNLOAD = re.compile(rf"{_DOWNLOADS}/(?P<name>[^/]+)(?P<action>/pause|/resume)?")
_MODEL_PREFIX = "/v1/models/"
_ONE_MODEL = re.compile("(?P<name>.+?)(?P<action>/load|/unload)?", re.DOTALL)
_RESPONSE_PREFIXES = ("/v1/responses/", "/responses/")
_INPUT_ITEMS = "/input_items"
NAMED_PATHS = (_MODEL_PREFIX, f"{_ACTIVITY}/", f"{_DOWNLOADS}/", f"{_ADAPTERS}/", *_RESPONSE_PREFIXES)
"""How the paths begin that go on with a name."""
_DIALECTS: Mapping[str, Dialect] = {
    "/v1/messages": _ANTHROPIC,
    "/v1/responses": _OF_RESPONSES,
    "/responses": _OF_RESPONSES,
}
"""Dialects by path. Each also applies to all paths below."""
_READING = ("GET", "HEAD")
_LONGEST_MEANT, _LIKENESS = 100, 0.75


KEYLESS_PATHS = frozenset({"/", "/api/hello", "/health"})
"""Paths that need no key: health checks may have none, and these paths reveal nothing else."""


def requires_key(target: str) -> bool:
    """Return True if a request with this target needs a key."""
    return _path(target) not in KEYLESS_PATHS


def _path(target: str) -> str:
    """Return the path of a target; a slash at its end does not matter."""
    return target.partition("?")[0].rstrip("/") or "/"


def pattern(target: str) -> str:
    """Return the pattern of a target's path; `other` for what no endpoint has, so that there are few."""
    path = _path(target)
    if target and (path in POST_ROUTES or path in STATUS_ROUTES):
        return path
    return next((f"{prefix}{{id}}" for prefix in NAMED_PATHS if path.startswith(prefix)), "other")


def dialect(target: str) -> Dialect:
    """Return the dialect of replies to this target, even if the path does not exist."""
    path = with_one_version(target.partition("?")[0])
    found = (one for root, one in _DIALECTS.items() if path == root or path.startswith(f"{root}/"))
    return next(found, OPENAI)


def find(method: str, target: str) -> Endpoint:
    """Return the endpoint for a request line. A trailing slash does not matter.

    Raises:
        NotFound: no such path.
        MethodNotAllowed: the path exists, but not for this method.
    """
    path, query = _path(target), target.partition("?")[2]
    endpoints = _endpoints(path, query)
    if not endpoints:
        raise NotFound(f"There is nothing at {path}.{hint_about(path) or _meant(path)}")
    if method not in endpoints:
        allowed = tuple(endpoints)
        raise MethodNotAllowed(f"{path} answers {' and '.join(allowed)}, not {method}.", allowed=allowed)
    return endpoints[method]


def _meant(path: str) -> str:
    """Return which endpoints were meant, most likely; of an unlike path where they are listed."""
    known = list({**POST_ROUTES, **STATUS_ROUTES})
    longer = [one for one in known if one.startswith(f"{path}/")]
    meant = longer or get_close_matches(path[:_LONGEST_MEANT], known, n=1, cutoff=_LIKENESS)
    return f" Did you mean {meant[0]}?" if meant else " docs/api.md lists the endpoints; most begin with /v1."


def _endpoints(path: str, query: str) -> Mapping[str, Endpoint]:
    """Return the endpoints of a path, by method."""
    page = STATUS_ROUTES.get(path)
    if isinstance(page, LibraryRoute | AdapterRoute | ActivityRoute):
        page = replace(page, query=query)
    found: dict[str, Endpoint] = dict.fromkeys(_READING, page) if page else {}
    if path in POST_ROUTES:
        found["POST"] = POST_ROUTES[path]
    if found:
        return found
    return (
        _one_model(path)
        or _one_download(path)
        or _one_adapter(path, query)
        or _one_request(path)
        or _one_response(path, query)
    )


def _one_request(path: str) -> Mapping[str, Endpoint]:
    """Return the endpoint of what differs in a request that was read again."""
    name = unquote(path.removeprefix(f"{_ACTIVITY}/"))
    if not path.startswith(f"{_ACTIVITY}/") or "/" in name:
        return {}
    return dict.fromkeys(_READING, ActivityRoute(lambda pages, tenant, _: pages.difference(tenant, name)))


def _one_download(path: str) -> Mapping[str, Endpoint]:
    """Return the endpoints of a download."""
    match = _ONE_DOWNLOAD.fullmatch(path)
    if match is None:
        return {}
    name = unquote(match["name"])
    answers: Mapping[str | None, tuple[str, Callable[[LibraryPages, LibraryRequest, str], Page]]] = {
        None: ("DELETE", LibraryPages.remove),
        "/pause": ("POST", LibraryPages.pause),
        "/resume": ("POST", LibraryPages.resume),
    }
    method, answer = answers[match["action"]]
    return {method: LibraryRoute(lambda pages, request: answer(pages, request, name))}


def _one_adapter(path: str, query: str) -> Mapping[str, Endpoint]:
    """Return the endpoint of an adapter."""
    name = unquote(path.removeprefix(f"{_ADAPTERS}/"))
    if not path.startswith(f"{_ADAPTERS}/") or "/" in name:
        return {}
    return {"DELETE": AdapterRoute(lambda pages, asked: pages.unmount(asked, name), query=query)}


def _one_model(path: str) -> Mapping[str, Endpoint]:
    """Return the endpoints of a model. Its name may have a slash."""
    if not path.startswith(_MODEL_PREFIX):
        return {}
    match = _ONE_MODEL.fullmatch(path.removeprefix(_MODEL_PREFIX))
    if match is None:
        return {}
    name, action = unquote(match["name"]), match["action"]
    if action is None:
        one = StatusRoute(
            lambda models: model_pages.one_model(models, name),
            as_anthropic=lambda models: model_pages.anthropic_model(models, name),
        )
        return dict.fromkeys(_READING, one)
    change = model_pages.load_model if action == "/load" else model_pages.unload_model
    return {"POST": StatusRoute(lambda models: change(models, name), takes_time=True)}


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
    if "/" in quoted or hint_about(path):
        return {}
    told = StoredRoute(lambda context: openai_responses.stored_body(context, name))
    return dict.fromkeys(_READING, told) | {
        "DELETE": StoredRoute(lambda context: openai_responses.deletion_body(context, name))
    }
