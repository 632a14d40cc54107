"""A sequence on the engine thread: its tokens, caches, sampling and reply."""

from collections import deque
from typing import Any, NamedTuple

from start_llm.cache.pages import SequenceCache
from start_llm.core.adapters import AdapterStack
from start_llm.core.errors import ConstraintViolated
from start_llm.core.events import Finished, TokenLogprobs
from start_llm.engine.generation import Generation
from start_llm.engine.guided import GuidedLogits
from start_llm.engine.prompt_images import PromptImages
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.engine.sampler import Chooser, make_processors


class EngineSequence:
    """Tokens, caches and sampling state of one sequence.

    While it waits to start or is preempted, its caches hold the KV of `tokens[:-1]`: the last token has not
    been fed.

    Attributes:
        generation: receives the events.
        tokens: prompt and reply so far.
        images: those of the prompt.
        seq_cache: the prompt cache's record of this sequence.
        layer_caches: one entry for each cache of the network, in mlx_lm's classes; empty while a batch has
            them.
        chooser, processors: see `engine.sampler`.
        width: tokens that it occupies in a batch, padding and planned growth included; 0 if it is in none.
        excluded_from_batches: it joins no batch, because a batch that it was in has failed and it may be the
            cause.
        due: see `engine.schedule`.
        running_since: when it last started or continued, in seconds on the engine's clock.
    """

    def __init__(
        self,
        generation: Generation,
        reply: ReplyWriter,
        seq_cache: SequenceCache,
        *,
        due: float = 0,
        now: float = 0,
    ) -> None:
        request = generation.request
        self.generation = generation
        self.tokens = list(request.prompt.ids)
        self.images = PromptImages(request.prompt.ids, request.images)
        self.seq_cache = seq_cache
        self.layer_caches: list[Any] = seq_cache.caches
        self.chooser = Chooser(request.sampling)
        self.processors = make_processors(request.sampling, len(request.prompt))
        self._guided = GuidedLogits(request.guide, len(request.prompt)) if request.guide else None
        if self._guided:
            self.processors.append(self._guided)
        self.width = 0
        self.excluded_from_batches = False
        self.due = due
        self.running_since = now
        self._reply = reply
        self._run_time_s = 0.0

    @property
    def number(self) -> int:
        """The number of its request; see `engine.generation`."""
        return self.generation.number

    @property
    def adapters(self) -> AdapterStack:
        return self.generation.request.adapters

    @property
    def cancelled(self) -> bool:
        return self.generation.cancelled

    @property
    def is_guided(self) -> bool:
        """The reply has structured output, so its next step needs to know the token before."""
        return self._guided is not None

    @property
    def forced_tokens(self) -> deque[int]:
        """Tokens that must come next, whatever is sampled. Each goes when the sequence accepts it."""
        return self._reply.forced_tokens

    @property
    def has_begun(self) -> bool:
        """True if the reply has at least one token."""
        return len(self.tokens) > len(self.generation.request.prompt)

    @property
    def network_ids(self) -> list[int]:
        """Prompt and reply so far as the network reads them."""
        return self.images.network_ids(self.tokens)

    @property
    def can_resume(self) -> bool:
        """True if its state agrees with its tokens after a step that failed half way."""
        return self._guided is None or self._guided.is_at(len(self.tokens))

    def pause(self, now: float) -> None:
        """Record that the sequence was preempted. Its caches now belong to the prompt cache."""
        self._run_time_s, self.layer_caches, self.width = self.run_time_s(now), [], 0

    def resume(self, seq_cache: SequenceCache, now: float) -> None:
        """Continue with the caches that the prompt cache restored."""
        self.seq_cache, self.layer_caches, self.running_since = seq_cache, seq_cache.caches, now

    def run_time_s(self, now: float) -> float:
        """Return the seconds that the sequence has run, without the time that it was preempted."""
        return self._run_time_s + now - self.running_since

    def cut(self) -> None:
        """End the reply here, and emit its last events."""
        self.generation.hold(self._reply.cut())
        self.generation.send()

    def accept(self, token: int, scored: TokenLogprobs | None = None, surprisal: float = 0.0) -> bool:
        """Add the next token and hold its events until they are sent. Returns True if it ends the reply.

        Args:
            scored: its log-probability, if the request asked for it.

        Raises:
            GuideLost: the guide cannot constrain the token after this one.
        """
        self.tokens.append(token)
        events = self._reply.feed(token, scored, surprisal)
        self.generation.hold(events)
        has_ended = bool(events) and isinstance(events[-1], Finished)
        if self._guided and self._guided.lost and not has_ended:
            raise ConstraintViolated(self._guided.lost)
        return has_ended


class Sampled(NamedTuple):
    """A new token of a sequence.

    Attributes:
        surprisal: in bits, see `engine.sampler`.
        scored: its log-probability, if the request asked for it.
    """

    sequence: EngineSequence
    token: int
    surprisal: float
    scored: TokenLogprobs | None
