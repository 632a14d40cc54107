"""The parts that the engine loop runs on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.adapters import AdapterStack
from start_llm.core.limits import TimeLimits
from start_llm.engine.admission import Admission
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.followers import Agreement, Followers, as_sampled
from start_llm.engine.pacing import LONGEST_CHUNK, Chunk
from start_llm.engine.step_plan import PlanClock
from start_llm.models.vision import Vision


@dataclass(frozen=True, slots=True)
class EngineResources:
    """The parts that the engine loop runs on.

    Attributes:
        network: `network(tokens[1, n], cache=...)` returns logits [1, n, vocabulary].
        token_bytes, eos_token_ids: see `models.tokenizer`.
        max_sequences: sequences that decode at once.
        batches: whether sequences may share a forward pass.
        batches_prefill: whether prompts may, too.
        admission: decides which sequences fit into memory.
        measured: chunks that were timed at start-up.
        longest_chunk: returns the longest chunk, in tokens, that memory allows after this many tokens.
        shortage: returns the bytes to free because memory is short.
        vision: reads images; None if the model has no eyes.
        mount: makes the network compute under adapters.
        image_bytes: limit for the images that are kept as the vision tower has seen them.
        clock: the engine's time.
        gain: of drafts; None: nothing is drafted.
        agree: makes all ranks that compute the network take the same ids.
        followers: those that do what is decided here.
    """

    network: Any
    token_bytes: Callable[[int], bytes]
    eos_token_ids: frozenset[int]
    max_sequences: int
    batches: bool
    cache: PromptCache
    time_limits: TimeLimits = field(default_factory=TimeLimits)
    admission: Admission = field(default_factory=Admission)
    measured: tuple[Chunk, ...] = ()
    longest_chunk: Callable[[int], int] = lambda _: LONGEST_CHUNK
    shortage: Callable[[], int] = lambda: 0
    vision: Vision | None = None
    mount: Callable[[AdapterStack], None] = lambda _: None
    image_bytes: int = 2**28
    clock: PlanClock = field(default_factory=PlanClock)
    gain: DraftGain | None = None
    batches_prefill: bool = False
    agree: Agreement = as_sampled
    followers: Followers = field(default_factory=Followers)
