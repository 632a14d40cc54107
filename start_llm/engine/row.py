"""One sequence on the engine thread."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import mlx.core as mx

from start_llm.cache.pages import Strand
from start_llm.core.errors import GuideLost
from start_llm.core.events import Finished
from start_llm.engine.generation import Generation
from start_llm.engine.guided import GuidedLogits
from start_llm.engine.reply import ReplyWriter
from start_llm.engine.sampling import make_processors, make_sampler, token_logprobs


class Row:
    """Tokens, cache and choices of one sequence.

    At rest, `cache` holds the state of `tokens[:-1]`: the last token is still to be fed.

    Attributes:
        generation: where events go.
        tokens: prompt and reply so far.
        strand: what the prompt cache has given it, and gets back.
        cache: one entry for each cache of the network, in mlx_lm's classes.
        sampler, processors: see `engine.sampling`.
    """

    def __init__(self, generation: Generation, reply: ReplyWriter, strand: Strand) -> None:
        job = generation.job
        self.generation = generation
        self.tokens = list(job.prompt.ids)
        self.strand = strand
        self.cache: list[Any] = strand.caches
        self.sampler = make_sampler(job.sampling)
        self.processors = make_processors(job.sampling, len(job.prompt))
        self._guided = GuidedLogits(job.guide, len(job.prompt)) if job.guide else None
        if self._guided:
            self.processors.append(self._guided)
        self._reply = reply

    @property
    def cancelled(self) -> bool:
        return self.generation.cancelled

    @property
    def dictated(self) -> deque[int]:
        """Tokens that the reply says next, whatever is sampled. Whoever feeds one takes it out."""
        return self._reply.dictated

    def accept(self, token: int, logprobs: mx.array) -> bool:
        """Add the next token and report it. True if it ends the reply.

        Args:
            logprobs: [vocabulary], read only if the request asked for them.

        Raises:
            GuideLost: the token after this one could not be held to the form of the reply.
        """
        self.tokens.append(token)
        wanted = self.generation.job.top_logprobs
        scored = None if wanted is None else token_logprobs(logprobs, token, wanted)
        events = self._reply.feed(token, scored)
        for event in events:
            self.generation.emit(event)
        has_ended = bool(events) and isinstance(events[-1], Finished)
        if self._guided and self._guided.lost and not has_ended:
            raise GuideLost(self._guided.lost)
        return has_ended


class Sampled(NamedTuple):
    """A new token of a row. `logprobs` is [vocabulary]."""

    row: Row
    token: int
    logprobs: mx.array
