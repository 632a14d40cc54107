"""Read how a model folder makes one vector of a text, in the format of sentence-transformers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from start_llm.core.chat import Json
from start_llm.core.errors import ModelError
from start_llm.models.model_names import name_of

type PoolingMode = Literal["lasttoken", "mean"]

_CONFIG = Path("1_Pooling") / "config.json"
_MODES: dict[str, PoolingMode] = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
}
_MARK = "embedding"
_BOTH_WAYS = {"use_bidirectional_attention": True, "is_causal": False}
"""Keys of a config that say that tokens attend to later ones (EmbeddingGemma, GTE-Qwen2). In Gemma 4 the
first one is "vision": there that applies to images alone.
"""
_BOTH_WAYS_BY_NAME = "Gemma3TextModel"
"""Architecture of EmbeddingGemma, whose conversions may have lost the key."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden states [tokens, hidden] of a text become one vector.

    Attributes:
        normalizes: the vector gets the length 1.
    """

    mode: PoolingMode
    normalizes: bool


def pooling_in(folder: Path, config: Mapping[str, Json]) -> Pooling | None:
    """Return the pooling of an embedding model; None for any other model.

    Conversions for MLX often lack the files of sentence-transformers. Then a folder whose name contains
    `embedding` is one that takes the last token, as causal embedding models do.

    Args:
        config: of config.json.

    Raises:
        ModelError: the model does something to its vectors that is not supported, or its tokens attend to
            later ones, which mlx_lm's networks cannot do.
    """
    pooling = _read(folder / _CONFIG, dict)
    is_named = _MARK in name_of(folder).lower()
    _refuse_both_ways(folder, config, is_embedding=pooling is not None or is_named)
    if pooling is None:
        return Pooling("lasttoken", normalizes=True) if is_named else None
    modes = [name for name, is_on in pooling.items() if name.startswith("pooling_mode_") and is_on is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        named = ", ".join(modes) or "none"
        raise ModelError(f"{folder / _CONFIG} asks for {named}; {' or '.join(_MODES)} alone is supported.")
    modules = _read(folder / "modules.json", list) or []
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    if others := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ModelError(f"{folder / 'modules.json'} has a module {others[0]}, which is not supported.")
    return Pooling(_MODES[modes[0]], normalizes="Normalize" in kinds)


def _refuse_both_ways(folder: Path, config: Mapping[str, Json], *, is_embedding: bool) -> None:
    text_config = config.get("text_config")
    merged = {**config, **text_config} if isinstance(text_config, dict) else config
    reason = next(
        (f"{key} is {merged[key]}" for key, value in _BOTH_WAYS.items() if merged.get(key) is value), ""
    )
    architectures = merged.get("architectures")
    is_unsaid = all(merged.get(key) is None for key in _BOTH_WAYS)
    if is_embedding and is_unsaid and architectures == [_BOTH_WAYS_BY_NAME]:
        reason = f"it is an embedding model of the architecture {_BOTH_WAYS_BY_NAME}"
    if reason:
        raise ModelError(
            f"The model in {folder} lets tokens attend to later ones ({reason}). mlx_lm would compute it as "
            "a causal model, and its vectors would be wrong. Qwen3-Embedding is a causal embedding model."
        )


def _read(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, kind):
        raise ModelError(f"{path} has something else than sentence-transformers writes there.")
    return content
