"""Tiny random networks of every model type that mlx_lm can build, whose answers depend on their caches."""

from __future__ import annotations

import copy
import importlib
import math
import zlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from benchmarks.model_configs import config_of

LAYER_GAIN = 2.0
"""Layers then outweigh the embedding of the last token: else a random network hears nothing of its prompt."""
HEAD_GAIN = 4.0
SLOW = ("A_log", "w_lora.lora.2.bias")
"""Logarithms of how fast a recurrent layer forgets: as they are made, nothing is left after forty tokens."""


def build(model_type: str, seed: int = 0) -> Any:
    """A network of mlx_lm's own class, in float32, from its tiny configuration."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(seed)
    network = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config_of(model_type))))
    parameters: Any = network.parameters()
    has_head = any("head" in name for name, _ in tree_flatten(parameters))

    def drawn(name: str, value: mx.array) -> mx.array:
        return _drawn(name, value, seed, embeds_too=not has_head)

    network.update(tree_map_with_path(drawn, parameters))
    network.eval()
    mx.eval(network.parameters())
    return network


def _drawn(name: str, value: mx.array, seed: int, *, embeds_too: bool) -> mx.array:
    """A matrix keeps the size of what it reads; vectors, norms and packed weights stay as they are made.

    But the norm after RWKV's state is made of zeros, and would let nothing through.
    """
    if name.endswith(SLOW):
        return mx.full(value.shape, -4.0)
    if name.endswith("g_norm.weight"):
        return mx.ones_like(value)
    if value.ndim < 2 or "norm" in name or not mx.issubdtype(value.dtype, mx.floating):
        return value
    key = mx.random.key(zlib.crc32(f"{seed} {name}".encode()))
    noise = mx.random.normal(value.shape, key=key).astype(value.dtype)
    if "emb" in name and not embeds_too:
        return noise
    fan_in = math.prod(value.shape[1:]) if "conv" in name else value.shape[-1]
    gain = HEAD_GAIN if "head" in name else LAYER_GAIN
    return noise * (gain / math.sqrt(fan_in))
