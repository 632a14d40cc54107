"""Handles one request and its reply: binds the prompt before it is computed, records the reply at its end.

`serving.service` calls `Turn.begin`, and `record_submitted` when the prompt is submitted. `serving.answer`
calls `note_prefilled`, `add_generated_tokens` and `add_output` while the request runs, `record_reply` when
the reply is finished, and in any case `note_delivered`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from start_llm.core.canonical import Conversation, reasoning_digest
from start_llm.core.chat import Message
from start_llm.core.events import Finished, Output, Restored
from start_llm.core.explanation import Against, Explanation
from start_llm.core.prompt import ModelTokens, Prompt
from start_llm.core.prompt_report import Divergence
from start_llm.transcripts.bind import BoundPrompt, PromptBinder, fresh, record_prompt
from start_llm.transcripts.divergence import AnsweredRequest, diverges, last_end
from start_llm.transcripts.explain import (
    ExplainedPrompt,
    count_recomputed,
    differences,
    is_shown_otherwise,
)
from start_llm.transcripts.guard import Guard
from start_llm.transcripts.recent import ComputedRequest
from start_llm.transcripts.recorded_details import Claims
from start_llm.transcripts.transcript_store import Variant
from start_llm.transcripts.transcripts import Transcripts
from start_llm.transcripts.written_reply import ReplyForm, WrittenReply


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The part of a request that was found in the store, for statistics, traces and explanations.

    Attributes:
        seen: number of messages at its beginning that were computed before, with the same tokens or others.
        messages, tokens: numbers at the beginning of the prompt that are taken as recorded.
        replaced_tokens: number of tokens of the fresh rendering that these replace.
        refusal: why recorded tokens were not taken, or None.
    """

    seen: int = 0
    messages: int = 0
    tokens: int = 0
    replaced_tokens: int = 0
    refusal: str | None = None

    @classmethod
    def of(cls, bound: BoundPrompt, seen: int, refusal: str | None) -> PrefixMatch:
        prefix = bound.prefix
        if prefix is None:
            return cls(seen=seen, refusal=refusal)
        return cls(
            seen=seen, messages=prefix.depth + 1, tokens=prefix.length, replaced_tokens=bound.replaced_tokens
        )


class Turn:
    """One request and its reply.

    Attributes:
        tokens, boundaries: the tokens to compute, and the ends of messages in them.
        resume_positions: token positions at which other requests may resume.
        repeated_tokens: number of tokens that stand for messages which were computed before, with the same
            tokens or others.
        prefix_match: how much of the prompt was found in the store.
        kept: the beginnings of `tokens` that the client asks to keep; of 0 tokens where one is not known.
        note: the place in `tokens` of the note that this request adds; empty if it adds none.
    """

    def __init__(
        self,
        transcripts: Transcripts,
        prompt: Prompt,
        bound: BoundPrompt,
        repeated_tokens: int,
        prefix_match: PrefixMatch,
        proven: int,
    ) -> None:
        self._transcripts = transcripts
        self._prompt = prompt
        self._conversation = prompt.conversation
        self._against = transcripts.nearest(prompt.conversation) if prompt.conversation else None
        self._proven = proven
        self._computed: ComputedRequest | None = None
        self._bound = bound
        self._recorded_prompt: Variant | None = None
        self._reply = WrittenReply(transcripts, prompt, bound)
        self._has_reply = False
        self._is_delivered = False
        self._messages_read = 0
        self.tokens = ModelTokens(bound.ids)
        self.boundaries = bound.boundaries
        self.resume_positions = tuple(bound.resume_positions())
        self.repeated_tokens = repeated_tokens
        self.prefix_match = prefix_match
        self.note = range(bound.before_note, bound.before_note + bound.note_tokens)
        self.kept = tuple(place._replace(tokens=self._position(place.tokens)) for place in prompt.kept)

    @classmethod
    def begin(cls, transcripts: Transcripts, prompt: Prompt, window: int) -> Turn:
        """Bind a prompt and return its turn.

        Args:
            window: context window in tokens. If only the bound prompt exceeds it, the fresh one is taken.
        """
        conversation = prompt.conversation
        if conversation is None:
            bound = BoundPrompt(prompt.tokens.ids, prompt.boundaries, ())
            return cls(transcripts, prompt, bound, 0, PrefixMatch(), -1)
        guard = Guard(
            conversation,
            transcripts.proving(conversation),
            takes_proof=transcripts.takes_proof,
            keeps_reasoning=transcripts.kept_reasoning == "true",
        )
        ids = prompt.tokens.ids
        images = {run.tokens[0]: run for run in prompt.images}
        binder = PromptBinder(transcripts.store, conversation, guard, transcripts.encode, images)
        bound = binder.bind(ids, prompt.boundaries)
        refusal = _refusal(bound, len(ids), window)
        seen = transcripts.seen.depth(conversation.keys)
        # Number of tokens of the fresh rendering up to the last message that was computed before.
        old = max((boundary.tokens for boundary in prompt.boundaries if boundary.message < seen), default=0)
        chosen = fresh(conversation, ids, prompt.boundaries) if refusal or not bound else bound
        chosen = _with_origins(transcripts, conversation, chosen)
        repeated_tokens = max(len(chosen.ids) - (len(ids) - old), 0)
        proven = guard.proven(bound.prefix) if bound and bound.prefix else -1
        match = PrefixMatch.of(chosen, seen, refusal)
        return cls(transcripts, prompt, chosen, repeated_tokens, match, proven)

    def _position(self, tokens: int) -> int:
        """Return where a position of the fresh rendering is in the tokens to compute.

        It is 0 if recorded tokens stand there, and are others.
        """
        fresh_ids, ids = self._prompt.tokens.ids, self.tokens.ids
        ends = {boundary.message: boundary.tokens for boundary in self.boundaries}
        common = (boundary for boundary in reversed(self._prompt.boundaries) if boundary.message in ends)
        before = next((boundary for boundary in common if boundary.tokens <= tokens), None)
        known, start = (before.tokens, ends[before.message]) if before else (0, 0)
        end = start + tokens - known
        return end if ids[start:end] == fresh_ids[known:tokens] else 0

    @property
    def transient_messages(self) -> int:
        """Number of messages at the end that the next request will not have."""
        return len(self._conversation.transient) if self._conversation else 0

    @property
    def reply_length(self) -> int:
        """Number of tokens that the model has written."""
        return len(self._reply.tokens)

    def texts(self) -> tuple[str, str]:
        """Return the prompt as the model reads it and the reply as the model wrote it, both with markup."""
        return self._transcripts.text(self.tokens.ids), self._transcripts.text(self._reply.tokens)

    def record_submitted(self, reply_name: str = "") -> None:
        """Record the prompt as it is submitted, so that other requests can go on from it.

        Args:
            reply_name: random name that the client receives with the reply (`core.ids`).
        """
        if self._conversation is None:
            return
        self._reply.claims.ids |= dict.fromkeys(filter(None, [reply_name]))
        self._recorded_prompt = record_prompt(self._transcripts.store, self._conversation, self._bound)
        prefix = self._bound.prefix
        self._transcripts.metrics.note_binding(
            prefix.length if prefix else 0,
            self._bound.replaced_tokens,
            self.prefix_match.refusal,
            self._bound.note_tokens,
        )
        replies = (message for message in self._conversation.messages if message.role == "assistant")
        bare = [reply for reply in replies if reply.echoed is None]
        self._transcripts.reasoning_texts.use(reply.key for reply in bare)
        self._transcripts.metrics.note_restored_reasoning(sum(reply.shown is not None for reply in bare))
        self._note_computed(self._conversation)

    def note_prefilled(self, tokens: int) -> None:
        """Note that the first `tokens` tokens are computed, and so the messages that end there."""
        if self._conversation is None or self._messages_read == len(self._conversation.messages):
            return
        whole = len(self.tokens) - 1
        ends = (boundary.message + 1 for boundary in self.boundaries if boundary.tokens <= tokens)
        count = len(self._conversation.messages) if tokens >= whole else max(ends, default=0)
        if count > self._messages_read:
            self._transcripts.seen.note(*self._conversation.keys[self._messages_read : count])
            self._messages_read = count

    def explain(self, restored: Restored) -> Explanation:
        """Explain how much of this prompt is known and how it differs from the conversation's last request.

        Args:
            restored: what the cache has of the prompt.
        """
        against, asked, prefix_match = self._against, self._prompt, self.prefix_match
        explanation = Explanation(
            prompt_tokens=len(self.tokens),
            bound_messages=prefix_match.messages,
            bound_tokens=prefix_match.tokens,
            refusal=prefix_match.refusal,
            restored=restored,
        )
        if against is None or self._conversation is None:
            return explanation
        fresh_rendering = ExplainedPrompt(self._conversation, asked.tokens.ids, asked.boundaries)
        to_read = ExplainedPrompt(self._conversation, self.tokens.ids, self.boundaries)
        explained = replace(
            explanation,
            again=count_recomputed(against, to_read, restored.tokens),
            against=Against(messages=against.messages, tokens=len(against.ids)),
            differences=tuple(differences(against, fresh_rendering, self._transcripts.text)),
        )
        if not explained.lost or explained.differences:
            return explained
        return replace(explained, is_shown_otherwise=is_shown_otherwise(against, self.tokens.ids))

    def divergence(self, before: AnsweredRequest, model: str) -> Divergence | None:
        """Return where this prompt leaves an earlier request, which its client has named; None: nowhere.

        Args:
            model: which model and which adapters read it.
        """
        if self._conversation is None:
            return None
        end = self.note.start if self.note else last_end(self.boundaries)
        return diverges(before, model, self._conversation, self.tokens.ids, end)

    @property
    def computed(self) -> ComputedRequest | None:
        """The request with what was sent of its reply; None if it has no messages, or was not submitted."""
        return self._computed

    def _note_computed(
        self, conversation: Conversation, replies: Sequence[ReplyForm] = (), claims: Claims | None = None
    ) -> None:
        """Remember this request, to compare the conversation's next one with it."""
        details = self._bound.details
        reasoning = reasoning_digest(replies[0].message.reasoning) if replies else None
        computed = ComputedRequest(
            conversation=conversation,
            ids=array("I", (*self.tokens.ids, *self._reply.tokens)),
            boundaries=self.boundaries,
            reasoning_digests=(*(reading.reasoning for reading in details), reasoning),
            note_tokens=[reading.note_tokens for reading in details],
            reply=tuple(reply.canonical for reply in replies),
            claims=claims,
        )
        self._transcripts.recent.note(computed, instead_of=self._computed)
        self._computed = computed

    def add_generated_tokens(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model has written."""
        self.note_prefilled(len(self.tokens))
        self._reply.tokens += tokens

    def add_output(self, output: Output) -> None:
        """Add an event that was sent to the client."""
        self._reply.add_output(output)

    def record_reply(
        self,
        end: Finished,
        *,
        is_whole: bool,
        reply_surprisal_bits: float = 0,
        reasoning_surprisal_bits: float = 0,
    ) -> None:
        """Record the reply, if the client can send back everything that the model wrote.

        Args:
            is_whole: the reply ends outside of reasoning and calls, and no call was repaired: the next prompt
                shows the model the call as the client has it.
            reply_surprisal_bits, reasoning_surprisal_bits: surprisal of the visible reply and of its
                reasoning in bits, see `OutputStream`.
        """
        claims = self._reply.claims
        claims.reply_surprisal_bits = reply_surprisal_bits
        claims.reasoning_surprisal_bits = reasoning_surprisal_bits
        self.note_delivered()
        self._has_reply = self._conversation is not None and not end.cut_by
        if self._conversation is None or not is_whole or end.stop is not None or end.cut_by:
            return
        self._reply.record(self._conversation, end, self._recorded_prompt)

    def take_reply(self) -> Message | None:
        """Return the reply as its client will send it back, once, recorded or not; None if nobody knows how,
        or if it has not ended.
        """
        has_reply, self._has_reply = self._has_reply, False
        return self._reply.sent() if has_reply else None

    def note_delivered(self) -> None:
        """Remember what the client received, whole or cut off, to recognise it when it is sent back."""
        if self._conversation is None or self._is_delivered or not self.reply_length:
            return
        self._is_delivered = True
        self._reply.note_ids()
        replies = self._reply.forms(drops_calls=True)
        if replies:
            self._transcripts.names.note(self._conversation, self._proven)
            self._note_computed(self._conversation, replies, self._reply.claims)


def _with_origins(transcripts: Transcripts, conversation: Conversation, bound: BoundPrompt) -> BoundPrompt:
    """Mark restored reasoning that the model wrote behind other words: without a proof it is nobody's."""
    first = bound.prefix.depth + 1 if bound.prefix else 0
    details = list(bound.details)
    for depth, (message, reading) in enumerate(zip(conversation.messages, details, strict=True)):
        if depth >= first and reading.reasoning is not None and reading.is_ours:
            is_ours = transcripts.reasoning_texts.is_drawn_behind(
                message.key, message.exact, conversation.name, reading.reasoning
            )
            details[depth] = reading._replace(is_ours=is_ours)
    return replace(bound, details=tuple(details))


def _refusal(bound: BoundPrompt | None, unbound: int, window: int) -> str | None:
    """Return why the bound prompt cannot be used: `costly`, `too_long`, or None if it can.

    Args:
        unbound: number of tokens of the fresh rendering.
    """
    if bound is None:
        return "costly"
    is_too_long = bound.prefix is not None and len(bound.ids) >= window > unbound
    return "too_long" if is_too_long else None
