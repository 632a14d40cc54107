"""From sampled tokens to the events of one reply. A state machine without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from start_llm.core.events import Finished, FinishReason, Text, TokenLogprobs, Usage
from start_llm.core.job import Job
from start_llm.engine.detokenize import Detokenizer
from start_llm.engine.thought import ThoughtWatch


class ReplyWriter:
    """Decodes tokens, looks for the end of the reply, and says when it has come.

    Args:
        job: its limit ends the reply, and so do `end_tokens`.
        token_bytes: the bytes that a token id stands for.
        cached: prompt tokens that are not computed.

    Attributes:
        produced: tokens fed so far.
        dictated: tokens that must be fed next, whatever the model would say. Whoever feeds one takes it out.
    """

    def __init__(
        self,
        job: Job,
        token_bytes: Callable[[int], bytes],
        end_tokens: frozenset[int],
        *,
        cached: int = 0,
    ) -> None:
        self._job = job
        self._cached = cached
        self._end_tokens = end_tokens
        self._detokenizer = Detokenizer(token_bytes, trims_leading_space=job.trims_leading_space)
        self._unsent_tokens: list[int] = []
        self._unsent_logprobs: list[TokenLogprobs] = []
        self._unsent_surprisal = 0.0
        self._thought = ThoughtWatch(job.thought) if job.thought else None
        self.produced = 0
        self.dictated: deque[int] = deque()

    def feed(
        self, token: int, logprobs: TokenLogprobs | None = None, surprisal: float = 0.0
    ) -> list[Text | Finished]:
        """The events that one more token causes; the last of them is `Finished` if it ends the reply."""
        self.produced += 1
        self._unsent_tokens.append(token)
        self._unsent_surprisal += surprisal
        if token in self._end_tokens:
            return self._finish(self._detokenizer.close(), "stop")
        if logprobs is not None:
            self._unsent_logprobs.append(logprobs)
        text = self._decode(token)
        if self.produced >= self._job.max_tokens:
            return self._finish_at_limit(text)
        return [self._take(text)] if text else []

    def _decode(self, token: int) -> str:
        text = self._detokenizer.feed(token)
        if self._thought:
            is_inside_character = self._detokenizer.is_inside_character
            self.dictated.extend(self._thought.feed(text, is_inside_character=is_inside_character))
        return text

    def cut(self) -> list[Text | Finished]:
        """The events of a reply that ends here, whatever it has come to."""
        *texts, end = self._finish_at_limit("")
        return [*texts, replace(cast("Finished", end), was_cut=True)]

    def _finish_at_limit(self, text: str) -> list[Text | Finished]:
        return self._finish(text + self._detokenizer.close(), "length")

    def _finish(self, text: str, reason: FinishReason) -> list[Text | Finished]:
        usage = Usage(prompt=len(self._job.prompt), cached=self._cached, completion=self.produced)
        return [self._take(text), Finished(reason, usage)]

    def _take(self, text: str) -> Text:
        tokens, logprobs = tuple(self._unsent_tokens), tuple(self._unsent_logprobs)
        piece = Text(text, tokens, logprobs, self._unsent_surprisal)
        self._unsent_surprisal = 0.0
        self._unsent_tokens.clear()
        self._unsent_logprobs.clear()
        return piece
