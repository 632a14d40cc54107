"""Counts the bytes of a model's weights from the headers of its safetensors files, without their contents.

A header is a JSON object that gives name, type, shape and place of each tensor; its length stands in the
file's first eight bytes (https://huggingface.co/docs/safetensors/index#format).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from start_llm.core.errors import ModelError
from start_llm.models.layer_costs import number_bytes, text_config, with_number_bytes
from start_llm.models.layer_kinds import layer_count
from start_llm.models.vision_families import VISION_FAMILIES

_LONGEST_HEADER = 100 * 2**20
_DROPPED = re.compile(r"(^|\.)(audio_\w+|embed_audio|mtp)\.|inv_freq$")
"""Tensors that are never loaded: towers for sound, and draft heads."""
_TOWER = re.compile(r"(^|\.)(vision_\w+|visual|multi_modal_projector|embed_vision|aligner)\.")
"""Tensors of a vision tower, which is loaded if the model's images are served."""
_EXPERT = re.compile(r"\.(experts|switch_mlp|switch_glu)\.")
_SHARED_EXPERT = re.compile(r"shared_experts?\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embeddings?|tok_embeddings)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of a number, by what the format calls its type."""
_FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F16", "BF16"})
_FLOAT_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
"""Bytes of the numbers that a network computes with, by the type of its weights."""
_FLOAT32_BITS = 32
_PACKED = re.compile(r"(.*[._])(weight|qweight|blocks|scales|biases|qzeros|g_idx|global_scale)")
_PACKED_WEIGHTS = frozenset({"weight", "qweight", "blocks"})
"""Quantised weights, as MLX, GPTQ and AWQ, and gpt-oss name them."""
_USUAL_BITS = 4


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The bytes of a model's weights, as they lie in memory.

    Attributes:
        total: of all parameters that are loaded.
        experts: of routed experts, of which a token reads some.
        embeddings: of an input embedding that nothing else uses; a token reads one row of it.
        tower: of a vision tower, which only images read.
        number_bytes: of one number that the network computes with and keeps in its caches, as in weights that
            are not quantised, and in scales; None if the files do not tell.
        in_float32: the same once all weights are converted to float32; None if they are already.
    """

    total: int
    experts: int = 0
    embeddings: int = 0
    tower: int = 0
    number_bytes: int | None = None
    in_float32: WeightBytes | None = None

    def read_for_a_token(self, share_of_experts: float) -> int:
        """Return the bytes that one token reads."""
        return self.total - self.embeddings - self.tower - int(self.experts * (1 - share_of_experts))


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a header. `dtype` is the format's name of its type."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    dtype: str


def header(path: Path) -> Iterator[Tensor]:
    """Yield the tensors of a safetensors file.

    Raises:
        ModelError: the header is not whole, or none of this format.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= _LONGEST_HEADER:
                raise ModelError(f"{path} is no safetensors file: its header would have {size:,} bytes.")
            content = json.loads(file.read(size))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"The header of {path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"The header of {path} is no JSON object.")
    for name, entry in content.items():
        if name != "__metadata__":
            yield _tensor(path, name, entry)


def check_whole(path: Path) -> None:
    """Read the header of a safetensors file, and compare the file's size with it.

    Raises:
        ModelError: the file is not whole, or none of this format.
    """
    described = sum(tensor.nbytes for tensor in header(path))
    with path.open("rb") as file:
        begins = 8 + int.from_bytes(file.read(8), "little")
    missing = begins + described - path.stat().st_size
    if missing > 0:
        raise ModelError(f"{path} is not whole: {missing:,} bytes are missing, by its header.")


def _tensor(path: Path, name: str, entry: Any) -> Tensor:
    try:
        begin, end = entry["data_offsets"]
        tensor = Tensor(name, tuple(entry["shape"]), int(end) - int(begin), str(entry.get("dtype")))
        bits = _BITS.get(tensor.dtype)
        is_sound = all(type(size) is int and size >= 0 for size in tensor.shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"The header of {path} does not describe {name!r}.") from error
    if not is_sound or (bits and prod(tensor.shape) * bits != tensor.nbytes * 8):
        raise ModelError(
            f"The header of {path} gives {name!r} a shape that its {tensor.nbytes:,} bytes do not have."
        )
    return tensor


def weight_files(folder: Path) -> list[Path]:
    """Return the files that mlx_lm loads, in order."""
    return sorted(folder.glob("model*.safetensors"))


def weights_size(folder: Path) -> int:
    """Return the bytes of the files that mlx_lm loads; 0 for those that cannot be seen."""
    total = 0
    for path in weight_files(folder):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def missing_files(folder: Path) -> list[str]:
    """Return the weight files that the folder's index names, or any file, and that are not there."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        named = set(index["weight_map"].values())
    except OSError:
        return [] if weight_files(folder) else ["model.safetensors"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ["model.safetensors.index.json"]
    return sorted(str(name) for name in named if not (folder / str(name)).is_file())


def weights_in(folder: Path, config: Mapping[str, Any]) -> WeightBytes:
    """Return the bytes of a folder's weights.

    Raises:
        ModelError: a file is missing, or its header or the number of layers cannot be read.
    """
    if missing := missing_files(folder):
        raise ModelError(f"{folder} is not complete: it lacks {', '.join(missing[:3])}.")
    tensors = [tensor for path in weight_files(folder) for tensor in header(path)]
    return _with_float32(_sum(tensors, config), _sum(_in_float32(tensors, config), config))


def _with_float32(stored: WeightBytes, converted: WeightBytes) -> WeightBytes:
    return replace(stored, in_float32=converted) if converted.total > stored.total else stored


def _in_float32(tensors: Sequence[Tensor], config: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield tensors with the bytes that they have once they are converted to float32.

    Quantised ones are words that stand beside their scales, and those go.
    """
    scaled = {tensor.name.removesuffix("scales") for tensor in tensors if tensor.name.endswith("scales")}
    for tensor in tensors:
        part = _PACKED.fullmatch(tensor.name)
        if part is None or part[1] not in scaled:
            yield _as_float32(tensor)
        elif part[2] in _PACKED_WEIGHTS:
            nbytes = tensor.nbytes * _FLOAT32_BITS // _bits_of(part[1].rstrip("._"), config)
            yield replace(tensor, nbytes=nbytes, dtype="F32")


def _as_float32(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _FLOATS:
        return tensor
    return replace(tensor, nbytes=tensor.nbytes * _FLOAT32_BITS // _BITS[tensor.dtype], dtype="F32")


def _bits_of(layer: str, config: Mapping[str, Any]) -> int:
    """Return the bits of the weights of a quantised layer, of which config.json may name some one by one."""
    scheme = quantization(config)
    own = scheme.get(layer)
    bits = (own if isinstance(own, dict) else scheme).get("bits")
    return bits if isinstance(bits, int) and bits > 0 else _USUAL_BITS


def _sum(tensors: Iterable[Tensor], config: Mapping[str, Any]) -> WeightBytes:
    layers = _layer_count(config)
    tied, loads_tower = is_tied(config), sees(config)
    total = experts = embeddings = tower = 0
    numbers = Counter[str]()
    for tensor in tensors:
        if _TOWER.search(tensor.name):
            tower += tensor.nbytes if loads_tower else 0
            continue
        if _is_dropped(tensor.name, layers) or (tied and "lm_head." in tensor.name):
            continue
        total += tensor.nbytes
        numbers[tensor.dtype] += prod(tensor.shape)
        if _EXPERT.search(tensor.name) and not _SHARED_EXPERT.search(tensor.name):
            experts += tensor.nbytes
        if _EMBEDDING.search(tensor.name) and not tied:
            embeddings += tensor.nbytes
    return WeightBytes(total + tower, experts, embeddings, tower, number_bytes_of(numbers))


def number_bytes_of(numbers: Mapping[str, int]) -> int | None:
    """Return the bytes of a number that a network computes with, from how many weights are of which type.

    Converters change the weights and leave `torch_dtype` in the config as it was. Some norms and biases may
    be of another type than the rest, so the most frequent type counts.
    """
    floats = {dtype: count for dtype, count in numbers.items() if dtype in _FLOAT_BYTES and count}
    return _FLOAT_BYTES[max(floats, key=floats.__getitem__)] if floats else None


def sees(config: Mapping[str, Any]) -> bool:
    """Return True if the images of such a model are served."""
    return bool(config.get("vision_config")) and str(config.get("model_type")) in VISION_FAMILIES


def _layer_count(config: Mapping[str, Any]) -> int:
    try:
        return layer_count(text_config(config))
    except KeyError as error:
        raise ModelError(f"config.json does not give {error}.") from error


def _is_dropped(name: str, layers: int) -> bool:
    number = _LAYER.search(name)
    return bool(_DROPPED.search(name)) or (number is not None and int(number[1]) >= layers)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return True if the input embedding is also the output's matrix."""
    return bool(text_config(config).get("tie_word_embeddings"))


# ------------------------------------------------------------------------------------------- from the config


def is_quantised(config: Mapping[str, Any]) -> bool:
    return bool(quantization(config))


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how the weights are quantised; empty if they are not."""
    scheme = config.get("quantization") or config.get("quantization_config")
    return scheme if isinstance(scheme, dict) else {}


def bits_per_weight(config: Mapping[str, Any]) -> float:
    """Return the bits of one weight, with its share of scales and biases: 4.5 for 4 bits in groups of 64."""
    scheme = quantization(config)
    if not isinstance(scheme.get("bits"), int):
        return 8.0 * number_bytes(text_config(config))
    group = int(scheme.get("group_size") or 64)
    scale_and_bias = 2 * 8 * number_bytes(text_config(config))
    extra = scale_and_bias if str(scheme.get("mode", "affine")) == "affine" else 8
    return scheme["bits"] + extra / group


def in_float32(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a model whose weights are converted to float32."""
    left = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    return with_number_bytes(left, _FLOAT32_BITS // 8)


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a model: how many each layer has, how many a token reads, and their numbers."""

    each_layer: int
    active: int
    parameters: int

    @property
    def share(self) -> float:
        return self.active / self.each_layer


def routed_experts(config: Mapping[str, Any]) -> Experts | None:
    """Return the routed experts, from the config; None for a dense model."""
    text = text_config(config)
    each = _first(text, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    active = _first(
        text,
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "top_k_experts",
    )
    width = _first(text, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    if each <= 1 or not active or not width:
        return None
    return Experts(
        each, min(active, each), _expert_layers(text) * each * 3 * _first(text, "hidden_size") * width
    )


def _first(text: Mapping[str, Any], *names: str) -> int:
    return int(next((text[name] for name in names if isinstance(text.get(name), int) and text[name]), 0))


def _expert_layers(text: Mapping[str, Any]) -> int:
    """Return the number of layers with experts."""
    layers, every = layer_count(text), text.get("decoder_sparse_step") or text.get("moe_layer_freq") or 1
    if isinstance(every, list):
        return sum(1 for has_experts in every if has_experts)
    every = text.get("interleave_moe_layer_step") or every
    dense: set[int] = set(text.get("mlp_only_layers") or ())
    first = int(text.get("first_k_dense_replace") or 0)
    return sum(1 for index in range(first, layers) if (index + 1) % every == 0 and index not in dense)


def weights_of_size(
    total: int, config: Mapping[str, Any], stored_number_bytes: int | None = None
) -> WeightBytes:
    """Return the bytes of weights of which only the sum is known, with the config's share of experts.

    Args:
        stored_number_bytes: see `WeightBytes.number_bytes`.
    """
    config = with_number_bytes(config, stored_number_bytes)
    converted = int(total * _FLOAT32_BITS / bits_per_weight(config))
    return _with_float32(
        _weights_of_size(total, config, stored_number_bytes),
        _weights_of_size(converted, in_float32(config), _FLOAT32_BITS // 8),
    )


def _weights_of_size(total: int, config: Mapping[str, Any], stored_number_bytes: int | None) -> WeightBytes:
    text, bits = text_config(config), bits_per_weight(config)
    experts = routed_experts(config)
    embeddings = 0 if is_tied(config) else _first(text, "vocab_size") * _first(text, "hidden_size")
    return WeightBytes(
        total,
        min(int((experts.parameters if experts else 0) * bits / 8), total),
        min(int(embeddings * bits / 8), total),
        number_bytes=stored_number_bytes,
    )
