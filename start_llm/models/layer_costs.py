"""Computes a model's KV cache from its config.json alone: what each layer keeps, in bytes.

`layer_groups` gives the arithmetic that `engine.cost.measure_sequence` measures on a loaded model. Kinds of
layers differ in what they keep: keys and values of each token (`full attention`), of the last tokens
(`sliding window`, `chunked attention`), a latent of each token (`latent attention`), or a state that does not
grow (`recurrent state`). Sizes are those of mlx_lm's classes, in their names for config keys.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from start_llm.core.errors import ModelError
from start_llm.core.sequence_cost import SequenceCost, WindowCost
from start_llm.models.layer_kinds import Config, Kind, first_number, kinds_of_layers, window_of

_SINGLE = 4
"""Bytes of a float32 number. Recurrent states stay in float32, whatever the weights are."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same.

    Attributes:
        kind: what they keep, in the words of the start-up summary.
        count: number of such layers.
        token_bytes: of each layer, per token.
        window, window_bytes: number of the last tokens that each layer keeps, and bytes of each of these.
        state_bytes: of each layer, whatever the length.
        formula: the arithmetic of one layer.
    """

    kind: str
    count: int = 1
    token_bytes: int = 0
    window: int = 0
    window_bytes: int = 0
    state_bytes: int = 0
    formula: str = ""


_HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")


def head_counts(text: Config) -> tuple[int, ...]:
    """Return the numbers of heads that several machines divide among them.

    Args:
        text: config of the text model; see `text_config`.
    """
    return tuple(int(text[name]) for name in _HEADS if isinstance(text.get(name), int) and text[name])


def comes_out_even(heads: int, ranks: int) -> bool:
    """Return whether heads can be divided among ranks: each gets as many, or some share one."""
    return heads % ranks == 0 or ranks % heads == 0


def layer_groups(config: Config) -> tuple[LayerGroup, ...]:
    """Return the layers of a model that keep something, grouped.

    Args:
        config: content of config.json, with the defaults of mlx_lm's class; see `models.architecture`.

    Raises:
        ModelError: the arithmetic of this model type is not known, or the config lacks a number.
    """
    text = text_config(config)
    if text["model_type"] in _UNKNOWN:
        raise ModelError(f"What a {text['model_type']} model keeps for each token is not known beforehand.")
    try:
        kept = Counter(group for layer in _layers(text) for group in layer)
    except (KeyError, TypeError) as error:
        raise ModelError(f"config.json does not give what its layers keep: {error} is missing.") from error
    return tuple(replace(group, count=count) for group, count in kept.items())


def sequence_cost(groups: Sequence[LayerGroup]) -> SequenceCost:
    """Return the cost of one sequence in these layers."""
    return SequenceCost(
        token_bytes=sum(group.count * group.token_bytes for group in groups),
        windows=tuple(
            WindowCost(group.count * group.window_bytes, group.window) for group in groups if group.window
        ),
        state_bytes=sum(group.count * group.state_bytes for group in groups),
    )


def text_config(config: Config) -> dict[str, Any]:
    """Return the part of a config that describes the text model, with `model_type` of the whole."""
    inner = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), dict)), {})
    merged = {**config, **{key: value for key, value in inner.items() if value is not None}}
    if str(config.get("model_type")) in _PLAIN_WRAPPERS:
        merged["layer_types"] = None
    return merged | {"model_type": str(inner.get("model_type") or config.get("model_type", "unknown"))}


_TEXT_KEYS = ("text_config", "llm_config")
_PLAIN_WRAPPERS = frozenset({"mistral3", "llava"})
"""Types that mlx_lm gives plain caches, whatever windows their text model has."""


def keeps_latents(config: Config) -> bool:
    """Return True if keys and values of a token are kept as one latent (MLA).

    Args:
        config: see `layer_groups`.
    """
    return _has_latent(text_config(config))


def number_bytes(config: Config) -> int:
    """Return the bytes of one number of keys, values and activations."""
    stated = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return _SINGLE if str(stated).endswith("float32") else 2


def with_number_bytes(config: Config, count: int | None) -> dict[str, Any]:
    """Return the config with the type of numbers that the weights have; None leaves what it states."""
    if count is None:
        return dict(config)
    stated = {"torch_dtype": "float32" if count == _SINGLE else "bfloat16"}
    inner = {key: {**config[key], **stated} for key in _TEXT_KEYS if isinstance(config.get(key), dict)}
    return {**config, **inner, **stated}


_UNKNOWN = frozenset(
    """
    baichuan_m1 bailing_hybrid bailing_moe_linear bailing_moe_v3 deepseek_v41 gear iquestloopcoder kimi_k3
    longcat_flash longcat_flash_ngram minimax_m3_vl minimax_m3_vl_text nanbeige nemotron-nas olmo_hybrid
    openelm plamo2 recurrent_gemma rwkv7
    """.split()
)
"""Types that keep something of their own, which nothing here computes."""


def _layers(text: Config) -> Iterator[list[LayerGroup]]:
    """Yield what each layer keeps."""
    kinds = kinds_of_layers(text)
    shared = text.get("num_kv_shared_layers") or text.get("num_kv_reuse_layers") or 0
    for layer in kinds[: len(kinds) - shared]:
        yield [_KEPT[kind](text) for kind in layer]


# ---------------------------------------------------------------------------------------- what a layer keeps


def _head_dim(text: Config) -> int:
    if stated := text.get("head_dim") or text.get("kv_channels") or text.get("hidden_size_per_head"):
        return int(stated)
    return int(_hidden(text)) // _heads(text)


def _hidden(text: Config) -> int:
    return first_number(text, "hidden_size", "d_model", "n_embd", "model_dim", "hidden_dim")


def _heads(text: Config) -> int:
    return first_number(text, "num_attention_heads", "n_head", "n_heads", "num_heads")


def _kv_heads(text: Config) -> int:
    if text.get("multi_query"):
        return 1
    if text.get("n_shared_head"):
        return _heads(text) // int(text["n_shared_head"])
    nested = text.get("attn_config")
    if isinstance(nested, dict) and nested.get("kv_n_heads"):
        return int(nested["kv_n_heads"])
    names = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups")
    return first_number(text, *names) if any(text.get(name) for name in names) else _heads(text)


def _has_latent(text: Config) -> bool:
    """Whether keys and values are kept as one latent. Some older classes expand it first."""
    return bool(text.get("kv_lora_rank")) and text["model_type"] not in _EXPANDS_LATENT


_EXPANDS_LATENT = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})


def _full(text: Config) -> LayerGroup:
    size = number_bytes(text)
    if _has_latent(text):
        rank, rope, index = text["kv_lora_rank"], text["qk_rope_head_dim"], _index_numbers(text)
        numbers = rank + rope + index
        shown = f"({rank} + {rope}{f' + {index}' if index else ''}) x {size} bytes"
        return LayerGroup("latent attention", formula=shown, token_bytes=numbers * size)
    keys, values, heads = _widths(text)
    return LayerGroup(
        "full attention",
        formula=_formula(heads, keys, values, size),
        token_bytes=heads * (keys + values) * size,
    )


def _index_numbers(text: Config) -> int:
    """Return the numbers of a sparse attention's index of one token, as keys and values (DeepSeek V3.2)."""
    return 2 * int(text.get("index_head_dim") or 0) if text.get("index_topk") else 0


def _widths(text: Config) -> tuple[int, int, int]:
    """Return the width of a key and of a value, and the number of heads, of a layer that sees all tokens."""
    if text["model_type"] in _EXPANDS_LATENT:
        keys = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        return keys, int(text.get("v_head_dim") or _hidden(text) // _heads(text)), _heads(text)
    dim = int(text.get("global_head_dim") or _head_dim(text))
    heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
    return dim, int(text.get("v_head_dim") or dim), int(heads or _kv_heads(text))


def _formula(heads: int, keys: int, values: int, size: int) -> str:
    width = f"2 x {keys}" if keys == values else f"({keys} + {values})"
    return f"{heads} heads x {width} x {size} bytes"


def _windowed(text: Config) -> LayerGroup:
    size, heads = number_bytes(text), int(text.get("swa_num_key_value_heads") or _kv_heads(text))
    keys = int(text.get("swa_head_dim") or _head_dim(text))
    values = int(text.get("swa_v_head_dim") or keys)
    formula = f"{_formula(heads, keys, values, size)}, last {window_of(text):,} tokens"
    return LayerGroup(
        "sliding window", formula=formula, window=window_of(text), window_bytes=heads * (keys + values) * size
    )


def _chunk(text: Config) -> LayerGroup:
    size, heads, dim = number_bytes(text), _kv_heads(text), _head_dim(text)
    window = int(text["attention_chunk_size"])
    formula = f"{_formula(heads, dim, dim, size)}, last {window:,} tokens"
    return LayerGroup(
        "chunked attention", formula=formula, window=window, window_bytes=2 * heads * dim * size
    )


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """The numbers of a recurrent layer: those of its convolution, and those of its state."""

    convolved: int
    state: int
    is_single: bool = True


def _state(text: Config) -> LayerGroup:
    size = number_bytes(text)
    recurrence = next(made for rule in _RECURRENCES if (made := rule(text)) is not None)
    state_size = _SINGLE if recurrence.is_single else size
    formula = f"{recurrence.convolved:,} x {size} bytes"
    if recurrence.state:
        formula += f" + {recurrence.state:,} x {state_size} bytes"
    return LayerGroup(
        "recurrent state",
        formula=formula,
        state_bytes=recurrence.convolved * size + recurrence.state * state_size,
    )


def _gated_delta(text: Config) -> _Recurrence | None:
    if not text.get("linear_num_value_heads"):
        return None
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    convolved = (text["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
    return _Recurrence(convolved, values * text["linear_key_head_dim"])


def _kimi_delta(text: Config) -> _Recurrence | None:
    linear = text.get("linear_attn_config")
    if not isinstance(linear, dict):
        return None
    width = linear["num_heads"] * linear["head_dim"]
    return _Recurrence(3 * (linear["short_conv_kernel_size"] - 1) * width, width * linear["head_dim"])


def _short_convolution(text: Config) -> _Recurrence | None:
    kernel = text.get("conv_L_cache")
    return _Recurrence((kernel - 1) * _hidden(text), 0) if kernel else None


def _mamba2(text: Config) -> _Recurrence | None:
    if text["model_type"] not in _MAMBA2:
        return None
    heads = first_number(text, "mamba_n_heads", "mamba_num_heads", "num_heads")
    dim = first_number(text, "mamba_d_head", "mamba_head_dim", "head_dim")
    inner = text.get("mamba_d_ssm") or heads * dim
    kernel = first_number(text, "mamba_d_conv", "conv_kernel")
    states = first_number(text, "mamba_d_state", "ssm_state_size", "state_size")
    groups = first_number(text, "mamba_n_groups", "n_groups")
    return _Recurrence((kernel - 1) * (inner + 2 * groups * states), inner * states)


_MAMBA2 = frozenset({"mamba2", "granitemoehybrid", "falcon_h1", "nemotron_h"})


def _mamba(text: Config) -> _Recurrence:
    expands = text.get("mamba_expand")
    inner = expands * _hidden(text) if expands else text["intermediate_size"]
    kernel = first_number(text, "mamba_d_conv", "conv_kernel")
    states = first_number(text, "mamba_d_state", "state_size")
    return _Recurrence((kernel - 1) * inner, inner * states, is_single=False)


_RECURRENCES: tuple[Callable[[Config], _Recurrence | None], ...] = (
    *(_gated_delta, _kimi_delta, _short_convolution, _mamba2),
    _mamba,
)
_KEPT: Mapping[Kind, Callable[[Config], LayerGroup]] = {
    "full": _full,
    "window": _windowed,
    "chunk": _chunk,
    "state": _state,
}
