"""Handles one request and its reply: binds the prompt before it is computed, records the reply at its end.

`Transcripts.begin` returns a `Turn`. The service calls `record_submitted` when the prompt is submitted,
`note_prefilled`, `add_generated_tokens` and `add_output` while the request runs, `record_reply` when the
reply is finished, and in any case `note_delivered`.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from start_llm.core.canonical import CanonicalMessage, Conversation, exact_after, reasoning_digest
from start_llm.core.chat import KeptReasoning, Message
from start_llm.core.events import Finished, Output, Restored
from start_llm.core.explanation import Against, Explanation
from start_llm.core.images import FIRST_IMAGE_TOKEN, HIDDEN_IMAGE
from start_llm.core.prompt import ModelTokens, Prompt
from start_llm.telemetry.metrics import TranscriptMetrics
from start_llm.transcripts.bind import BoundPrompt, Encode, PromptBinder, fresh, record_prompt
from start_llm.transcripts.explain import (
    ExplainedPrompt,
    count_recomputed,
    differences,
    is_shown_otherwise,
)
from start_llm.transcripts.guard import Claims, ConversationNames, Guard, MessageDetails
from start_llm.transcripts.prefix_history import PrefixHistory
from start_llm.transcripts.reasoning_store import ReasoningStore, RecordedReasoning
from start_llm.transcripts.recent import ComputedRequest, RecentConversations
from start_llm.transcripts.reply_echo import ReplyEcho
from start_llm.transcripts.turn_store import PrefixNode, TranscriptStore, Variant

_LOOKED_AT = 4
"""So many tokens hold the beginning of the last character, which has four bytes at most."""
_EQUAL_TO_NONE = b""
"""The exact name of a conversation whose reasoning only a proof restores."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcripts:
    """The records of all conversations. Safe to use from any thread.

    Attributes:
        reasoning_texts: reasoning for clients that do not send it back.
        seen: all prefixes that were ever computed, even if their tokens are gone.
        names: knows which conversation names stand for a single conversation.
        recent: the requests computed last, for explanations.
        canonical_reply: makes the canonical form of a reply, for comparing it when it is sent back.
        token_bytes: returns the bytes of a token id.
        encode: tokenises a text, for notes.
        kept_reasoning: `true`: bound prefixes keep reasoning that the fresh rendering no longer shows;
            `template`: they do not; `false`: replies with reasoning are not recorded.
        takes_proof: values that a key leaves out may differ if the recorded ones are proven to be the
            conversation's own; if false, every such value must be equal byte for byte.
        is_changed: whether a prompt shows a reply otherwise than the model wrote it; the tokens of such a
            reply are not recorded, so it is rendered fresh.
    """

    store: TranscriptStore
    reasoning_texts: ReasoningStore
    seen: PrefixHistory
    names: ConversationNames
    recent: RecentConversations
    metrics: TranscriptMetrics
    canonical_reply: Callable[[Message], CanonicalMessage]
    token_bytes: Callable[[int], bytes]
    encode: Encode
    kept_reasoning: KeptReasoning = "true"
    takes_proof: bool = True
    is_changed: Callable[[Message], bool] = lambda _: False

    def restore_reasoning(self, conversation: Conversation, replies: Sequence[int]) -> list[str | None]:
        """Return the reasoning of these replies, which the client did not send; None where unknown."""
        name = self._proving(conversation)
        return [self.reasoning_texts.get(conversation, index, name) for index in replies]

    def _proving(self, conversation: Conversation) -> str | None:
        return self.names.proving(conversation) if self.takes_proof else None

    def begin(self, prompt: Prompt, window: int) -> Turn:
        """Bind a prompt and return its turn.

        Args:
            window: context window in tokens. If only the bound prompt exceeds it, the fresh one is taken.
        """
        conversation = prompt.conversation
        if conversation is None:
            bound = BoundPrompt(prompt.tokens.ids, prompt.boundaries, ())
            return Turn(self, prompt, bound, 0, PrefixMatch(), -1)
        guard = Guard(
            conversation,
            self._proving(conversation),
            takes_proof=self.takes_proof,
            keeps_reasoning=self.kept_reasoning == "true",
        )
        ids = prompt.tokens.ids
        images = {run.tokens[0]: run for run in prompt.images}
        binder = PromptBinder(self.store, conversation, guard, self.encode, images)
        bound = binder.bind(ids, prompt.boundaries)
        refusal = _refusal(bound, len(ids), window)
        seen = self.seen.depth(conversation.keys)
        # Number of tokens of the fresh rendering up to the last message that was computed before.
        old = max((one.tokens for one in prompt.boundaries if one.message < seen), default=0)
        chosen = fresh(conversation, ids, prompt.boundaries) if refusal or not bound else bound
        chosen = self._with_origins(conversation, chosen)
        repeated_tokens = max(len(chosen.ids) - (len(ids) - old), 0)
        proven = guard.proven(bound.prefix) if bound and bound.prefix else -1
        return Turn(self, prompt, chosen, repeated_tokens, PrefixMatch.of(chosen, seen, refusal), proven)

    def _with_origins(self, conversation: Conversation, bound: BoundPrompt) -> BoundPrompt:
        """Mark restored reasoning that the model wrote behind other words: without a proof it is nobody's."""
        first = bound.prefix.depth + 1 if bound.prefix else 0
        details = list(bound.details)
        for depth, (message, one) in enumerate(zip(conversation.messages, details, strict=True)):
            if depth >= first and one.reasoning is not None and one.is_ours:
                is_ours = self.reasoning_texts.is_drawn_behind(
                    message.key, message.exact, conversation.name, one.reasoning
                )
                details[depth] = one._replace(is_ours=is_ours)
        return replace(bound, details=tuple(details))

    def nearest(self, conversation: Conversation) -> ComputedRequest | None:
        """Return the last computed request that is known to be of this conversation, or None."""
        return self.recent.nearest(conversation, self._proving(conversation))

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, markup included."""
        pieces = (
            HIDDEN_IMAGE.encode() if is_image else b"".join(map(self.token_bytes, run))
            for is_image, run in groupby(ids, FIRST_IMAGE_TOKEN.__le__)
        )
        return b"".join(pieces).decode(errors="replace")


class _Reply(NamedTuple):
    """A reply in a form that a client may send back, and its canonical form."""

    message: Message
    canonical: CanonicalMessage


class Turn:
    """One request and its reply.

    Attributes:
        tokens, boundaries: the tokens to compute, and the ends of messages in them.
        resume_positions: token positions at which other requests may resume.
        repeated_tokens: number of tokens that stand for messages which were computed before, with the same
            tokens or others.
        prefix_match: how much of the prompt was found in the store.
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
        self._request = prompt
        self._conversation = prompt.conversation
        self._against = transcripts.nearest(prompt.conversation) if prompt.conversation else None
        self._proven = proven
        self._computed: ComputedRequest | None = None
        self._bound = bound
        self._beginning = _beginning(prompt, bound)
        self._prompt: Variant | None = None
        self._written: list[int] = []
        self._said = ReplyEcho.begun_with(prompt.begun_reply)
        self._claims = Claims(prompt.conversation.names if prompt.conversation else {}, is_delivered=True)
        self._has_left = False
        self._messages_read = 0
        self.tokens = ModelTokens(bound.ids)
        self.boundaries = bound.boundaries
        self.resume_positions = tuple(bound.resume_positions())
        self.repeated_tokens = repeated_tokens
        self.prefix_match = prefix_match

    @property
    def reply_length(self) -> int:
        """Number of tokens that the model has written."""
        return len(self._written)

    def texts(self) -> tuple[str, str]:
        """Return the prompt as the model reads it and the reply as the model wrote it, both with markup."""
        return self._transcripts.text(self.tokens.ids), self._transcripts.text(self._written)

    def record_submitted(self, reply_name: str = "") -> None:
        """Record the prompt as it is submitted, so that other requests can go on from it.

        Args:
            reply_name: random name that the client receives with the reply (`core.ids`).
        """
        if self._conversation is None:
            return
        self._claims.ids |= dict.fromkeys(filter(None, [reply_name]))
        self._prompt = record_prompt(self._transcripts.store, self._conversation, self._bound)
        prefix = self._bound.prefix
        self._transcripts.metrics.note_binding(
            prefix.length if prefix else 0,
            self._bound.replaced_tokens,
            self.prefix_match.refusal,
            self._bound.note_tokens,
        )
        bare = [one for one in self._conversation.messages if one.role == "assistant" and one.echoed is None]
        self._transcripts.reasoning_texts.use(one.key for one in bare)
        self._transcripts.metrics.note_restored_reasoning(sum(one.shown is not None for one in bare))
        self._note_computed(self._conversation)

    def note_prefilled(self, tokens: int) -> None:
        """Note that the first `tokens` tokens are computed, and so the messages that end there."""
        if self._conversation is None or self._messages_read == len(self._conversation.messages):
            return
        whole = len(self.tokens) - 1
        ends = (one.message + 1 for one in self.boundaries if one.tokens <= tokens)
        count = len(self._conversation.messages) if tokens >= whole else max(ends, default=0)
        if count > self._messages_read:
            self._transcripts.seen.note(*self._conversation.keys[self._messages_read : count])
            self._messages_read = count

    def explain(self, restored: Restored) -> Explanation:
        """Explain how much of this prompt is known and how it differs from the conversation's last request.

        Args:
            restored: what the cache has of the prompt.
        """
        against, asked, prefix_match = self._against, self._request, self.prefix_match
        found = Explanation(
            prompt_tokens=len(self.tokens),
            bound_messages=prefix_match.messages,
            bound_tokens=prefix_match.tokens,
            refusal=prefix_match.refusal,
            restored=restored,
        )
        if against is None or self._conversation is None:
            return found
        fresh_rendering = ExplainedPrompt(self._conversation, asked.tokens.ids, asked.boundaries)
        to_read = ExplainedPrompt(self._conversation, self.tokens.ids, self.boundaries)
        explained = replace(
            found,
            again=count_recomputed(against, to_read, restored.tokens),
            against=Against(messages=against.messages, tokens=len(against.ids)),
            differences=tuple(differences(against, fresh_rendering, self._transcripts.text)),
        )
        if not explained.lost or explained.differences:
            return explained
        return replace(explained, is_shown_otherwise=is_shown_otherwise(against, self.tokens.ids))

    def _note_computed(
        self, conversation: Conversation, replies: Sequence[_Reply] = (), claims: Claims | None = None
    ) -> None:
        """Remember this request, to compare the conversation's next one with it."""
        details = self._bound.details
        reasoning = reasoning_digest(replies[0].message.reasoning) if replies else None
        computed = ComputedRequest(
            conversation=conversation,
            ids=array("I", (*self.tokens.ids, *self._written)),
            boundaries=self.boundaries,
            reasoning_texts=(*(reading.reasoning for reading in details), reasoning),
            note_tokens=[reading.note_tokens for reading in details],
            reply=tuple(reply.canonical for reply in replies),
            claims=claims,
        )
        self._transcripts.recent.note(computed, instead_of=self._computed)
        self._computed = computed

    def add_generated_tokens(self, tokens: Sequence[int]) -> None:
        """Add tokens that the model has written."""
        self.note_prefilled(len(self.tokens))
        self._written += tokens

    def add_output(self, output: Output) -> None:
        """Add an event that was sent to the client."""
        self._said.add(output)

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
        self._claims.reply_surprisal_bits, self._claims.reasoning_surprisal_bits = (
            reply_surprisal_bits,
            reasoning_surprisal_bits,
        )
        self.note_delivered()
        if self._conversation is None or not is_whole or end.stop is not None or end.cut_by:
            return
        # Leave out the eos token: the next rendering writes its own closer, which may be another token.
        written = self._written[:-1] if end.ended_itself else self._as_sent(self._written)
        if written is None:
            return
        for reply in self._replies():
            self._record(self._conversation, reply, written)

    def _as_sent(self, written: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens of a reply that was cut inside a character as the next request will have them.

        The client received U+FFFD in place of that character. The tokens before it stay as they are. None if
        the tokenizer writes something else for that text alone, such as a space before it.
        """
        token_bytes, cut = self._transcripts.token_bytes, len(written)
        while cut and _ends_inside_character(
            b"".join(map(token_bytes, written[max(cut - _LOOKED_AT, 0) : cut]))
        ):
            cut -= 1
        if cut == len(written):
            return written
        sent = b"".join(map(token_bytes, written[cut:])).decode(errors="replace")
        replacement = self._transcripts.encode(sent)
        if b"".join(map(token_bytes, replacement)) != sent.encode():
            return None
        return (*written[:cut], *replacement)

    def note_delivered(self) -> None:
        """Remember what the client received, whole or cut off, to recognise it when it is sent back."""
        if self._conversation is None or self._has_left:
            return
        self._has_left = True
        self._claims.ids |= dict.fromkeys(self._said.ids)
        replies = self._replies(drops_calls=True)
        if replies:
            self._transcripts.names.note(self._conversation, self._proven)
            self._note_computed(self._conversation, replies, self._claims)

    def _replies(self, *, drops_calls: bool = False) -> list[_Reply]:
        """Return the reply in each form that a client may send back; empty if no request can hold it."""
        messages = self._said.messages(drops_calls=drops_calls)
        try:
            return [_Reply(message, self._transcripts.canonical_reply(message)) for message in messages]
        except RecursionError:  # a call's arguments are nested too deeply: such a request is refused
            return []

    def _record(self, conversation: Conversation, reply: _Reply, written: Sequence[int]) -> None:
        message, canonical = reply
        transcripts, reasoning = self._transcripts, reasoning_digest(message.reasoning)
        key = conversation.messages[-1].key.with_message(canonical)
        transcripts.seen.note(key)
        begins_as_drawn = self._begins_as_drawn(conversation)
        if message.reasoning and reasoning:
            if transcripts.kept_reasoning == "false":
                return
            is_drawn = begins_as_drawn and _reads_its_words(conversation, self._bound)
            exact = exact_after(conversation, canonical) if is_drawn else _EQUAL_TO_NONE
            transcripts.reasoning_texts.keep(key, RecordedReasoning(message.reasoning, exact, self._claims))
        if self._beginning is None or transcripts.is_changed(message):
            return
        tokens = array("I", (*self._beginning, *written))
        is_ours = begins_as_drawn and not conversation.transient
        transcripts.store.add(
            PrefixNode(key, len(conversation.messages), len(tokens)),
            tokens,
            (*self._bound.details, MessageDetails(canonical.omitted, reasoning, is_ours)),
            parent=self._prompt,
            claims=self._claims,
            session=conversation.session,
        )

    def _begins_as_drawn(self, conversation: Conversation) -> bool:
        """Return whether no reasoning of the reply's beginning is the client's, or of other words."""
        begun, transcripts = self._request.begun_reply, self._transcripts
        if begun is None or not begun.reasoning:
            return True
        canonical = transcripts.canonical_reply(begun)
        return transcripts.reasoning_texts.is_drawn_behind(
            conversation.messages[-1].key.with_message(canonical),
            exact_after(conversation, canonical),
            conversation.name,
            reasoning_digest(begun.reasoning),
        )


def _reads_its_words(conversation: Conversation, bound: BoundPrompt) -> bool:
    """Return whether the model reads what the conversation says now, and no reasoning of other words."""
    return all(
        one.omitted == message.omitted
        and not one.told
        and (one.is_ours or one.reasoning in (None, message.echoed))
        for one, message in zip(bound.details, conversation.messages, strict=True)
    )


def _ends_inside_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])


def _refusal(bound: BoundPrompt | None, unbound: int, window: int) -> str | None:
    """Return why the bound prompt cannot be used: `costly`, `too_long`, or None if it can.

    Args:
        unbound: number of tokens of the fresh rendering.
    """
    if bound is None:
        return "costly"
    is_too_long = bound.prefix is not None and len(bound.ids) >= window > unbound
    return "too_long" if is_too_long else None


def _beginning(prompt: Prompt, bound: BoundPrompt) -> tuple[int, ...] | None:
    """Return the tokens that will precede the reply in the next prompt, or None if they cannot be told."""
    if not prompt.has_transient:
        return bound.ids
    if prompt.lasting_end is None:
        return None
    end = bound.boundaries[-1].tokens if bound.boundaries else 0
    return (*bound.ids[:end], *prompt.lasting_end)
