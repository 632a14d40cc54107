"""What the vision tower has seen of images, kept for the prompts that need it again."""

import time

import mlx.core as mx

from start_llm.core.images import ImageRun
from start_llm.core.recently_used import RecentlyUsed
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.models.vision import ImageFeatures, Vision
from start_llm.telemetry.metrics import EngineMetrics

_NAMING_TOKENS = 4
"""Tokens that are enough to name an image: 124 bits of its digest."""


@owned_by(ENGINE)
class ImageReader:
    """Runs the vision tower, and keeps what it has seen within a limit. Owned by the engine thread.

    Args:
        limit_bytes: for all images that are kept.
    """

    def __init__(self, vision: Vision, metrics: EngineMetrics, limit_bytes: int) -> None:
        self.vision = vision
        self._metrics = metrics
        self._kept = RecentlyUsed[tuple[object, ...], ImageFeatures](
            limit_bytes, lambda features: features.nbytes
        )

    @property
    def kept_bytes(self) -> int:
        return self._kept.size

    def knows(self, run: ImageRun, salt: bytes) -> bool:
        """Return whether the tower has seen an image. Asking changes nothing, so only rank 0 need ask."""
        return _name(run, salt) in self._kept

    def known(self, run: ImageRun, salt: bytes) -> ImageFeatures | None:
        """Return what the tower has seen of an image; None if it has to look first."""
        return self._kept.get(_name(run, salt))

    def look(self, run: ImageRun, salt: bytes) -> ImageFeatures:
        """Run the tower on an image. Decodes the image first, if nobody has.

        Args:
            salt: what was seen under one salt is never used under another.
        """
        inputs = run.inputs()
        began = time.perf_counter()
        features = self.vision.see(inputs, run.network_ids)
        mx.clear_cache()
        self._metrics.tower_runs += 1
        self._metrics.tower_s += time.perf_counter() - began
        self._kept.put(_name(run, salt), features)
        self._metrics.image_bytes = self._kept.size
        return features


def _name(run: ImageRun, salt: bytes) -> tuple[object, ...]:
    return (salt, *run.tokens[:_NAMING_TOKENS])
