"""Models that several programs measure, as an engine runs them that keeps nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts import tiny_models, tiny_vision_models
from start_llm.cache.layers import Layers
from start_llm.engine.resources import EngineResources
from start_llm.engine.self_test import check_batching
from start_llm.models.loader import LoadedModel, load
from tests.cache.conversations import Picture
from tests.engine.harness import uncached_resources
from tests.vision.seeing import pictures

FAMILIES = {"dense": "qwen3", "hybrid": "qwen3_5", "sliding": "gemma3_text", "latent": "glm4_moe_lite"}
"""A model type of each kind of attention."""
ROWS = 4
PICTURES = 5


@dataclass(frozen=True)
class World:
    """What conversations of a tiny model are played with."""

    resources: EngineResources
    pictures: Sequence[Picture] = ()


def resources_of(
    model: LoadedModel, rows: int = ROWS, *, batches: bool = True, **more: Any
) -> EngineResources:
    """Return what runs a model. No token ends a reply: it is as long as it is asked to be."""
    return uncached_resources(model.network, model.tokenizer.token_bytes, frozenset(), rows, batches, **more)


def build_world(family: str, folder: Path, *, images: bool) -> World:
    """Build a model that batches as far as its self-test allows, and that sees if there shall be images."""
    build = tiny_vision_models.build if images else partial(tiny_models.build, hidden=128, layers=2)
    model = load(build(family, folder))
    shifts = model.vision is not None and model.vision.moves_positions
    batches = check_batching(model.network, Layers(model.network).fresh, ROWS, shifts=shifts).batches
    resources = resources_of(model, batches=batches, vision=model.vision)
    return World(resources, pictures(model, PICTURES) if images else ())
