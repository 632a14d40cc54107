"""Answers POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.fields import Fields
from start_llm.protocols.openai.embeddings import parse, reply_body
from start_llm.server.served_models import ServedModel


def embeddings(asked: Fields, model: ServedModel) -> Mapping[str, Json]:
    """Return the vectors of all inputs.

    Raises:
        InvalidRequest: a field is wrong, the model is no embedding model, or a text is too long for it.
    """
    request = parse(asked, model.facts)
    embedder = model.embedder
    if embedder is None:
        raise InvalidRequest(
            f"The model {model.facts.id!r} makes no embeddings. Name an embedding model, such as one of "
            "MODEL_DIR.",
            param="model",
        )
    if request.dimensions is not None and request.dimensions > embedder.width:
        raise InvalidRequest(
            f"'dimensions' must be at most {embedder.width}, as many numbers as a vector has.",
            param="dimensions",
        )
    inputs = [embedder.tokens(one) if isinstance(one, str) else list(one) for one in request.inputs]
    longest = min(model.status.card.context_window, embedder.longest)
    for place, ids in enumerate(inputs):
        if len(ids) > longest:
            raise InvalidRequest(
                f"'input[{place}]' has {len(ids):,} tokens; a text may have at most {longest:,}.",
                param=f"input[{place}]",
            )
    vectors = [embedder.embed(ids) for ids in inputs]
    return reply_body(request, vectors, model.facts.id, sum(map(len, inputs)))
