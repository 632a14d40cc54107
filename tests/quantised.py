"""Tiny models in the forms in which models are published: quantised, and of 16 bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from start_llm.models import mlx_lm_utils

GROUP_SIZES = {"affine": 32, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}
BITS = {"mxfp4": 4, "mxfp8": 8, "nvfp4": 4}


def quantise(
    folder: Path, target: Path, *, bits: int = 4, mode: str = "affine", halves: bool = False
) -> Path:
    """Write a quantised copy of a model, as mlx_lm's converter does, and return it.

    Args:
        halves: everything else is bfloat16, as in most such models.
    """
    loaded: Any = mlx_lm_utils.load(str(folder), return_config=True)
    network, tokenizer, config = loaded
    if halves:
        network.set_dtype(mx.bfloat16)
        config["torch_dtype"] = "bfloat16"
    network, config = mlx_lm_utils.quantize_model(
        network, config, GROUP_SIZES[mode], BITS.get(mode, bits), mode=mode
    )
    mlx_lm_utils.save(target, folder, network, tokenizer, config)
    return target


def halve(folder: Path, target: Path) -> Path:
    """Write a copy of a model in bfloat16, and return it."""
    shutil.copytree(folder, target)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    halved = {name: values.astype(mx.bfloat16) for name, values in weights.items()}
    mx.save_safetensors(str(target / "model.safetensors"), halved, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return target
