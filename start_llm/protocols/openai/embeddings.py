"""Implements the request and the reply of POST /v1/embeddings."""

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.chat import Json
from start_llm.core.sampling import Range
from start_llm.protocols.base import ModelFacts
from start_llm.protocols.fields import Fields
from start_llm.protocols.generation_fields import token_ids

_MOST_INPUTS = 2048
_ENCODINGS = ("float", "base64")

type EmbeddingInput = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to make vectors of.

    Attributes:
        as_base64: vectors are sent as float32 numbers in base64, as the official SDKs ask for them.
        dimensions: numbers of a vector to keep; None: all.
    """

    inputs: tuple[EmbeddingInput, ...]
    as_base64: bool
    dimensions: int | None


def parse(body: Fields, model: ModelFacts) -> EmbeddingRequest:
    """Parse a request for embeddings.

    Raises:
        InvalidRequest: names the field that is wrong.
    """
    if body.value("adapter") not in (None, "none"):
        raise body.fail("adapter", "must be none: vectors are the base model's")
    encoding = body.text("encoding_format") or "float"
    if encoding not in _ENCODINGS:
        raise body.fail("encoding_format", f"must be one of {', '.join(_ENCODINGS)}")
    dimensions = body.integer("dimensions", Range(1, 2**20))
    return EmbeddingRequest(_inputs(body, model.card.vocabulary), encoding == "base64", dimensions)


def _inputs(body: Fields, vocabulary: int) -> tuple[EmbeddingInput, ...]:
    """Read a text, token ids, or a list of texts or of lists of token ids."""
    value, path = body.value("input"), body.path_of("input")
    if isinstance(value, list) and value and isinstance(value[0], int):
        return (token_ids(value, path, vocabulary),)
    items = value if isinstance(value, list) else [value]
    if not items or len(items) > _MOST_INPUTS:
        raise body.fail("input", f"must have 1 to {_MOST_INPUTS} texts")
    inputs = list[EmbeddingInput]()
    for place, item in enumerate(items):
        if isinstance(item, str) and item:
            inputs.append(item)
        elif isinstance(item, list) and item:
            inputs.append(token_ids(item, f"{path}[{place}]", vocabulary))
        else:
            raise body.fail("input", "must be a text, token ids, or a list of either, and none may be empty")
    return tuple(inputs)


def reply_body(
    request: EmbeddingRequest, vectors: Sequence[Sequence[float]], model: str, tokens: int
) -> dict[str, Json]:
    """Return the reply with one vector for each input, in order."""
    data: list[Json] = [
        {"object": "embedding", "index": index, "embedding": _encoded(_shortened(vector, request), request)}
        for index, vector in enumerate(vectors)
    ]
    usage: dict[str, Json] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _shortened(vector: Sequence[float], request: EmbeddingRequest) -> Sequence[float]:
    """Keep the first numbers, and give what is left the length that the vector had."""
    if request.dimensions is None or request.dimensions == len(vector):
        return vector
    kept = vector[: request.dimensions]
    length = math.hypot(*kept)
    return [number * math.hypot(*vector) / length for number in kept] if length else kept


def _encoded(vector: Sequence[float], request: EmbeddingRequest) -> Json:
    if request.as_base64:
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
    return list(vector)
