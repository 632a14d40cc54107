"""Divides the memory budget: weights, computing, running sequences, the prompt cache and images."""

from collections.abc import Mapping
from dataclasses import dataclass

from start_llm.cache.disk.disk_folder import DiskLimits
from start_llm.cache.eviction import EvictionLimits
from start_llm.config.settings import Settings
from start_llm.core.chat import Json
from start_llm.core.errors import ModelError
from start_llm.core.model_listing import Machine
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission
from start_llm.engine.pacing import LONGEST_CHUNK
from start_llm.engine.start_measurements import PrefillMemoryCost, TowerMemoryCost
from start_llm.library.fit import activation_bytes
from start_llm.models.architecture import completed
from start_llm.models.device import this_device
from start_llm.models.float32 import most_float32_bytes
from start_llm.models.image_costs import COMPUTING_SHARE, kept_image_bytes
from start_llm.models.layer_costs import text_config
from start_llm.models.machines import this_machine

_LONG_CONTEXT = 65_536
_SINGLE = 4
"""Bytes of a float32 number."""
_HEADROOM = 0.05
"""Share of the memory budget for what is not counted: allocators, sockets, texts."""
_NAMED_DISK_BYTES, _USUAL_DISK_BYTES, _USUAL_DISK_SHARE = 100 * 10**9, 20 * 10**9, 0.1


def own_machine(settings: Settings) -> Machine:
    return this_machine(this_device(), memory_budget(settings), float32_bytes(settings))


def float32_bytes(settings: Settings) -> int:
    """Return the bytes up to which weights are converted to float32; 0 if they never are.

    Args:
        settings: with the memory of all models together.
    """
    if settings.model.cpu_dequantize == "off":
        return 0
    return most_float32_bytes(this_device(), memory_budget(settings))


def memory_budget(settings: Settings) -> int:
    """Return the bytes that weights, caches and computing may take together."""
    return (
        settings.engine.memory
        if isinstance(settings.engine.memory, int)
        else int(settings.engine.memory * this_device().usable_bytes)
    )


def usable_share(budget: int) -> int:
    """Return the bytes of a memory budget for what is counted."""
    return int(budget * (1 - _HEADROOM))


def work_reserve(settings: Settings, work: PrefillMemoryCost) -> int:
    """Return the bytes that stay free for the work memory of prefill.

    This is the need of a longest chunk after 65,536 tokens of context, limited to 8 % of the budget, and at
    least the need of that chunk without context.
    """
    most = int(COMPUTING_SHARE * memory_budget(settings))
    return max(work.bytes_of(LONGEST_CHUNK, 0), min(work.bytes_of(LONGEST_CHUNK, _LONG_CONTEXT), most))


def estimated_work(settings: Settings, config: Mapping[str, Json]) -> PrefillMemoryCost:
    """Return the memory that prefill takes, from the model's config alone, if its numbers are float32.

    Where attention is not fused, the scores of all heads are there twice.
    """
    text = text_config(completed(config))
    heads = 0 if own_machine(settings).fuses_attention else int(text.get("num_attention_heads") or 1)
    return PrefillMemoryCost(activation_bytes(text, _SINGLE), pair_bytes=2 * _SINGLE * heads)


@dataclass(frozen=True, slots=True)
class ImageMemory:
    """The memory for reading images.

    Attributes:
        tower_bytes: for a run of the vision tower.
        kept_bytes: for images that are kept as the tower has seen them.
    """

    tower_bytes: int = 0
    kept_bytes: int = 0
    max_tokens: int = 0


def image_memory(settings: Settings, wanted: int, tower: TowerMemoryCost) -> ImageMemory:
    """Return the memory for reading images, for which one image may have fewer tokens than wanted.

    Then it is a power of two, so that two starts, which measure slightly different figures, agree on it.
    """
    budget = memory_budget(settings)
    affordable = tower.longest(int(COMPUTING_SHARE * budget))
    tokens = wanted if wanted <= affordable else 1 << (affordable.bit_length() - 1)
    return ImageMemory(tower.bytes_of(tokens), kept_image_bytes(budget), tokens)


def admission(settings: Settings, weights_bytes: int, row: SequenceCost, computing: int) -> Admission:
    """Return the admission control for sequences.

    Args:
        row: the memory that a sequence takes.
        computing: bytes that stay free for computing.

    Raises:
        ModelError: there is not enough memory for a single token.
    """
    budget = memory_budget(settings)
    usable = usable_share(budget) - weights_bytes - computing
    control = Admission(usable, row)
    if control.longest < 1:
        raise ModelError(
            f"MEMORY_BUDGET is {budget:,} bytes. The weights need {weights_bytes:,} of them and computing "
            f"{computing:,}, which leaves no room for a prompt. Choose a smaller model, or a larger budget."
        )
    return control


def cache_limits(settings: Settings, weights_bytes: int, usable_bytes: int) -> EvictionLimits:
    """Return the cache's limits. Its budget is at most the memory for all sequences together."""
    return EvictionLimits(
        budget_bytes=min(cache_budget(settings, weights_bytes), usable_bytes),
        max_conversations=settings.cache.max_conversations,
        cache_ttl_s=settings.cache.ttl_s,
    )


def disk_limits(settings: Settings) -> DiskLimits:
    """Return the limits of the disk tier. A user who did not ask for it gets a smaller one."""
    a_day = settings.ssd.max_write_per_day
    if settings.ssd.max_size is not None:
        return DiskLimits(max_size=settings.ssd.max_size, max_write_per_day=a_day)
    if settings.ssd.folder:
        return DiskLimits(max_size=_NAMED_DISK_BYTES, max_write_per_day=a_day)
    return DiskLimits(max_size=_USUAL_DISK_BYTES, max_share=_USUAL_DISK_SHARE, max_write_per_day=a_day)


def cache_budget(settings: Settings, weights_bytes: int) -> int:
    """Return the bytes of the prompt cache: a fixed size, or a share of the memory that the weights leave.

    A size of 0 is no cap: all of that memory.
    """
    wanted = settings.cache.max_bytes or 1.0
    if isinstance(wanted, int):
        return wanted
    return max(int(wanted * (memory_budget(settings) - weights_bytes)), 0)
