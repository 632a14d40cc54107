"""What happens to a request, in the order in which it happens.

    engine     Restored  (Prefilling | Idle)*  (Text | Idle)*    (Finished | Failed)
    service              (Prefilling | Idle)*  (Output | Idle)*  (Finished | Failed)

The engine makes `Text` on its thread; an HTTP thread splits it into `Output` (see `output/`). None of them
holds an MLX array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from start_llm.core.ids import random_name

type FinishReason = Literal["stop", "length", "tool_calls"]
type Miss = Literal["new", "evicted", "no_state", "drift", "off"]
"""Why prompt tokens are computed that the cache could have had: see `telemetry.metrics.CacheMetrics`."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What the cache had of this prompt, when its turn came.

    Attributes:
        tokens: of the prompt, that need no computing.
        miss: why there are not more; None: there is nothing more that was ever computed.
        rejected_keys: candidates with the right key and other tokens, which were passed over.
        kept: tokens of the prompt that are kept, whether or not there is state at their end.
        known: tokens that stand for what was computed before, in these words or in others.
    """

    tokens: int
    miss: Miss | None = None
    rejected_keys: int = 0
    kept: int = 0
    known: int = 0

    @property
    def lost(self) -> int:
        """Tokens that have to be computed again."""
        return max(self.known - self.tokens, 0)


@dataclass(frozen=True, slots=True)
class Prefilling:
    """`done` of `total` prompt tokens are computed."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token id with its log-probability (natural logarithm)."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and its most likely alternatives, most likely first."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Decoded text and the tokens it came from.

    Attributes:
        text: whole characters only; may be empty when tokens end the reply without adding text.
        tokens: ids since the previous `Text`, the end-of-turn token included.
        logprobs: one per token of `text` if they were asked for, else empty.
        surprisal: bits of chance in `tokens`: how unlikely it is that somebody else drew the same ones.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    surprisal: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens that had come when this was known, and their log-probabilities if they were asked for.

    A token belongs to the first event after it: markup that is never shown has tokens too.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Content(Piece):
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning(Piece):
    """Text of the thought, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted(Piece):
    """The model calls a tool that was offered. `index` counts the calls of the reply from 0.

    `id` is what each protocol's id ends with: who sends it back was told of this call.
    """

    index: int
    name: str
    id: str = field(default_factory=random_name, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CallArguments(Piece):
    """A fragment of the call's arguments; all fragments together are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded(Piece):
    """The arguments are complete. A reply that breaks off in a call never gets here."""

    index: int


type Output = Content | Reasoning | CallStarted | CallArguments | CallEnded


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached` prompt tokens were not computed.

    `reasoning` of the `completion` tokens belong to the thought, its markers included.
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
    """The reply is complete. `stop` names the stop string that ended it, if one did.

    `reason` is "tool_calls" if calls were made and none of them was cut off. `was_cut`: the server's own
    deadline ended it, in the middle of anything, its prompt included.
    """

    reason: FinishReason
    usage: Usage
    stop: str | None = None
    was_cut: bool = False

    @property
    def ended_itself(self) -> bool:
        """The model ended the reply: its last token is the one that says so."""
        return self.reason != "length" and self.stop is None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not finish the reply."""

    message: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing happened for a moment: time to look after the client."""


type Ending = Finished | Failed
type Event = Restored | Prefilling | Text | Output | Idle | Ending
