"""Loads the vision tower of a model folder beside the network of its text.

The text is mlx_lm's network; the tower, and the network for chunks of images, are mlx_vlm's. Both packages
have the same parameters for the text, so they share one set of arrays, and only the tower costs memory.
Both compute a few tokens, and the tower a blank image, before any image is served.

Runs on the engine thread, which owns the arrays.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from start_llm.core.chat import Json
from start_llm.models.divided_network import divide_alike, join_alike
from start_llm.models.float32 import convert
from start_llm.models.rank_group import RankGroup
from start_llm.models.vision import ImageFeatures, Vision, VisionOfRanks
from start_llm.models.vision_families import VISION_FAMILIES, blank, load_image_processor

_TEXT = "language_model."
_FOREIGN_CODE = frozenset({"auto_map", "model_file"})
_READ_BY_PROCESSORS = ("config.json", "tokenizer_config.json", "*processor_config.json")
_TRIED_IDS = tuple(range(5, 85, 5))
_MOST_DIFFERENCE = 0.5
"""Most difference of logits between both networks, in standard deviations: bfloat16 rounds to 1/256 in each
layer, and wrong parameters give more than 1.
"""


class Blind(Exception):
    """The folder's images cannot be served. The message is the reason."""


type Shapes = Mapping[str, tuple[tuple[int, ...], mx.Dtype]]
"""Shapes and types of parameters, by name."""


@dataclass(frozen=True, slots=True)
class Division:
    """A text network that several ranks have divided.

    Attributes:
        whole: its parameters before that.
    """

    ranks: RankGroup
    whole: Shapes


def shapes_of(network: Any) -> Shapes:
    """Return the shapes and types of a network's parameters."""
    return {name: (array.shape, array.dtype) for name, array in _named(network).items()}


def load_vision(
    folder: Path,
    network: Any,
    config: Mapping[str, Json],
    max_tokens: int,
    *,
    in_float32: bool = False,
    division: Division | None = None,
) -> Vision:
    """Load the tower of a folder beside the network of its text.

    Args:
        network: mlx_lm's, loaded from this folder.
        max_tokens: see `ImageProcessor`.
        in_float32: the weights of `network` were converted to float32; those of the tower are then, too.
        division: how `network` was divided; all ranks then call this together, and have eyes or none has.
            None: this process computes all of it.

    Raises:
        Blind: the folder's images cannot be served.
    """
    with _agreeing(division):
        vision = _load(folder, network, config, max_tokens, in_float32=in_float32, division=division)
    with _agreeing(division):
        _compare(vision.model, network)
        seen = _try(vision) if vision.runs_tower else None
    if isinstance(vision, VisionOfRanks):
        vision.learn_form(seen)
    return vision


@contextmanager
def _agreeing(division: Division | None) -> Generator[None]:
    """Fail on all ranks what fails on one of them.

    Raises:
        Blind: the block raised, here or on another rank.
    """
    reason, cause = "", None
    try:
        yield
    except Blind as blind:
        reason = str(blind)
    except Exception as error:  # noqa: BLE001 - the libraries may raise anything; the text can be served
        reason, cause = f"the vision tower cannot be loaded ({type(error).__name__}: {error})", error
    reasons = division.ranks.texts(reason) if division else [reason]
    for rank, stated in enumerate(reasons):
        if stated:
            raise Blind(f"on rank {rank}, {stated}" if rank else stated) from cause


def _load(
    folder: Path,
    network: Any,
    config: Mapping[str, Json],
    max_tokens: int,
    *,
    in_float32: bool,
    division: Division | None,
) -> Vision:
    """Load eyes that were not tried."""
    model_type = str(config.get("model_type"))
    family = VISION_FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted(VISION_FAMILIES))
        raise Blind(f"images are served for {known}, and this is {model_type}")
    if place := _foreign_code(folder):
        raise Blind(f"{place} names code of its own, which is never run")
    from mlx_vlm.utils import load_model  # noqa: PLC0415 - only a model with a tower needs it

    model = load_model(folder, lazy=True)
    if in_float32:
        convert(model, is_lazy=True)
    parameters = _share(model, network, division)
    processor = load_image_processor(family, folder, max_tokens)
    return (partial(VisionOfRanks, ranks=division.ranks) if division else Vision)(
        model,
        processor,
        parameters,
        reads_both_ways=family.reads_both_ways(config),
        moves_positions=processor.preprocess(blank()).grid is not None,
    )


def _foreign_code(folder: Path) -> str | None:
    """Return the file and the key by which a folder asks for its own code to be run: mlx_vlm would do it."""
    for pattern in _READ_BY_PROCESSORS:
        for path in sorted(folder.glob(pattern)):
            try:
                keys = _FOREIGN_CODE.intersection(_keys(json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, RecursionError):
                continue  # who reads it says so
            if keys:
                return f"{min(keys)} in {path.name}"
    return None


def _keys(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for key, value in cast("dict[str, Any]", content).items():
            yield key
            yield from _keys(value)
    elif isinstance(content, list):
        for value in cast("list[Any]", content):
            yield from _keys(value)


def _share(model: Any, network: Any, division: Division | None) -> Mapping[str, mx.array]:
    """Make mlx_vlm's network use the parameters of mlx_lm's, and return those of the tower, evaluated.

    Of several ranks only the first needs those.

    Raises:
        Blind: there is no tower, or the packages have different parameters for the text.
    """
    text, whole, own = _named(network), division.whole if division else shapes_of(network), _named(model)
    tied = {name: name.replace("lm_head", "model.embed_tokens") for name in own if "lm_head" in name}
    names = {name: name if name in whole else tied.get(name, name) for name in own if name.startswith(_TEXT)}
    strange = sorted(
        name for name, ours in names.items() if whole.get(ours) != (own[name].shape, own[name].dtype)
    )
    if strange:
        raise Blind(f"mlx_lm and mlx_vlm have different parameters for its text: {strange[0]}")
    tower = {
        name: array for name, array in own.items() if not name.startswith((_TEXT, "audio", "embed_audio"))
    }
    if not tower:
        raise Blind("the folder has no weights of a vision tower")
    if division:
        divide_alike(model.language_model, network.language_model)
    model.update(tree_unflatten([(name, text[ours]) for name, ours in names.items()]))
    if division:
        join_alike(model.language_model, network.language_model, division.ranks)
        if division.ranks.rank:
            return {}
    mx.eval(list(tower.values()))
    return tower


def _named(module: Any) -> dict[str, mx.array]:
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())))


def _compare(model: Any, network: Any) -> None:
    """Compare both networks on a few tokens.

    Raises:
        Blind: they compute different logits.
    """
    ids = mx.array([list(_TRIED_IDS)])
    ours = network(ids)
    mx.eval(ours)
    theirs = model.language_model(ids).logits
    worst = mx.abs(ours - theirs).max() / mx.maximum(mx.std(ours), 1e-6)
    if not cast("float", worst.item()) <= _MOST_DIFFERENCE:
        raise Blind("mlx_lm and mlx_vlm compute different logits for its text")


def _try(vision: Vision) -> ImageFeatures:
    """Look at a blank image, and return what the tower makes of it.

    Raises:
        Blind: the tower gives other tokens than the processor announces, or more than other ranks can get.
    """
    done = vision.processor.preprocess(blank())
    seen = vision.look(done.inputs, done.network_ids)
    if len(seen) != len(done.network_ids):
        raise Blind("its tower gives other tokens than its image processor announces")
    if seen.per_layer is not None and isinstance(vision, VisionOfRanks):
        raise Blind("several machines cannot pass on what each of its layers reads of an image")
    return seen
