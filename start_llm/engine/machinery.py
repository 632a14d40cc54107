"""What an engine is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from start_llm.cache.no_reuse import NoReuse
from start_llm.cache.prompt_cache import PromptCache
from start_llm.engine.admission import Admission
from start_llm.engine.pacing import DECODE_SHARE, LONGEST_CHUNK, STALL_S, Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long anything may take, in seconds.

    Attributes:
        chunk_s: a chunk of a prompt, for which running replies stand still.
        decode_share: part of the time that running replies keep while a prompt is computed; no seconds.
        turn_s: a reply, while others wait for its place.
        deadline_s: a request, all its turns together; 0 is for ever.
    """

    chunk_s: float = STALL_S
    decode_share: float = DECODE_SHARE
    turn_s: float = 4.0
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Machinery:
    """What the loop runs.

    Attributes:
        network: `network(tokens[1, n], cache=...)` gives logits [1, n, vocabulary].
        token_bytes, end_tokens: see `models.tokenizer`.
        cache: what was computed before.
        most_rows: rows that decode at once.
        batches: whether the network's caches can be merged.
        admission: which of them there is memory for.
        measured: chunks that were computed to see how long they take.
        longest_chunk: tokens of a prompt that there is memory to compute at once, behind so many others.
        shortage: bytes that should be given back, because memory is short in fact.
    """

    network: Any
    token_bytes: Callable[[int], bytes]
    end_tokens: frozenset[int]
    most_rows: int
    batches: bool
    cache: PromptCache | NoReuse | None = None
    pace: Pace = field(default_factory=Pace)
    admission: Admission = field(default_factory=Admission)
    measured: tuple[Chunk, ...] = ()
    longest_chunk: Callable[[int], int] = lambda _: LONGEST_CHUNK
    shortage: Callable[[], int] = lambda: 0
