"""Whether models fit beside each other: each with a prompt of its whole context window."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from start_llm.config.settings import Settings
from start_llm.core.errors import ModelError
from start_llm.engine.earlier_texts import EARLIER_BYTES
from start_llm.library.folders import shape_in
from start_llm.wiring.memory_plan import memory_budget, own_machine, usable_share


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The memory without which a prompt of a model's whole context window would have no room.

    Attributes:
        kept_bytes: weights, adapters, images, and texts that drafts come from.
        window_bytes: KV of such a prompt.
        computing_bytes: for one step. Models compute in turns, so the largest need is that of all together.
    """

    kept_bytes: int
    window_bytes: int
    computing_bytes: int


def together(needs: Sequence[MemoryNeeds]) -> int:
    """Return the bytes that several models need beside each other."""
    computing = max((need.computing_bytes for need in needs), default=0)
    return computing + sum(need.kept_bytes + need.window_bytes for need in needs)


def spare_bytes(settings: Settings, needs: Sequence[MemoryNeeds]) -> int:
    """Return the bytes that are left beside models with these needs; below 0: they miss."""
    return usable_share(memory_budget(settings)) - together(needs)


def estimated_needs(name: str, folder: Path, settings: Settings) -> MemoryNeeds:
    """Return the memory that a model will need, from its files; more than there is if they do not tell."""
    try:
        shape = shape_in(name, folder).on(own_machine(settings))
    except ModelError:
        return MemoryNeeds(kept_bytes=sys.maxsize, window_bytes=0, computing_bytes=0)
    longest, budget = min(shape.window, settings.engine.max_kv_size), memory_budget(settings)
    is_fused = own_machine(settings).fuses_attention
    draft_bytes = 0 if settings.engine.speculation == "off" else EARLIER_BYTES
    return MemoryNeeds(
        kept_bytes=shape.weights.total + shape.image_bytes(budget) + draft_bytes,
        window_bytes=shape.cost.bytes_of(longest),
        computing_bytes=shape.computing_bytes(budget, is_fused=is_fused),
    )
