"""Names who answers each endpoint of `protocols/routes`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from start_llm.access.accept_header import prefers_html
from start_llm.core.chat import GenerationRequest, Json
from start_llm.protocols import tokenization
from start_llm.protocols.anthropic import messages as anthropic_messages
from start_llm.protocols.base import Parser
from start_llm.protocols.explained import explanation_body
from start_llm.protocols.fields import Fields
from start_llm.protocols.openai import chat_completions as openai_chat
from start_llm.protocols.openai import completions as openai_completions
from start_llm.protocols.receipts import warmed_body
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.responses import create as openai_responses
from start_llm.protocols.responses import stored_responses
from start_llm.server import model_pages
from start_llm.server.activity_pages import ActivityPages
from start_llm.server.adapter_pages import AdapterPages
from start_llm.server.embedding_page import embeddings
from start_llm.server.library_pages import LibraryPages
from start_llm.server.listener import ServerContext
from start_llm.server.page_request import Document, Page, PageRequest
from start_llm.server.served_models import ServedModel, ServedModels
from start_llm.server.status_page import status_page
from start_llm.serving.service import Service


@dataclass(frozen=True, slots=True)
class GenerateEndpoint:
    """Generates a reply."""

    parse: Parser


@dataclass(frozen=True, slots=True)
class QueryEndpoint:
    """Takes the body of an endpoint that generates, and answers without computing anything."""

    parse: Parser
    answer: Callable[[Service, GenerationRequest], Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """Is answered by the model that the body names, without a reply of tokens.

    Attributes:
        answer: returns the body of the answer, by the fields, the model, and the tenant and the key's digest.
        computes: what it computes counts as a request of its key.
    """

    answer: Callable[[Fields, ServedModel, bytes, bytes], Mapping[str, Json]]
    computes: bool


@dataclass(frozen=True, slots=True)
class PageEndpoint:
    """Is answered by the server."""

    answer: Callable[[ServerContext, PageRequest], Page | Document]


type Endpoint = GenerateEndpoint | QueryEndpoint | ModelEndpoint | PageEndpoint


def _activity(answer: Callable[[ActivityPages, PageRequest], Page]) -> PageEndpoint:
    return PageEndpoint(lambda context, request: answer(context.activity_pages, request))


def _adapters(answer: Callable[[AdapterPages, PageRequest], Page]) -> PageEndpoint:
    return PageEndpoint(lambda context, request: answer(context.adapters, request))


def _library(answer: Callable[[LibraryPages, PageRequest], Page]) -> PageEndpoint:
    return PageEndpoint(lambda context, request: answer(context.library, request))


def _models(answer: Callable[[ServedModels, PageRequest], Page]) -> PageEndpoint:
    return PageEndpoint(lambda context, request: answer(context.models, request))


def _status(answer: Callable[[ServedModels], Page]) -> PageEndpoint:
    return PageEndpoint(lambda context, _: answer(context.models))


def _stored(answer: Callable[[ResponseStore, bytes, str], Mapping[str, Json]]) -> PageEndpoint:
    return PageEndpoint(
        lambda context, request: (200, answer(context.responses, request.tenant, request.name))
    )


def _count(parse: Parser, body_of: Callable[[int], Mapping[str, Json]]) -> QueryEndpoint:
    return QueryEndpoint(parse, lambda service, request: body_of(service.count(request)))


def _explain(parse: Parser) -> QueryEndpoint:
    return QueryEndpoint(parse, lambda service, request: explanation_body(service.explain(request)))


def _warm(body: Fields, model: ServedModel, tenant: bytes, key: bytes) -> Mapping[str, Json]:
    return warmed_body(model.service.warm(tenant, body.texts("programs"), key))


def _front(context: ServerContext, request: PageRequest) -> Page | Document:
    """Return the status page for a browser, and a greeting for other clients."""
    if prefers_html(request.headers.get("accept", "")):
        return status_page(asks_key=bool(context.access_policy.keys))
    return model_pages.greeting(context.models)


def _metrics(context: ServerContext, request: PageRequest) -> Document:
    content_type, body = context.prometheus.exposition(request.headers.get("accept", ""))
    return Document(body, {"Content-Type": content_type})


ENDPOINTS: Mapping[str, Endpoint] = {
    "POST /v1/chat/completions": GenerateEndpoint(openai_chat.parse),
    "POST /v1/completions": GenerateEndpoint(openai_completions.parse),
    "POST /v1/messages": GenerateEndpoint(anthropic_messages.parse),
    "POST /v1/messages/count_tokens": _count(anthropic_messages.parse_count, anthropic_messages.count_json),
    "POST /v1/responses": GenerateEndpoint(openai_responses.parse),
    "POST /v1/responses/input_tokens": _count(
        openai_responses.parse, openai_responses.input_token_count_body
    ),
    "GET /v1/responses/{id}": _stored(stored_responses.stored_body),
    "DELETE /v1/responses/{id}": _stored(stored_responses.deletion_body),
    "GET /v1/responses/{id}/input_items": PageEndpoint(
        lambda context, request: (
            200,
            stored_responses.input_items(context.responses, request.tenant, request.name, request.fields),
        )
    ),
    "GET /v1/models": _models(model_pages.model_list),
    "POST /v1/models/{id:path}/load": _models(model_pages.load_model),
    "POST /v1/models/{id:path}/unload": _models(model_pages.unload_model),
    "GET /v1/models/{id:path}": _models(model_pages.one_model),
    "GET /v1/adapters": _adapters(AdapterPages.listed),
    "POST /v1/adapters": _adapters(AdapterPages.mount),
    "DELETE /v1/adapters/{id}": _adapters(AdapterPages.unmount),
    "POST /v1/embeddings": ModelEndpoint(lambda body, model, *_: embeddings(body, model), computes=True),
    "POST /tokenize": QueryEndpoint(
        tokenization.parse,
        lambda service, request: tokenization.tokens_body(service.tokens(request), service.window),
    ),
    "POST /detokenize": ModelEndpoint(
        lambda body, model, *_: tokenization.text_body(body, model), computes=False
    ),
    "GET /health": _status(model_pages.health),
    "GET /stats": _status(model_pages.stats),
    "GET /metrics": PageEndpoint(_metrics),
    "GET /": PageEndpoint(_front),
    "GET /api/hello": _status(model_pages.greeting),
    "GET /activity": _activity(ActivityPages.overview),
    "GET /activity/{id}": _activity(ActivityPages.difference),
    "GET /library": _library(LibraryPages.models),
    "GET /fit": _library(LibraryPages.fit),
    "POST /fit": _library(LibraryPages.fit_on_hub),
    "GET /downloads": _library(LibraryPages.downloads),
    "POST /downloads": _library(LibraryPages.start),
    "POST /downloads/{id}/pause": _library(LibraryPages.pause),
    "POST /downloads/{id}/resume": _library(LibraryPages.resume),
    "DELETE /downloads/{id}": _library(LibraryPages.remove),
    "POST /v1/cache/warm": ModelEndpoint(_warm, computes=True),
    "POST /v1/cache/explain": _explain(openai_chat.parse),
    "POST /v1/cache/explain/messages": _explain(anthropic_messages.parse),
    "POST /v1/cache/explain/responses": _explain(openai_responses.parse),
}
"""By the names of their routes."""
