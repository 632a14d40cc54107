"""Measures a model: bytes of weights, layers by kind of cache, context window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

if TYPE_CHECKING:
    from start_llm.core.chat import Json
    from start_llm.models.loader import LoadedModel

_OUTRIGHT = ("model_max_length", "max_sequence_length")
"""They win: Command R states 8,192 positions beside its 131,072 tokens, Vicuna 16k 4,096 beside 16,384."""
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "n_ctx"),
    *("max_seq_len", "seq_length", "max_context_length", "block_size"),
)
"""Most models; GPT-2, GPT-J, StarCoder, Phi; DBRX; the first Qwen, ChatGLM; OpenELM; Lille. The smallest
value counts: the first Qwen states 32,768 positions, which it reaches with a rotation that mlx_lm does not
have.
"""
_ROTATIONS = ("rope_scaling", "rope_parameters")
_YARN = ("yarn", "deepseek_yarn", "telechat3-yarn")


def model_type(config: Mapping[str, Json]) -> str:
    return str(config.get("model_type", "unknown"))


def weights_bytes(model: LoadedModel) -> int:
    """Return the bytes of all parameters, those of a vision tower included."""
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.network.parameters()))
    tower = model.vision.parameters.values() if model.vision else ()
    return sum(array.nbytes for array in (*(array for _, array in parameters), *tower))


def layer_counts(network: Any, words_of: Callable[[Any], str]) -> Mapping[str, int]:
    """Return the number of a network's caches by kind, without allocating anything.

    Args:
        words_of: returns the name of a cache's kind, as users know it.
    """
    caches: list[Any] = make_prompt_cache(network)
    return Counter(map(words_of, caches))


def context_window(config: Mapping[str, Json]) -> int | None:
    """Return the window that the config states, or the one that YaRN extends it to if that is longer.

    With YaRN some configs state the original window (Qwen: 32,768 positions, times 4), others the extended
    one (DeepSeek, gpt-oss). With other scalings they state the extended one: Llama 3.1, Phi's longrope, the
    linear scaling of Gemma 3 and DeepSeek Coder. vLLM has the same rule, except that it multiplies linear and
    dynamic scaling too; models for which that is right state `max_sequence_length`.
    """
    text_config = config.get("text_config")
    for place in (config, text_config if isinstance(text_config, dict) else {}):
        if window := _stated(place):
            return max([window, *_stretched(place)])
    return None


def _stated(place: Mapping[str, Json]) -> int | None:
    outright = list(_lengths(place, _OUTRIGHT))
    return outright[0] if outright else min(_lengths(place, _POSITIONS), default=None)


def _lengths(place: Mapping[str, Json], names: tuple[str, ...]) -> Iterator[int]:
    for name in names:
        value = place.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value


def _stretched(place: Mapping[str, Json]) -> Iterator[int]:
    """Yield the windows that YaRN extends to, for all layers or for one type of layer."""
    for name in _ROTATIONS:
        rotation = place.get(name)
        if not isinstance(rotation, dict):
            continue
        for parameters in (rotation, *rotation.values()):
            if (
                isinstance(parameters, dict)
                and (parameters.get("rope_type") or parameters.get("type")) in _YARN
            ):
                original, factor = (
                    parameters.get("original_max_position_embeddings"),
                    parameters.get("factor"),
                )
                if isinstance(original, int) and isinstance(factor, int | float):
                    yield int(original * factor)
