"""Tells from a config which of a model's layers see all tokens, a window of them, or keep a state."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from start_llm.core.errors import ModelError

type Config = Mapping[str, Any]
type Kind = Literal["full", "window", "chunk", "state"]
type Kinds = tuple[Kind, ...]
"""What one layer is; several if it is of two kinds, none if it keeps nothing."""


def layer_count(text: Config) -> int:
    """Return the number of layers.

    Raises:
        KeyError: the config does not give it.
        ModelError: it is absurd; lists of that length would be made.
    """
    names = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")
    count = first_number(text, *names)
    if count > _MOST_LAYERS:
        raise ModelError(f"config.json gives {count:,} layers; at most {_MOST_LAYERS:,} are believed.")
    return count


def first_number(text: Config, *names: str) -> int:
    """Return the first of these keys that is a number from 1 on.

    Raises:
        KeyError: none is.
    """
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise KeyError(names[0])


def kinds_of_layers(text: Config) -> Sequence[Kinds]:
    """Return the kinds of each layer: one or two; none for a layer that keeps nothing.

    Raises:
        KeyError: a number is missing.
        ModelError: there are too many layers.
    """
    count = layer_count(text)
    return next(kinds for rule in _RULES if (kinds := rule(text, count)) is not None)


_FULL: Kinds = ("full",)
_MOST_LAYERS = 10_000

type _Rule = Callable[[Config, int], Sequence[Kinds] | None]


def _letters(text: Config, _count: int) -> Sequence[Kinds] | None:
    """Nemotron H: a letter for each layer."""
    pattern = text.get("hybrid_override_pattern")
    if not pattern:
        return None
    return [_LETTERS.get(letter, ()) for letter in pattern]


_LETTERS: Mapping[str, Kinds] = {"M": ("state",), "*": ("full",)}


def _all_alike(text: Config, count: int) -> Sequence[Kinds] | None:
    by_type: Mapping[str, Kinds] = {
        **dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), ("state",)),
        "falcon_h1": ("state", "full"),
    }
    kinds = by_type.get(text["model_type"])
    return [kinds] * count if kinds else None


def _listed_linear(text: Config, count: int) -> Sequence[Kinds] | None:
    """Kimi Linear: lists of layer numbers from 1."""
    linear = text.get("linear_attn_config")
    if not isinstance(linear, dict) or not linear.get("kda_layers"):
        return None
    return [("state",) if index + 1 in linear["kda_layers"] else ("full",) for index in range(count)]


def _every(text: Config, count: int) -> Sequence[Kinds] | None:
    """Qwen3-Next, Qwen3.5 and Jamba: one attention layer in so many."""
    if text.get("linear_num_value_heads") and text.get("full_attention_interval"):
        every, at = text["full_attention_interval"], text["full_attention_interval"] - 1
    elif text.get("attn_layer_period"):
        every, at = text["attn_layer_period"], text["attn_layer_offset"]
    else:
        return None
    return [("full",) if index % every == at else ("state",) for index in range(count)]


def _chunked(text: Config, count: int) -> Sequence[Kinds] | None:
    """Llama 4: three layers that see a chunk, then one that sees all."""
    if not text["model_type"].startswith("llama4") or not text.get("attention_chunk_size"):
        return None
    if text["model_type"] == "llama4_text" and text.get("no_rope_layers") and "text_config" not in text:
        return [_FULL] * count
    return [("full",) if (index + 1) % 4 == 0 else ("chunk",) for index in range(count)]


_WORDS: Mapping[str, Kinds] = {
    **dict.fromkeys(("sliding_attention", "sliding_window"), ("window",)),
    **dict.fromkeys(("linear_attention", "mamba", "conv", "recurrent"), ("state",)),
}


def _named(text: Config, _count: int) -> Sequence[Kinds] | None:
    """A word for each layer, as most newer configs have it."""
    words = text.get("layer_types")
    if not words or text["model_type"] in _WINDOWS_NOT_HELD:
        return None
    return [_WORDS.get(word, ("full",)) for word in words]


def _patterned(text: Config, count: int) -> Sequence[Kinds] | None:
    """Gemma 3, Cohere 2 and Exaone 4: the last layer of each pattern sees all tokens."""
    pattern = text.get("sliding_window_pattern")
    if not pattern or not window_of(text) or text["model_type"] in _WINDOWS_NOT_HELD:
        return None
    if isinstance(pattern, str):
        return [("window",) if pattern[index % len(pattern)] == "L" else ("full",) for index in range(count)]
    return [("full",) if index % pattern == pattern - 1 else ("window",) for index in range(count)]


def _numbered(text: Config, _count: int) -> Sequence[Kinds] | None:
    """MiMo V2: 1 for a layer with a window."""
    numbers = text.get("hybrid_layer_pattern")
    return [("window",) if number == 1 else ("full",) for number in numbers] if numbers else None


def _plain(_text: Config, count: int) -> Sequence[Kinds]:
    return [_FULL] * count


_RULES: tuple[_Rule, ...] = (
    *(_letters, _all_alike, _listed_linear, _every, _chunked, _named, _patterned, _numbered),
    _plain,
)
_WINDOWS_NOT_HELD = frozenset(
    {"gemma2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "smollm3", "starcoder2"}
)
"""Types whose configs may speak of windows, although mlx_lm keeps all tokens."""


def window_of(text: Config) -> int:
    return int(text.get("sliding_window") or text.get("sliding_window_size") or 0)
