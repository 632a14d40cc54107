"""A sequence on the engine thread: its tokens, caches, sampling and reply."""

from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from start_llm.cache.pages import SequenceCache
from start_llm.core.adapters import AdapterStack
from start_llm.core.events import Failed, Finished, TokenLogprobs
from start_llm.engine.draft_index import FORCED, Draft, DraftIndex
from start_llm.engine.earlier_texts import EarlierTexts
from start_llm.engine.generation import Generation
from start_llm.engine.guided import GuidedLogits
from start_llm.engine.prompt_images import PromptImages
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.engine.sampler import Chooser, make_processors


class EngineSequence:
    """Tokens, caches and sampling state of one sequence.

    While it waits to start or is preempted, its caches hold the KV of a beginning of `tokens[:-1]`: all of
    it, unless it was preempted in mid-prompt or while a draft was verified. The last token has not been fed.

    Args:
        earlier: the earlier texts of its tenant, for drafts; its own new text is added at its end. None: they
            are neither searched nor extended.

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
        earlier: EarlierTexts | None = None,
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
        self._drafts: DraftIndex | None = None
        self._earlier = earlier
        self._known = max(len(seq_cache.tokens), request.repeated_tokens)  # tokens of earlier requests
        self._run_time_s = 0.0
        self._has_failed = False

    @property
    def number(self) -> int:
        """The number of its request; see `engine.generation`."""
        return self.generation.number

    @property
    def adapters(self) -> AdapterStack:
        return self.generation.request.adapters

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

    def draft(self, most: int) -> Draft | None:
        """Return up to `most` tokens that may come next; None if nothing like the last ones occurred before.

        Also None where tokens are forced.
        """
        return None if self.forced_tokens else self._find_draft(self._index(), most)

    def draft_after(self, new: Sequence[int], lengths: Sequence[int]) -> Draft | None:
        """Return what to draft after new tokens, which have not been accepted yet. None if there is nothing.

        It ends before the reply does, and before tokens may be forced.

        Args:
            lengths: most tokens by class of match.
        """
        if self.forced_tokens or self._reply.ends_at(new[-1]):
            return None
        index = self._index()
        index.extend(new)
        forced = self._guided.foresee(self._unguided(self._guided.known, new)) if self._guided else ()
        draft = Draft(tuple(forced), FORCED) if forced else self._find_draft(index, max(lengths))
        if draft is None:
            return None
        most = int(min(lengths[draft.match], max(self._reply.tokens_ahead - len(new) - 1, 0)))
        tokens = tuple(takewhile(lambda token: not self._reply.ends_at(token), draft.tokens[:most]))
        if self._guided:
            tokens = tokens[: self._guided.count_allowed(tokens)]
        return Draft(tokens, draft.match) if tokens else None

    def _find_draft(self, index: DraftIndex, most: int) -> Draft | None:
        """Return what followed the longest match with the last tokens, here or in earlier conversations."""
        if self._earlier is None:
            return index.find(most)
        return self._earlier.find_longest(self.generation.request.salt, index, most)

    def leave_text(self) -> None:
        """Give the later sequences of its tenant what is new in this one, which has ended."""
        if self._earlier is not None:
            self._earlier.add(self.generation.request.salt, self.network_ids[self._known :])

    def _unguided(self, known: int, new: Sequence[int]) -> Sequence[int]:
        """Return the tokens after the first `known` ones, with new ones that have not been accepted yet."""
        return [*self.tokens[known:], *new[max(known - len(self.tokens), 0) :]]

    def forget_draft(self, accepted: int = 0) -> None:
        """Forget the tokens of a draft but the first ones, which were accepted."""
        if self._guided:
            self._guided.go_back(len(self.tokens) + accepted)

    def _index(self) -> DraftIndex:
        """Return the index of all tokens that were accepted."""
        if self._drafts is None:
            self._drafts = DraftIndex(self.network_ids, self.generation.request.draft_texts)
        self._drafts.extend(self.tokens[len(self._drafts) :])
        return self._drafts

    def take_caches(self, caches: list[Any]) -> None:
        """Go on alone with these caches, which were taken out of a batch."""
        self.layer_caches, self.width = caches, 0
        self.seq_cache.set_caches(caches)

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

    def end_prewarm(self) -> None:
        """Tell that the prompt is read, and that nothing follows."""
        self.generation.emit(self._reply.end_of_prewarm())

    def accept(
        self,
        token: int,
        scored: TokenLogprobs | None = None,
        surprisal: float = 0.0,
        *,
        is_drafted: bool = False,
    ) -> bool:
        """Add the next token and hold its events until they are sent. Returns True if it ends the reply.

        Args:
            scored: its log-probability, if the request asked for it.
            is_drafted: a draft had guessed it.
        """
        self.tokens.append(token)
        if self._has_failed:
            return False
        events = self._reply.feed(token, scored, surprisal, is_drafted=is_drafted)
        self.generation.hold(events)
        has_ended = bool(events) and isinstance(events[-1], Finished)
        if self._guided and self._guided.is_lost_at(len(self.tokens)) and not has_ended:
            self._fail(self._guided.lost)
        return has_ended

    def _fail(self, reason: str) -> None:
        """Tell at once that the reply cannot go on: nothing is sent for it afterwards. The planner ends it
        with the next step, like one whose client has gone, so that followers, which have no guide, do too.
        """
        self._has_failed = True
        self.generation.emit(Failed(f"The engine failed: {reason}"))
        self.generation.cancel()


class Sampled(NamedTuple):
    """A new token of a sequence.

    Attributes:
        surprisal: in bits, see `engine.sampler`.
        scored: its log-probability, if the request asked for it.
        is_drafted: a draft had guessed it.
    """

    sequence: EngineSequence
    token: int
    surprisal: float
    scored: TokenLogprobs | None
    is_drafted: bool = False
