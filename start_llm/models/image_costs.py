"""Computes from a config the memory that is set aside for looking at images.

A tower of these families computes all patches of an image at once. Of each it holds the pixels, about seven
vectors of its width and three of its MLP's, each twice, as input and output of an operation are there at the
same time. Where attention is not fused there are scores of all pairs of patches besides. Tests compare this
with towers that were measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from start_llm.models.image_processor import DEFAULT_MAX_TOKENS
from start_llm.models.layer_costs import number_bytes

COMPUTING_SHARE = 0.08
"""Share of the memory budget that one step may take beyond what it cannot do without."""
_KEPT_SHARE, _MOST_KEPT_BYTES = 0.02, 512 * 2**20
"""Share of the memory budget for images as the vision tower has seen them, and the limit to it.

An image of 4,096 tokens takes 32 to 128 MiB, and is needed again only where its KV was evicted, or by a
conversation with another beginning.
"""
_WIDTH, _PATCH, _CHANNELS, _HEADS = 1152, 14, 3, 16
"""Of SigLIP (So400m), for configs that do not say it."""
_SCORE_BYTES = 4


def kept_image_bytes(budget: int) -> int:
    """Return the memory for images as the vision tower has seen them."""
    return min(int(_KEPT_SHARE * budget), _MOST_KEPT_BYTES)


@dataclass(frozen=True, slots=True)
class TowerCost:
    """What a vision tower takes for the largest image.

    Attributes:
        patches: of that image.
        patch_bytes: activations of one.
        pair_bytes: attention scores of a pair, for all heads, where attention is not fused.
    """

    patches: int
    patch_bytes: int
    pair_bytes: int

    def within(self, budget: int, *, is_fused: bool) -> int:
        """Return the bytes that are set aside: images are made smaller for which it would be too much."""
        pairs = 0 if is_fused else self.pair_bytes * self.patches**2
        return min(self.patches * self.patch_bytes + pairs, int(COMPUTING_SHARE * budget))


def tower_cost(config: Mapping[str, Any]) -> TowerCost:
    """Return the cost of a model's vision tower, from the config of a model that sees.

    Raises:
        ArithmeticError, TypeError, ValueError: a value is none that it can have.
    """
    vision: Mapping[str, Any] = config["vision_config"]

    def number(default: float, *names: str) -> float:
        return float(next((vision[name] for name in names if vision.get(name)), default))

    width = number(_WIDTH, "embed_dim", "hidden_size")
    inner = number(number(4, "mlp_ratio") * width, "intermediate_size")
    pixels = number(_CHANNELS, "in_channels", "num_channels") * number(_PATCH, "patch_size") ** 2
    pixels *= number(1, "temporal_patch_size")
    return TowerCost(
        patches=int(_patches(config, vision)),
        patch_bytes=int(2 * number_bytes(config) * (pixels + 7 * width + 3 * inner)),
        pair_bytes=int(_SCORE_BYTES * number(_HEADS, "num_heads", "num_attention_heads")),
    )


def _patches(config: Mapping[str, Any], vision: Mapping[str, Any]) -> float:
    """Return the patches of the largest image."""
    merge = vision.get("spatial_merge_size") or vision.get("pooling_kernel_size")
    each = float(merge or config.get("spatial_merge_size") or 1) ** 2
    most = DEFAULT_MAX_TOKENS * each
    if length := vision.get("default_output_length"):
        most = float(length) * each
    if side := vision.get("image_size"):
        most = min(most, (float(side) / float(vision.get("patch_size") or _PATCH)) ** 2)
    return most
