"""Computes in float32 on a CPU, where memory allows: quantised weights are dequantised when they are loaded.

MLX's kernels for a CPU multiply float32 matrices with BLAS, and all others with plain loops. A step of Gemma
3 270M takes about ten times as long with 4-bit weights and 1.5 times as long in bfloat16, and 8 tokens of a
prompt 60 times and 4 times as long (`benchmarks precision --only float32`).
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from start_llm.models.device import Device
from start_llm.models.machines import gib

_SHARE = 0.5
"""Share of the memory budget that float32 weights may take. The rest is for KV, which doubles too."""
_QUANTISED = "Quantized"
_QUANTISED_FIELDS = frozenset({"weight", "scales", "biases", "global_scale", "group_size", "bits", "mode"})
_NARROW = (mx.bfloat16, mx.float16)
_SINGLE, _WORD_BITS = 4, 32
_PIECE = 1 << 24
"""Numbers that are dequantised at once. MLX takes about twice their memory beside the result."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The weights of a model, in what they are stored and in what they are computed with.

    Attributes:
        stored: in the words of the start, such as `4-bit` or `bfloat16`; `float32` if all are.
        float32_bytes: bytes of the weights if all are float32.
        is_converted: they are, and were not in the files.
    """

    stored: str = "float32"
    float32_bytes: int = 0
    is_converted: bool = False

    def notice(self, device: Device, most_bytes: int) -> str:
        """Return a sentence for the person who runs the server; empty if there is nothing to know.

        Args:
            most_bytes: see `compute_in_float32`.
        """
        if device.kind != "CPU" or self.stored == "float32":
            return ""
        if self.is_converted:
            return (
                f"The {self.stored} weights were converted to float32, with which a CPU computes faster. "
                f"They take {gib(self.float32_bytes)} (CPU_DEQUANTIZE=off: they stay as they are)."
            )
        reason = f"in float32 they would take {gib(self.float32_bytes)}, and {gib(most_bytes)} are allowed"
        return (
            f"The weights stay {self.stored}, with which a CPU computes slower than with float32: "
            f"{reason if most_bytes else 'CPU_DEQUANTIZE is off'}."
        )


AS_STORED = Precision()


def most_float32_bytes(device: Device, budget: int) -> int:
    """Return the bytes up to which weights are converted to float32; 0 if they never are.

    What is free at the moment does not matter, or else a start would not find the pages of an earlier one.

    Args:
        budget: bytes for weights, caches and computing together, when no other model is loaded.
    """
    return int(_SHARE * budget) if device.kind == "CPU" else 0


def compute_in_float32(network: Any, most_bytes: int) -> Precision:
    """Convert the weights of a network to float32, one layer after the other, if they then fit.

    Args:
        network: its weights need not be in memory yet.
        most_bytes: they are not converted if they would take more.
    """
    precision = Precision(_stored(network), _float32_bytes(network))
    if precision.stored == "float32" or precision.float32_bytes > most_bytes:
        return precision
    convert(network)
    mx.clear_cache()
    return Precision(precision.stored, precision.float32_bytes, is_converted=True)


def convert(network: Any, *, is_lazy: bool = False) -> None:
    """Convert the weights of a network to float32.

    Args:
        is_lazy: leave it to MLX to compute the new weights when they are needed.
    """
    modules = list(_quantised_modules(network))
    while modules:
        path, module, plain = modules.pop()
        made = _dequantised(module, plain, is_lazy=is_lazy)
        network.update_modules(tree_unflatten([(path, made)]))
        del module, made
    parameters = _parameters(network)
    while parameters:
        path, values = parameters.pop()
        if values.dtype in _NARROW:
            values = values.astype(mx.float32)
            network.update(tree_unflatten([(path, values)]))
        if not is_lazy:
            mx.eval(values)


def _parameters(network: Any) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(network.parameters()))


def _quantised_modules(network: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, module and class without quantisation of each quantised layer.

    mlx_lm and mlx_vlm name these classes after the plain ones, which stand beside them or in `mlx.nn`. Layers
    that have no plain class, such as those of three values, stay as they are.
    """
    for path, module in network.named_modules():
        name = type(module).__name__
        if _QUANTISED in name and "scales" in module:
            plain = name.replace(_QUANTISED, "")
            beside = sys.modules[type(module).__module__]
            if plain_class := getattr(beside, plain, None) or getattr(nn, plain, None):
                yield path, module, plain_class


def _dequantised(module: Any, plain: Any, *, is_lazy: bool) -> Any:
    made: Any = plain.__new__(plain)
    for name, value in (*vars(module).items(), *module.items()):
        if name not in _QUANTISED_FIELDS:
            setattr(made, name, value)
    made.weight = _weight(module) if is_lazy else _weight_in_pieces(module)
    return made


def _weight(module: Any, rows: slice | None = None) -> mx.array:
    """Return the weights of a quantised layer in float32, or some rows of [rows, columns].

    Scales of affine quantisation are float32 before they are used, so nothing is rounded.
    """
    packed = [module.weight, module.scales, module.get("biases")]
    if rows:
        packed = [None if array is None else array.reshape(-1, array.shape[-1])[rows] for array in packed]
    weight, *scales = packed
    scales = [
        array.astype(mx.float32) if array is not None and array.dtype in _NARROW else array
        for array in scales
    ]
    return mx.dequantize(
        weight,
        *scales,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        global_scale=getattr(module, "global_scale", None),
        dtype=mx.float32,
    )


def _weight_in_pieces(module: Any) -> mx.array:
    """Return the same, computed piece by piece into one array, without a second copy of all of it."""
    mx.eval(module.parameters())
    *outer, _ = module.weight.shape
    columns = _columns(module)
    rows, step = math.prod(outer), max(_PIECE // columns, 1)
    made = mx.zeros((rows, columns))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        made[piece] = _weight(module, piece)
        mx.eval(made)
    return made.reshape(*outer, columns)


def _columns(module: Any) -> int:
    return module.weight.shape[-1] * _WORD_BITS // module.bits


# ------------------------------------------------------------------------------------------------- in figures


def _float32_bytes(network: Any) -> int:
    """Return the bytes of the weights after a conversion."""
    quantised = {path: module for path, module, _ in _quantised_modules(network)}
    total = sum(
        _SINGLE * _columns(module) * math.prod(module.weight.shape[:-1]) for module in quantised.values()
    )
    for path, values in _parameters(network):
        layer, _, name = path.rpartition(".")
        if layer not in quantised or name not in _QUANTISED_FIELDS:
            total += values.size * _SINGLE if values.dtype in _NARROW else values.nbytes
    return total


def _stored(network: Any) -> str:
    """Return in what most weights are stored, as far as they can be converted; `float32` if none is left."""
    sizes = Counter[str]()
    quantised = {path: module for path, module, _ in _quantised_modules(network)}
    for module in quantised.values():
        sizes[f"{module.bits}-bit"] += module.weight.nbytes
    for path, values in _parameters(network):
        if path.rpartition(".")[0] not in quantised and values.dtype in _NARROW:
            sizes[str(values.dtype).removeprefix("mlx.core.")] += values.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"
