"""Reads `kv_config.json` of a model's folder: bits of KV by layer.

mlx-optiq writes the file, and mlx-bun reads it: `[{"layer_idx": 5, "bits": 4, "group_size": 64}, ...]`. A
layer that is not in it keeps its KV as it is.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

from start_llm.core.errors import ModelError

KV_CONFIG = "kv_config.json"
_BITS = (4, 8)
_GROUP_SIZES = (32, 64, 128)


class LayerBits(NamedTuple):
    """How one layer's KV is quantised.

    Attributes:
        layer: its index, from 0.
        group_size: elements that share a scale.
    """

    layer: int
    bits: int
    group_size: int


def read_kv_config(folder: Path, layers: int) -> list[LayerBits]:
    """Return what the file says of the layers in it, ascending.

    Args:
        layers: that the model has.

    Raises:
        ModelError: there is no such file, or it is wrong.
    """
    entries = sorted(_read(_json(folder / KV_CONFIG), layers))
    for entry, other in pairwise(entries):
        if entry.layer == other.layer:
            raise _wrong(f"layer {entry.layer} is in it twice")
    return entries


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"KV_BITS=config takes the bits of each layer from {KV_CONFIG} in the model's folder, and "
            f"{path.parent.name} has none. Set KV_BITS to 4 or 8, or leave it out."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(f"it cannot be read: {error}") from error


def _read(value: object, layers: int) -> Iterator[LayerBits]:
    if not isinstance(value, list) or not value:
        raise _wrong('it is no list of layers, such as [{"layer_idx": 0, "bits": 4, "group_size": 64}]')
    for place, entry in enumerate(cast("list[object]", value)):
        if not isinstance(entry, dict):
            raise _wrong(f"entry {place} is no object with layer_idx, bits and group_size")
        fields = cast("dict[str, Any]", entry)
        layer = _whole(fields, "layer_idx", place)
        if not 0 <= layer < layers:
            raise _wrong(
                f"entry {place} names layer {layer}; this model keeps KV in layers 0 to {layers - 1}"
            )
        bits = _one_of(fields, "bits", place, _BITS)
        yield LayerBits(layer, bits, _one_of(fields, "group_size", place, _GROUP_SIZES))


def _one_of(fields: dict[str, Any], name: str, place: int, allowed: tuple[int, ...]) -> int:
    value = _whole(fields, name, place)
    if value not in allowed:
        raise _wrong(f"entry {place} has {name} {value}; expected one of {', '.join(map(str, allowed))}")
    return value


def _whole(fields: dict[str, Any], name: str, place: int) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(f"entry {place} has no whole number as {name}")
    return value


def _wrong(what: str) -> ModelError:
    return ModelError(f"KV_BITS=config: {KV_CONFIG} of the model cannot be used: {what}.")
