"""A loaded model, as everything but its engine knows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from start_llm.core.family import Family

_NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class KVAtRest:
    """How the KV of pages is kept.

    Attributes:
        mode: uniform-kv8, turboquant-kv4 and so on, mixed (kv_config.json), or the type that most layers
            have.
        layers: number of layers for each type of their KV or state.
        attention: number of layers for each kind of attention.
        is_quantized: pages are quantised.
    """

    mode: str = ""
    layers: Mapping[str, int] = field(default_factory=dict[str, int])
    attention: Mapping[str, int] = field(default_factory=dict[str, int])
    is_quantized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What was found out about a model when it was loaded. Refers to no part of it, and may outlive it.

    Attributes:
        model_type: from config.json.
        family: the format of the text that the model reads and writes.
        vocabulary: width of the logits.
        own_window: maximum tokens of prompt and reply together, as the model and the settings limit them.
        memory_window: the same, as memory limits them.
        weights_bytes: of all parameters, those of a vision tower included.
        budget_bytes, usable_bytes: memory for everything, and the part left for running requests.
        layers: number of caches by kind, as users know the kinds.
        kv: how pages are kept.
        unbatched_reason: why replies do not share forward passes, from a test at load; empty: they do.
    """

    id: str
    model_type: str = "unknown"
    family: Family
    vocabulary: int
    own_window: int
    memory_window: int = _NO_LIMIT
    weights_bytes: int = 0
    budget_bytes: int = 0
    usable_bytes: int = 0
    layers: Mapping[str, int] = field(default_factory=dict[str, int])
    kv: KVAtRest = field(default_factory=KVAtRest)
    sees: bool = False
    unbatched_reason: str = ""

    @property
    def context_window(self) -> int:
        """Maximum tokens of prompt and reply together."""
        return min(self.own_window, self.memory_window)

    @property
    def reasons(self) -> bool:
        """Whether the model can think before it answers."""
        return self.family.reasoning is not None
