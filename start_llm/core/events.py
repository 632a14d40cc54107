"""The events of a request, in the order in which they occur.

    engine     Restored  (Prefilling | Idle)*  (Text | Idle)*    (Finished | Failed)
    service              (Prefilling | Idle)*  (Output | Idle)*  (Finished | Failed)

The engine makes `Text` on its thread; an HTTP thread splits it into `Output` (see `output/`). No event holds
an MLX array.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

from start_llm.core.ids import random_name
from start_llm.core.prompt_report import Divergence, Receipt

type FinishReason = Literal["stop", "length", "tool_calls"]
type Miss = Literal["new", "evicted", "no_state", "drift", "off"]
"""The reason why prompt tokens are computed; see `telemetry.metrics.CacheMetrics`."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of the cache lookup when a prompt's prefill starts.

    Attributes:
        tokens: prompt tokens that need no computing.
        miss: why there are not more; None if nothing more was ever computed.
        rejected_keys: candidates with the right key but other tokens.
        stored: prompt tokens that are stored, whether or not there is state at their end.
        repeated_tokens: prompt tokens of messages that were computed before, as these tokens or as others.
        disk_tokens, disk_s: those of `tokens` that were read from the disk, and the seconds that this took.
        image_was_cut: more was stored, but only a part of an image, so that the image is computed as a whole.
        at: when the prefill starts, on the clock of `time.perf_counter`.
    """

    tokens: int
    miss: Miss | None = None
    rejected_keys: int = 0
    stored: int = 0
    repeated_tokens: int = 0
    disk_tokens: int = 0
    disk_s: float = 0.0
    image_was_cut: bool = False
    at: float = field(default_factory=time.perf_counter, compare=False, repr=False)

    @property
    def lost(self) -> int:
        """Tokens that were computed before and have to be computed again."""
        return max(self.repeated_tokens - self.tokens, 0)


@dataclass(frozen=True, slots=True)
class Prefilling:
    """`done` of `total` prompt tokens are computed.

    Attributes:
        cached: those of them that were restored from the cache.
        seconds: since the prefill began.
    """

    done: int
    total: int
    cached: int = field(default=0, compare=False)
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token id with its log-probability (natural logarithm)."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and its most likely alternatives, the most likely first."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Decoded text and the tokens it came from.

    Attributes:
        text: whole characters only; may be empty when tokens end the reply without adding text.
        tokens: ids since the previous `Text`, the eos token included.
        logprobs: one per token of `text` if they were requested, else empty.
        surprisal: information content of `tokens` in bits: how unlikely it is that another request sampled
            the same ones.
        drafted: how many of `tokens` a draft had guessed.
        at: when the engine made it, on the clock of `time.perf_counter`. Its reader may come much later, and
            to several at once.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    surprisal: float = field(default=0.0, compare=False)
    drafted: int = field(default=0, compare=False)
    at: float = field(default_factory=time.perf_counter, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The tokens up to an output event, and their log-probabilities if they were requested.

    A token belongs to the first event after it, because hidden markup has tokens too.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Content(Piece):
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning(Piece):
    """Text of the reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted(Piece):
    """The model calls one of the offered tools. `index` counts the calls of the reply from 0.

    `id` is the end of every protocol's call id. A client that sends it back received this call.
    """

    index: int
    name: str
    id: str = field(default_factory=random_name, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CallArguments(Piece):
    """A fragment of the call's arguments; together the fragments are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded(Piece):
    """The arguments are complete. Missing if the reply ends within a call."""

    index: int


type Output = Content | Reasoning | CallStarted | CallArguments | CallEnded


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached` prompt tokens were not computed.

    `reasoning` of the `completion` tokens belong to the reasoning, its markers included.
    """

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is complete. `stop` is the stop string that ended it, if one did.

    `reason` is "tool_calls" if calls were made and none of them was cut off. `cut_by`: what made the server
    end the request: its deadline, at any point, even during prefill, or a reply that ran away. The service
    adds the `receipt`, and the `divergence` if the client has asked for it and there is one.
    """

    reason: FinishReason
    usage: Usage
    stop: str | None = None
    cut_by: Literal["deadline", "repetition"] | None = None
    receipt: Receipt = field(default_factory=Receipt, compare=False)
    divergence: Divergence | None = field(default=None, compare=False)

    @property
    def ended_itself(self) -> bool:
        """True if the model ended the reply with an eos token."""
        return self.reason != "length" and self.stop is None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not finish the reply."""

    message: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing happened for a moment; a good time to check the client's connection."""


type Ending = Finished | Failed
type Event = Restored | Prefilling | Text | Output | Idle | Ending
