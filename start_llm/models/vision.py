"""Loads the vision tower of a model folder, and computes images into the caches of the text network.

The text is mlx_lm's network; the tower, and the network for chunks of images, are mlx_vlm's. Both packages
have the same parameters for the text, so they share one set of arrays, and only the tower costs memory. A
chunk of text goes through mlx_lm's network as in any other model. A chunk of an image goes through
mlx_vlm's, on the same caches.

Runs on the engine thread, which owns the arrays.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from start_llm.core.chat import Json
from start_llm.models.divided_network import divide_alike, join_alike
from start_llm.models.float32 import convert
from start_llm.models.image_processor import ImageProcessor, Inputs
from start_llm.models.rank_group import RankGroup
from start_llm.models.vision_families import VISION_FAMILIES, blank, load_image_processor

# mlx_vlm is imported where it is used: only a model with a vision tower needs it.
# ruff: noqa: PLC0415

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


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the tower makes of one image.

    Attributes:
        embeddings: [1, tokens, hidden].
        layers: for the first layers of the network what is added behind each, [tokens, hidden]; may be empty.
        per_layer: [1, tokens, layers, width] of networks that read the tokens in each layer; else None.
    """

    embeddings: mx.array
    layers: tuple[mx.array, ...]
    per_layer: mx.array | None

    def __len__(self) -> int:
        return self.embeddings.shape[1]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.embeddings, *self.layers, *([] if self.per_layer is None else [self.per_layer])]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class ImageChunk(NamedTuple):
    """Tokens `start` to `end` of an image.

    Attributes:
        network_ids: of these tokens.
        positions: three positions for each, [3][tokens]; None for networks that take the place in the cache.
    """

    start: int
    end: int
    network_ids: Sequence[int]
    positions: Sequence[Sequence[int]] | None


class Vision:
    """The eyes of a model.

    Attributes:
        model: mlx_vlm's, whole.
        processor: expands images to tokens; usable from any thread.
        reads_both_ways: an image has to be computed as a whole, because its tokens see each other in both
            directions.
        moves_positions: positions have three axes, so that text behind an image is shifted.
        parameters: of the tower alone; none on ranks that do not run it.
    """

    def __init__(
        self,
        model: Any,
        processor: ImageProcessor,
        parameters: Mapping[str, mx.array],
        *,
        reads_both_ways: bool = False,
        moves_positions: bool = False,
    ) -> None:
        self.model = model
        self.processor = processor
        self.parameters = parameters
        self.reads_both_ways = reads_both_ways
        self.moves_positions = moves_positions

    @property
    def runs_tower(self) -> bool:
        """True if this process runs the tower, and does not get what another rank's has made."""
        return bool(self.parameters)

    def see(self, inputs: Inputs, network_ids: Sequence[int]) -> ImageFeatures:
        """Return what the network computes an image from."""
        return self.look(inputs, network_ids)

    def look(self, inputs: Inputs, network_ids: Sequence[int]) -> ImageFeatures:
        """Run the tower on one image."""
        ids = mx.array([list(network_ids)])
        arrays = {name: mx.array(cast("Any", value)) for name, value in inputs.items()}
        pixels = arrays.pop("pixel_values")
        seen = self.model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **arrays)
        layers = seen.deepstack_visual_embeds
        features = ImageFeatures(
            seen.inputs_embeds, () if layers is None else tuple(layers), seen.per_layer_inputs
        )
        mx.eval(features.arrays)
        return features

    def compute(self, features: ImageFeatures, chunk: ImageChunk, caches: list[Any]) -> None:
        """Compute tokens of an image into caches that hold everything before them. Evaluates nothing."""
        start, end = chunk.start, chunk.end
        options: dict[str, Any] = {}
        if chunk.positions is not None:
            # Without these, the network would take positions from the last prompt that it has seen.
            options = {"position_ids": _positions(chunk.positions), "rope_deltas": mx.array([[0]])}
        if features.layers:
            options["visual_pos_masks"] = mx.ones((1, end - start), dtype=mx.bool_)
            options["deepstack_visual_embeds"] = [layer[start:end] for layer in features.layers]
        if features.per_layer is not None:
            options["per_layer_inputs"] = features.per_layer[:, start:end]
        lent = _lent(caches, as_block=self.reads_both_ways)
        # A slice is a new array: Gemma 3 multiplies the one that it is given in place.
        embeddings = features.embeddings[:, start:end]
        ids = mx.array([list(chunk.network_ids)])
        self.model.language_model(ids, inputs_embeds=embeddings, cache=lent, **options)
        _take_back(caches, lent)


class _FeatureForm(NamedTuple):
    """What the features of all images of a model have in common.

    Attributes:
        hidden: numbers of a token.
        types: names of the types in MLX of the embeddings, and of what is added behind each layer.
    """

    hidden: int
    types: Sequence[str]


class VisionOfRanks(Vision):
    """The eyes of a model that several ranks compute together (ADR 26).

    Rank 0 runs the tower, and the others get what it has made: so all compute with the same, to the bit, and
    no image leaves rank 0.
    """

    def __init__(self, *args: Any, ranks: RankGroup, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks = ranks
        self._form = _FeatureForm(0, ())

    def learn_form(self, seen: ImageFeatures | None) -> None:
        """Learn from rank 0 what features look like. All ranks call it together.

        Args:
            seen: of any image, on rank 0.
        """
        arrays = seen.arrays if seen else [mx.zeros(0)]
        own = [arrays[0].shape[-1], [str(array.dtype).rpartition(".")[2] for array in arrays]]
        self._form = _FeatureForm(*json.loads(self._ranks.texts(json.dumps(own))[0]))

    def see(self, inputs: Inputs, network_ids: Sequence[int]) -> ImageFeatures:
        """Return what the tower of rank 0 makes of an image. All ranks call it together.

        Args:
            inputs: empty on the other ranks.
        """
        own = self.look(inputs, network_ids).arrays if self.runs_tower else self._blank(len(network_ids))
        embeddings, *layers = map(self._from_first, own)
        return ImageFeatures(embeddings, tuple(layers), None)

    def _from_first(self, own: mx.array) -> mx.array:
        given = self._ranks.from_first(own)
        mx.eval(given)  # one after the other, so that they come in one order on all ranks
        return given

    def _blank(self, tokens: int) -> list[mx.array]:
        hidden, (first, *others) = self._form
        shape = (tokens, hidden)
        return [
            mx.zeros((1, *shape), getattr(mx, first)),
            *(mx.zeros(shape, getattr(mx, name)) for name in others),
        ]


def _positions(positions: Sequence[Sequence[int]]) -> mx.array:
    """Return positions [3][tokens] as an array [3, 1, tokens]."""
    return mx.array([list(axis) for axis in positions])[:, None, :]


def _lent(caches: Sequence[Any], *, as_block: bool) -> list[Any]:
    """Return caches for mlx_vlm's network that share the arrays of mlx_lm's."""
    from mlx_vlm.models.cache import ArraysCache

    lent: list[Any] = []
    for cache in caches:
        shared = cache
        if type(cache).__name__ == "ArraysCache":
            shared = ArraysCache(len(cache.cache))
            shared.cache = list(cache.cache)
        elif as_block:
            shared = BlockMaskCache(cache)
        lent.append(shared)
    return lent


def _take_back(caches: Sequence[Any], lent: Sequence[Any]) -> None:
    for ours, theirs in zip(caches, lent, strict=True):
        if type(ours).__name__ == "ArraysCache":
            ours.cache = list(theirs.cache)


# ------------------------------------------------------------------------------------------------------- load


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
    from mlx_vlm.utils import load_model

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


class BlockMaskCache:
    """Stands in front of one of mlx_lm's caches for an image whose tokens see each other in both directions.

    Gemma 4 reads its images so. mlx_vlm's network has such a mask for a whole prompt only, and is silently
    causal behind a cached prefix. A network asks its caches for masks, so the cache gives the right one.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    @property
    def offset(self) -> int:
        return int(self._cache.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._cache.update_and_fetch(keys, values)

    def make_mask(self, tokens: int, **options: Any) -> mx.array | None:
        """Return [tokens, tokens in sight]: causal for those before the chunk, and everything within it."""
        if tokens == 1:
            return self._cache.make_mask(tokens, **options)
        mask = self._cache.make_mask(tokens, **options | {"return_array": True})
        in_sight = mask.shape[-1]
        return mask | (mx.arange(in_sight) >= in_sight - tokens)
