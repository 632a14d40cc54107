"""One sequence on the engine thread."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from start_llm.cache.pages import Strand
from start_llm.core.errors import GuideLost
from start_llm.core.events import Finished, TokenLogprobs
from start_llm.engine.generation import Generation
from start_llm.engine.guided import GuidedLogits
from start_llm.engine.reply import ReplyWriter
from start_llm.engine.sampling import Chooser, make_processors


class Row:
    """Tokens, cache and choices of one sequence.

    At rest, `cache` holds the state of `tokens[:-1]`: the last token is still to be fed.

    Attributes:
        generation: where events go.
        tokens: prompt and reply so far.
        strand: what the prompt cache has given it, and gets back.
        cache: one entry for each cache of the network, in mlx_lm's classes.
        chooser, processors: see `engine.sampling`.
        width: tokens that it takes in a batch, padding and room to grow included; 0: it is in none.
        is_alone: it shares no batch: one that it was in has failed, and it may be the reason.
        due: see `engine.schedule`.
        since: when its turn began, in seconds on the engine's clock.
    """

    def __init__(
        self, generation: Generation, reply: ReplyWriter, strand: Strand, *, due: float = 0, now: float = 0
    ) -> None:
        job = generation.job
        self.generation = generation
        self.tokens = list(job.prompt.ids)
        self.strand = strand
        self.cache: list[Any] = strand.caches
        self.chooser = Chooser(job.sampling)
        self.processors = make_processors(job.sampling, len(job.prompt))
        self._guided = GuidedLogits(job.guide, len(job.prompt)) if job.guide else None
        if self._guided:
            self.processors.append(self._guided)
        self.width = 0
        self.is_alone = False
        self.due = due
        self.since = now
        self._reply = reply
        self._spent_s = 0.0

    @property
    def cancelled(self) -> bool:
        return self.generation.cancelled

    @property
    def is_guided(self) -> bool:
        """Its reply is held to a form, so its next step needs to know the token before."""
        return self._guided is not None

    @property
    def dictated(self) -> deque[int]:
        """Tokens that the reply says next, whatever is sampled. Whoever feeds one takes it out."""
        return self._reply.dictated

    @property
    def has_begun(self) -> bool:
        """Some of the reply is there."""
        return len(self.tokens) > len(self.generation.job.prompt)

    @property
    def can_go_on(self) -> bool:
        """Whether all that it remembers of its tokens is so, after a step that failed half way."""
        return self._guided is None or self._guided.is_at(len(self.tokens))

    def pause(self, now: float) -> None:
        """Its turn is over for now. Its caches are not its own any more."""
        self._spent_s, self.cache = self.spent_s(now), []

    def go_on(self, strand: Strand, now: float) -> None:
        """Its next turn begins, with what is left of its caches."""
        self.strand, self.cache, self.since = strand, strand.caches, now

    def spent_s(self, now: float) -> float:
        """Seconds of all its turns."""
        return self._spent_s + now - self.since

    def cut(self) -> None:
        """End the reply here."""
        for event in self._reply.cut():
            self.generation.emit(event)

    def accept(self, token: int, scored: TokenLogprobs | None = None, surprisal: float = 0.0) -> bool:
        """Add the next token and report it. True if it ends the reply.

        Args:
            scored: if the request asked for it.

        Raises:
            GuideLost: the token after this one could not be held to the form of the reply.
        """
        self.tokens.append(token)
        events = self._reply.feed(token, scored, surprisal)
        for event in events:
            self.generation.emit(event)
        has_ended = bool(events) and isinstance(events[-1], Finished)
        if self._guided and self._guided.lost and not has_ended:
            raise GuideLost(self._guided.lost)
        return has_ended


class Sampled(NamedTuple):
    """A new token of a row.

    Attributes:
        surprisal: in bits, see `engine.sampling`.
        scored: its log-probability, if the request asked for it.
    """

    row: Row
    token: int
    surprisal: float
    scored: TokenLogprobs | None
