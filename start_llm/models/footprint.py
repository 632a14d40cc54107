"""What a model is made of: bytes of weights, layers by the kind of cache they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

if TYPE_CHECKING:
    from start_llm.core.chat import Json
    from start_llm.models.loader import LoadedModel

_KINDS = {
    "KVCache": "full attention",
    "RotatingKVCache": "sliding window",
    "ChunkedKVCache": "chunked attention",
    "ArraysCache": "recurrent state",
    "CacheList": "composite",
}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Facts for the start-up summary and `/stats`.

    Attributes:
        model_type: of config.json.
        weights_bytes: bytes of all parameters.
        layers: number of caches by kind, in the words of the field.
        context_window: longest sequence that the model was made for, in tokens; None if it does not say.
    """

    model_type: str
    weights_bytes: int
    layers: Mapping[str, int]
    context_window: int | None


def measure(model: LoadedModel) -> Footprint:
    """Read a loaded model's footprint; allocates nothing."""
    caches: list[Any] = make_prompt_cache(model.network)
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.network.parameters()))
    return Footprint(
        model_type=str(model.config.get("model_type", "unknown")),
        weights_bytes=sum(array.nbytes for _, array in parameters),
        layers=dict(Counter(_kind(cache) for cache in caches)),
        context_window=_context_window(model.config),
    )


def _kind(cache: Any) -> str:
    name = type(cache).__name__
    return _KINDS.get(name, name)


def _context_window(config: Mapping[str, Json]) -> int | None:
    text_config = config.get("text_config")
    for place in (config, text_config if isinstance(text_config, dict) else {}):
        value = place.get("max_position_embeddings")
        if isinstance(value, int) and value > 0:
            return value
    return None
