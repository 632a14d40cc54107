"""Read how a model folder makes one vector of a text, in the format of sentence-transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from start_llm.core.errors import ModelError
from start_llm.models.download import name_of

type PoolingMode = Literal["lasttoken", "mean"]

_CONFIG = Path("1_Pooling") / "config.json"
_MODES: dict[str, PoolingMode] = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
}
_MARK = "embedding"


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden states [tokens, hidden] of a text become one vector.

    Attributes:
        normalizes: the vector gets the length 1.
    """

    mode: PoolingMode
    normalizes: bool


def pooling_in(folder: Path) -> Pooling | None:
    """Return the pooling of an embedding model; None for any other model.

    Conversions for MLX often lack the files of sentence-transformers. Then a folder whose name contains
    `embedding` is one that takes the last token, as causal embedding models do.

    Raises:
        ModelError: the model does something to its vectors that is not supported.
    """
    told = _read(folder / _CONFIG, dict)
    if told is None:
        return Pooling("lasttoken", normalizes=True) if _MARK in name_of(folder).lower() else None
    modes = [name for name, is_on in told.items() if name.startswith("pooling_mode_") and is_on is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        named = ", ".join(modes) or "none"
        raise ModelError(f"{folder / _CONFIG} asks for {named}; {' or '.join(_MODES)} alone is supported.")
    modules = _read(folder / "modules.json", list) or []
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules if isinstance(one, dict)]
    if others := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ModelError(f"{folder / 'modules.json'} has a module {others[0]}, which is not supported.")
    return Pooling(_MODES[modes[0]], normalizes="Normalize" in kinds)


def _read(path: Path, kind: type) -> Any:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(told, kind):
        raise ModelError(f"{path} has something else than sentence-transformers writes there.")
    return told
