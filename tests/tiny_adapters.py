"""Build random LoRA adapters for the models of `scripts/tiny_models.py`, in mlx_lm's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from start_llm.models.loader import load

_NOISE = 0.05
_TRAINED = ("lora_a", "lora_b", "m")


def build(
    model: Path,
    folder: Path,
    seed: int,
    *,
    kind: str = "lora",
    rank: int = 4,
    parameters: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter for a model, and return its folder.

    Its dropout is large, so that a reply shows whether it is switched off.

    Args:
        kind: `lora` or `dora`.
        parameters: more of mlx_lm's `lora_parameters`, such as `keys`.
    """
    network = load(model).network
    chosen = {"rank": rank, "scale": 20.0, "dropout": 0.3, **(parameters or {})}
    layers = len(network.layers)
    linear_to_lora_layers(network, layers, dict(chosen), use_dora=kind == "dora")
    folder.mkdir(parents=True)
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": chosen}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(folder / "adapters.safetensors"), _weights(network, seed))
    return folder


def _weights(network: Any, seed: int) -> dict[str, mx.array]:
    named = cast("list[tuple[str, mx.array]]", tree_flatten(network.parameters()))
    key = mx.random.key(seed)
    weights: dict[str, mx.array] = {}
    for name, values in named:
        if name.rpartition(".")[2] in _TRAINED:
            key, own = mx.random.split(key)
            weights[name] = mx.random.normal(values.shape, key=own) * _NOISE + (
                values if name.endswith(".m") else 0
            )
    return weights
