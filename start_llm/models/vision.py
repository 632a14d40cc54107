"""Runs the vision tower on images, and computes what it makes into the caches of the text network.

The text is mlx_lm's network; the tower, and the network for chunks of images, are mlx_vlm's. A chunk of text
goes through mlx_lm's network as in any other model. A chunk of an image goes through mlx_vlm's, on the same
caches. `models.vision_loader` loads what is mlx_vlm's.

Runs on the engine thread, which owns the arrays.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx

from start_llm.models.image_processor import ImageProcessor, Inputs
from start_llm.models.rank_group import RankGroup


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
    from mlx_vlm.models.cache import ArraysCache  # noqa: PLC0415 - only a model with a tower needs it

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
