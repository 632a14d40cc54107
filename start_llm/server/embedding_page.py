"""Answers POST /v1/embeddings. Texts make way for prompts that somebody waits for, for a while."""

import time
from collections.abc import Mapping, Sequence

from start_llm.core.chat import Json
from start_llm.core.client_presence import check_client
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.fields import Fields
from start_llm.protocols.openai.embeddings import EmbeddingInput, parse, reply_body
from start_llm.server.served_models import ServedEmbedder, ServedModel

_PATIENCE_S, _PATIENCE_OF_A_TEXT_S = 30.0, 1.0
"""Seconds for which a request makes way, in all and with each text: a search asks for one short text."""


def embeddings(asked: Fields, model: ServedModel) -> Mapping[str, Json]:
    """Return the vectors of all inputs.

    Raises:
        InvalidRequest: a field is wrong, the model is no embedding model, or a text is too long for it.
    """
    request = parse(asked, model)
    embedder = model.embedder
    if embedder is None:
        raise InvalidRequest(
            f"The model {model.card.id!r} makes no embeddings. Name an embedding model, such as one of "
            "MODEL_DIR.",
            param="model",
        )
    if request.dimensions is not None and request.dimensions > embedder.width:
        raise InvalidRequest(
            f"'dimensions' must be at most {embedder.width}, as many numbers as a vector has.",
            param="dimensions",
        )
    longest = min(model.card.context_window, embedder.longest)
    inputs = [_tokens(given, place, embedder, longest) for place, given in enumerate(request.inputs)]
    until = time.monotonic() + _PATIENCE_S
    vectors = [_vector(ids, embedder, until) for ids in inputs]
    return reply_body(request, vectors, model.card.id, sum(map(len, inputs)))


def _vector(ids: Sequence[int], embedder: ServedEmbedder, until: float) -> Sequence[float]:
    check_client()
    return embedder.embed(ids, min(max(until - time.monotonic(), 0.0), _PATIENCE_OF_A_TEXT_S))


def _tokens(given: EmbeddingInput, place: int, embedder: ServedEmbedder, longest: int) -> Sequence[int]:
    """Return the tokens of one input. One whose length proves that it is too long is not encoded."""
    if not isinstance(given, str):
        _demand_room(f"{len(given):,}", len(given), place, longest)
        return given
    fewest = embedder.fewest_tokens(given)
    _demand_room(f"at least {fewest:,}", fewest, place, longest)
    ids = embedder.tokens(given)
    _demand_room(f"{len(ids):,}", len(ids), place, longest)
    return ids


def _demand_room(amount: str, count: int, place: int, longest: int) -> None:
    if count > longest:
        raise InvalidRequest(
            f"'input[{place}]' has {amount} tokens; a text may have at most {longest:,}.",
            param=f"input[{place}]",
        )
