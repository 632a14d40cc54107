"""Asks mlx_lm which architectures it has, and completes a config with the defaults of its class."""

import pkgutil
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx_lm.models

from start_llm.models import mlx_lm_utils

_CLASSES = ("TextModelArgs", "TextArgs", "TextConfig", "ModelArgs")
"""Names of the classes with a text model's defaults, the narrowest first."""
_MODEL_OF = re.compile(r"(?:from \.|language_model = )(\w+)(?: import Model\b|\.Model\()")
"""The module of which another one takes the model."""


def is_supported(config: Mapping[str, Any]) -> bool:
    """Return True if mlx_lm has this architecture, and no code of the model's own is needed."""
    return bool(config.get("model_type")) and not config.get("model_file") and _name(config) in _names()


def is_divisible(config: Mapping[str, Any]) -> bool:
    """Return True if mlx_lm can divide this architecture, or the text network in it, among machines."""
    return is_supported(config) and _name(config) in _divisible_names()


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the defaults that mlx_lm's class has for missing keys.

    Configs of multimodal models often give only what differs: Gemma 3 leaves out its number of heads.
    """
    if not is_supported(config):
        return dict(config)
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return _defaults(_name(config)) | _set(config)
    inner_name = _name({**inner, "model_type": inner.get("model_type", "")})
    defaults = _defaults(inner_name if inner_name in _names() else _name(config))
    return {**config, "text_config": defaults | _set(inner)}


def _set(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _name(config: Mapping[str, Any]) -> str:
    """Return the module of mlx_lm that runs this architecture."""
    kind = str(config.get("model_type"))
    architectures = config.get("architectures") or ()
    for architecture in architectures if isinstance(architectures, list) else (architectures,):
        if (kind, str(architecture)) in mlx_lm_utils.MODEL_ARCHITECTURE_REMAPPING:
            return mlx_lm_utils.MODEL_ARCHITECTURE_REMAPPING[kind, str(architecture)]
    return mlx_lm_utils.MODEL_REMAPPING.get(kind, kind)


@cache
def _names() -> frozenset[str]:
    """Return the modules that define a model. Their text is read: importing one takes time, or fails."""
    return frozenset(name for name, text in _modules().items() if "\nclass ModelArgs" in text)


@cache
def _divisible_names() -> frozenset[str]:
    """Return the modules whose model has `shard`, or one of another module, by inheritance or as its text."""
    modules = _modules()
    own = {name for name, text in modules.items() if "\n    def shard(" in text}
    return frozenset(own | {name for name, text in modules.items() if own & set(_MODEL_OF.findall(text))})


@cache
def _modules() -> Mapping[str, str]:
    """Return the text of each module of mlx_lm's models."""
    folder = Path(next(iter(mlx_lm.models.__path__)))
    names = (module.name for module in pkgutil.iter_modules([str(folder)]))
    return {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in names}


@cache
def _defaults(name: str) -> dict[str, Any]:
    """Return the defaults of an architecture's text model; {} if its module cannot be imported."""
    try:
        model, _ = mlx_lm_utils._get_classes({"model_type": name})  # pyright: ignore[reportPrivateUsage]
    except (ValueError, ImportError, SystemExit):
        # olmo ends the process if its package is missing.
        return {}
    module = sys.modules[model.__module__]
    made = next(
        (getattr(module, name) for name in _CLASSES if is_dataclass(getattr(module, name, None))), None
    )
    return (
        {field.name: field.default for field in fields(made) if field.default is not MISSING} if made else {}
    )
