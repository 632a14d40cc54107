"""Sampling parameters: their ranges, layers of defaults, and the decided values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class Range:
    """The closed interval of a parameter's valid values."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low:g} to {self.high:g}"


# MLX reports values outside these only by an exception inside a compiled function, which makes the random
# state of the whole process unusable (lesson 1). So every source is checked: requests, settings, model files.
RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 5),
    "top_p": Range(0, 1),
    "top_k": Range(0, 2**31 - 1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 10),
    "repetition_context_size": Range(0, 2**20),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "hlg_width": Range(0, 10**6),
    "hlg_shoulder": Range(0.01, 10**6),
    "hlg_toe": Range(0.01, 10**6),
    "hlg_pivot_offset": Range(0, 10**6),
}
# Far below this, a logit divided by the temperature is infinite in float32, and every token is equally
# likely.
_COLDEST = 1e-5
SEED_RANGE = Range(-(2**63), 2**63 - 1)
BIAS_RANGE = Range(-100, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoice:
    """The sampling parameters of one source (request, environment, model file). None: not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    hlg: bool | None = None
    hlg_width: float | None = None
    hlg_shoulder: float | None = None
    hlg_toe: float | None = None
    hlg_pivot_offset: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Decided sampling values for one request.

    The defaults are those of the project's first server, except for the repetition penalty: it had no effect
    there, and a penalty on braces and identifiers damages tool calls.

    Attributes:
        temperature: 0 or almost 0 is greedy decoding.
        top_p, min_p: probability mass; 0 is off, and so is 1 for `top_p`.
        top_k: number of candidates; 0 is off.
        hlg: sample with a tone curve (hybrid log-gamma), in place of top-p, top-k and min-p. Logits within
            `hlg_width` of the pivot keep their contrast. It fades above them with `hlg_shoulder`, and below
            them with `hlg_toe`; smaller values fade sooner. The pivot is `hlg_pivot_offset` below the
            highest logit.
        repetition_penalty: factor on the logits of the last `repetition_context_size` tokens; 1 is off.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens generated so far.
        logit_bias: token id to a number added to its logit.
        seed: None draws a new one for each request.

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float = 0.1
    top_p: float = 0.9
    top_k: int = 40
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    repetition_context_size: int = 256
    hlg: bool = False
    hlg_width: float = 4.0
    hlg_shoulder: float = 4.0
    hlg_toe: float = 6.0
    hlg_pivot_offset: float = 6.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be {allowed}, not {value!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _COLDEST


def first_set(*choices: SamplingChoice) -> dict[str, float | int]:
    """Return for each field the value of the first source that has one; other fields are absent."""
    decided: dict[str, float | int] = {}
    for choice in reversed(choices):
        for slot in fields(choice):
            value = getattr(choice, slot.name)
            if value is not None:
                decided[slot.name] = value
    return decided
