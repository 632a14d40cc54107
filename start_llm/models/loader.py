"""Loads a model folder. Runs on the engine thread, which then owns the arrays."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from start_llm.core.chat import Json
from start_llm.core.errors import ModelError
from start_llm.core.sampling import RANGES, SamplingChoice
from start_llm.models import mlx_lm_utils
from start_llm.models.float32 import AS_STORED, Precision, compute_in_float32
from start_llm.models.image_processor import DEFAULT_MAX_TOKENS
from start_llm.models.rank_group import RankGroup
from start_llm.models.rust_panics import panics_as_errors
from start_llm.models.tokenizer import Tokenizer
from start_llm.models.vision import Vision
from start_llm.models.vision_loader import Blind, Division, load_vision, shapes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadModel:
    """A model folder without its weights.

    Attributes:
        config: content of config.json.
        sampling: the model author's defaults, from generation_config.json.
    """

    tokenizer: Tokenizer
    config: Mapping[str, Json]
    sampling: SamplingChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ReadModel):
    """A model that is ready to run.

    Attributes:
        network: mlx_lm's module; `network(tokens[1, n], cache=...)` returns logits [1, n, vocabulary].
        vocabulary: width of the logits; at least the tokenizer's size, often padded.
        vision: reads images; None if the model has no eyes, or they cannot be used.
        blind_reason: why a model that has eyes does not use them, for the person who runs the server; else
            empty.
    """

    network: Any
    vocabulary: int
    precision: Precision = AS_STORED
    vision: Vision | None = None
    blind_reason: str = ""


def read(folder: Path) -> ReadModel:
    """Read everything except the weights.

    Raises:
        ModelError: the folder has no tokenizer that mlx_lm can load, or no config.
    """
    _require_model_folder(folder)
    try:
        config = cast("dict[str, Json]", mlx_lm_utils.load_config(folder))
        with panics_as_errors("The tokenizers library"):
            wrapper = mlx_lm_utils.load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
            tokenizer = _tokenizer(wrapper, folder)
    except Exception as error:
        # The libraries may raise anything, as in `load`.
        raise ModelError(f"The tokenizer in {folder} cannot be loaded: {_described(error)}") from error
    return ReadModel(tokenizer=tokenizer, config=config, sampling=author_sampling(folder))


def load(
    folder: Path,
    *,
    image_max_tokens: int = DEFAULT_MAX_TOKENS,
    most_float32_bytes: int = 0,
    ranks: RankGroup | None = None,
) -> LoadedModel:
    """Load weights and tokenizer, and run one token through the model.

    Code from the folder is never executed. A model whose vision tower cannot be used serves text.

    Args:
        image_max_tokens: see `models.image_processor.ImageProcessor`.
        most_float32_bytes: weights are converted to float32 if they then take no more; see `models.float32`.
        ranks: that compute the network together; each keeps its shard of the weights. None: this process
            computes all of it.

    Raises:
        ModelError: the folder is not a model that mlx_lm can run, or that these ranks can.
    """
    _require_model_folder(folder)
    try:
        with panics_as_errors("The tokenizers library"):
            network, wrapper, config = cast(
                "tuple[Any, Any, dict[str, Json]]",
                mlx_lm_utils.load(str(folder), lazy=True, return_config=True),
            )
            tokenizer = _tokenizer(wrapper, folder)
        precision = compute_in_float32(network, most_float32_bytes)
        division = _divided(network, config, ranks) if ranks else None
        mx.eval(network.parameters())
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        # The libraries may raise anything for a broken or unknown folder; the cause is chained. mlx_lm's olmo
        # ends the process if its package is missing.
        raise ModelError(f"The model in {folder} cannot be loaded: {_described(error)}") from error
    width = _logits_width(network, folder)
    vision, blind_reason = _eyes(folder, network, config, image_max_tokens, precision, division)
    return LoadedModel(
        network=network,
        tokenizer=tokenizer,
        config=config,
        vocabulary=width,
        sampling=author_sampling(folder),
        precision=precision,
        vision=vision,
        blind_reason=blind_reason,
    )


def _tokenizer(wrapper: Any, folder: Path) -> Tokenizer:
    """Return the tokenizer, with the template that older vision models keep in a file of their processor."""
    path = folder / "chat_template.json"
    if not wrapper.has_chat_template and path.is_file():
        processor = json.loads(path.read_text(encoding="utf-8"))
        wrapper._tokenizer.chat_template = str(processor["chat_template"])
        wrapper.has_chat_template = True
    return Tokenizer(wrapper)


def _divided(network: Any, config: Mapping[str, Json], ranks: RankGroup) -> Division:
    """Leave of a network the part that this rank computes, and return how it was divided."""
    whole = shapes_of(network)
    ranks.shard(network, config)
    return Division(ranks, whole)


def _eyes(
    folder: Path,
    network: Any,
    config: Mapping[str, Json],
    max_tokens: int,
    precision: Precision,
    division: Division | None,
) -> tuple[Vision | None, str]:
    """Load the vision tower. If there is none, or it cannot be used, return None and the reason."""
    if not config.get("vision_config"):
        return None, ""
    in_float32 = precision.is_converted
    try:
        return load_vision(folder, network, config, max_tokens, in_float32=in_float32, division=division), ""
    except Blind as reason:
        return None, str(reason)


def _require_model_folder(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json.")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{config} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{config} is not a JSON object.")


def _described(error: BaseException) -> str:
    """Return an error's message with its type: the message of a KeyError would be 'model_type' alone."""
    return f"{type(error).__name__}: {error}"


def _logits_width(network: Any, folder: Path) -> int:
    try:
        logits = network(mx.array([[0]]))
        mx.eval(logits)
    except Exception as error:
        raise ModelError(
            f"The model in {folder} loads, but cannot run one token: {_described(error)}"
        ) from error
    return int(logits.shape[-1])


def author_sampling(folder: Path) -> SamplingChoice:
    """Return the sampling defaults of generation_config.json, without values that are out of range."""
    try:
        given = cast("Json", json.loads((folder / "generation_config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        # The file is optional; mlx_lm ignores a missing one too.
        return SamplingChoice()
    if not isinstance(given, dict):
        return SamplingChoice()
    if given.get("do_sample") is False:
        return SamplingChoice(temperature=0)
    top_k = _in_range(given, "top_k")
    return SamplingChoice(
        temperature=_in_range(given, "temperature"),
        top_p=_in_range(given, "top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=_in_range(given, "min_p"),
        repetition_penalty=_in_range(given, "repetition_penalty"),
    )


def _in_range(given: Mapping[str, Json], name: str) -> float | None:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if value in RANGES[name] else None
