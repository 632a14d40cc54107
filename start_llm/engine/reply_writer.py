"""Turn sampled tokens into the events of one reply. A state machine without I/O."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Finished, FinishReason, Text, TokenLogprobs, Usage
from start_llm.engine.detokenize import Detokenizer
from start_llm.engine.reasoning_budget import ReasoningBudget


class ReplyWriter:
    """Decodes tokens, detects the end of the reply and reports it.

    Args:
        request: its `max_tokens` ends the reply, and so do `eos_token_ids`.
        token_bytes: returns the bytes of a token id.
        cached: prompt tokens that were restored from the cache.

    Attributes:
        produced: tokens fed so far.
        forced_tokens: tokens that must come next in place of sampled ones. Each goes when it is fed here, so
            that a step that fails loses none.
    """

    def __init__(
        self,
        request: EngineRequest,
        token_bytes: Callable[[int], bytes],
        eos_token_ids: frozenset[int],
        *,
        cached: int = 0,
    ) -> None:
        self._request = request
        self._cached = cached
        self._eos_token_ids = eos_token_ids
        self._detokenizer = Detokenizer(token_bytes, trims_leading_space=request.trims_leading_space)
        self._unsent_tokens: list[int] = []
        self._unsent_logprobs: list[TokenLogprobs] = []
        self._unsent_surprisal = 0.0
        self._unsent_drafted = 0
        self._reasoning = ReasoningBudget(request.reasoning) if request.reasoning else None
        self.produced = 0
        self.forced_tokens: deque[int] = deque()

    @property
    def tokens_ahead(self) -> float:
        """Tokens that can still be sampled before the reply ends at its limit or tokens may be forced."""
        left = self._request.max_tokens - self.produced
        return min(left, self._reasoning.tokens_left) if self._reasoning else left

    def ends_at(self, token: int) -> bool:
        """Return whether this token ends the reply."""
        return token in self._eos_token_ids

    def feed(
        self,
        token: int,
        logprobs: TokenLogprobs | None = None,
        surprisal: float = 0.0,
        *,
        is_drafted: bool = False,
    ) -> list[Text | Finished]:
        """Return the events that one more token causes; `Finished` is last if the token ends the reply."""
        self.produced += 1
        if self.forced_tokens:
            self.forced_tokens.popleft()
        self._unsent_tokens.append(token)
        self._unsent_surprisal += surprisal
        self._unsent_drafted += is_drafted
        if token in self._eos_token_ids:
            return self._finish(self._detokenizer.close(), "stop")
        if logprobs is not None:
            self._unsent_logprobs.append(logprobs)
        text = self._decode(token)
        if self.produced >= self._request.max_tokens:
            return self._finish_at_limit(text)
        return [self._take(text)] if text else []

    def _decode(self, token: int) -> str:
        text = self._detokenizer.feed(token)
        if self._reasoning:
            is_inside_character = self._detokenizer.is_inside_character
            self.forced_tokens.extend(self._reasoning.feed(text, is_inside_character=is_inside_character))
        return text

    def cut(self) -> list[Text | Finished]:
        """End the reply here, and return its last events."""
        *texts, end = self._finish_at_limit("")
        return [*texts, replace(cast("Finished", end), cut_by="deadline")]

    def end_of_prewarm(self) -> Finished:
        """Return the end of a request for which nothing is generated."""
        return Finished("length", self._usage)

    def _finish_at_limit(self, text: str) -> list[Text | Finished]:
        return self._finish(text + self._detokenizer.close(), "length")

    def _finish(self, text: str, reason: FinishReason) -> list[Text | Finished]:
        last = [self._take(text)] if text or self._unsent_tokens else []
        return [*last, Finished(reason, self._usage)]

    @property
    def _usage(self) -> Usage:
        return Usage(prompt=len(self._request.prompt), cached=self._cached, completion=self.produced)

    def _take(self, text: str) -> Text:
        tokens, logprobs = tuple(self._unsent_tokens), tuple(self._unsent_logprobs)
        piece = Text(text, tokens, logprobs, self._unsent_surprisal, self._unsent_drafted)
        self._unsent_surprisal, self._unsent_drafted = 0.0, 0
        self._unsent_tokens.clear()
        self._unsent_logprobs.clear()
        return piece
