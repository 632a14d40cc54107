"""One turn of a conversation: bound before it is computed, recorded when it has ended."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from start_llm.core.canonical import CanonicalMessage, Conversation, exact_after, thought_digest
from start_llm.core.chat import KeptThoughts, Message
from start_llm.core.events import Finished, Output, Restored
from start_llm.core.explanation import Against, Explanation
from start_llm.core.prompt import ModelTokens, Prompt
from start_llm.telemetry.metrics import TranscriptMetrics
from start_llm.transcripts.bind import Binder, Bound, Encode, fresh, record_prompt
from start_llm.transcripts.explain import Asked, again, differences
from start_llm.transcripts.guard import Claims, Guard, Names, Reading
from start_llm.transcripts.recent import Computed, RecentConversations
from start_llm.transcripts.said import Said
from start_llm.transcripts.seen import SeenConversations
from start_llm.transcripts.store import Place, TranscriptStore, Variant
from start_llm.transcripts.thoughts import Thought, ThoughtStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found for a request, for those who look on.

    Attributes:
        seen: messages at its beginning that were computed before, in these words or in others.
        messages, tokens: at the beginning of its prompt that are as they were recorded.
        replaced: tokens of the fresh rendering that these stand for.
        refusal: why what was recorded was not taken, if it was not.
    """

    seen: int = 0
    messages: int = 0
    tokens: int = 0
    replaced: int = 0
    refusal: str | None = None

    @classmethod
    def of(cls, bound: Bound, seen: int, refusal: str | None) -> Findings:
        prefix = bound.prefix
        if prefix is None:
            return cls(seen=seen, refusal=refusal)
        return cls(seen=seen, messages=prefix.depth + 1, tokens=prefix.length, replaced=bound.replaced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcripts:
    """What was computed, said and thought in all conversations. Safe to use from any thread.

    Attributes:
        seen: what was ever computed, whether or not anything of it is left.
        names: which of the names of conversations mean one.
        recent: what was computed last.
        canonical_reply: what is compared of a reply when it is sent back.
        token_bytes: the bytes that a token id stands for.
        encode: the tokens of a text, for notes.
        kept_thoughts: whether a bound prefix keeps what the model thought.
        takes_proof: what a key leaves out may differ where it is proven to be the conversation's own; if not,
            nothing is bound but what is equal byte for byte.
        is_changed: whether a prompt shows a reply otherwise than it was written: then it is rendered fresh.
    """

    store: TranscriptStore
    thoughts: ThoughtStore
    seen: SeenConversations
    names: Names
    recent: RecentConversations
    metrics: TranscriptMetrics
    canonical_reply: Callable[[Message], CanonicalMessage]
    token_bytes: Callable[[int], bytes]
    encode: Encode
    kept_thoughts: KeptThoughts = "true"
    takes_proof: bool = True
    is_changed: Callable[[Message], bool] = lambda _: False

    def heal(self, conversation: Conversation, replies: Sequence[int]) -> list[str | None]:
        """The thoughts of the replies at these indices, for a client that left them out."""
        name = self._proving(conversation)
        thoughts = [self.thoughts.get(conversation, index, name) for index in replies]
        self.metrics.note_healed(sum(thought is not None for thought in thoughts))
        return thoughts

    def _proving(self, conversation: Conversation) -> str | None:
        return self.names.proving(conversation) if self.takes_proof else None

    def begin(self, prompt: Prompt, window: int) -> Turn:
        """The tokens to compute for a prompt.

        Args:
            window: tokens that fit; where a bound prompt is too long, the fresh one is taken.
        """
        conversation = prompt.conversation
        if conversation is None:
            bound = Bound(prompt.tokens.ids, prompt.boundaries, ())
            return Turn(self, prompt, bound, 0, Findings(), -1)
        guard = Guard(
            conversation,
            self._proving(conversation),
            takes_proof=self.takes_proof,
            keeps_thoughts=self.kept_thoughts == "true",
        )
        ids = prompt.tokens.ids
        binder = Binder(self.store, conversation, guard, self.encode)
        bound = binder.bind(ids, prompt.boundaries)
        refusal = _refusal(bound, len(ids), window)
        seen = self.seen.depth(conversation.keys)
        # Tokens of the fresh rendering that stand for messages which were computed before.
        old = max((one.tokens for one in prompt.boundaries if one.message < seen), default=0)
        chosen = fresh(conversation, ids, prompt.boundaries) if refusal or not bound else bound
        known = max(len(chosen.ids) - (len(ids) - old), 0)
        proven = guard.proven(bound.prefix) if bound and bound.prefix else -1
        return Turn(self, prompt, chosen, known, Findings.of(chosen, seen, refusal), proven)

    def nearest(self, conversation: Conversation) -> Computed | None:
        """What was computed last of this conversation, if anything is known to be its own."""
        return self.recent.nearest(conversation, self._proving(conversation))

    def text(self, ids: Sequence[int]) -> str:
        """What these tokens say, markup included."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")


class _Reply(NamedTuple):
    """A reply as a client may send it back, and what is compared of it."""

    message: Message
    canonical: CanonicalMessage


class Turn:
    """One request and its reply.

    Attributes:
        tokens, boundaries: what is computed, and where messages end in it.
        checkpoints: numbers of its tokens at which others may go on.
        known: tokens that stand for messages which were computed before, in these words or in others.
        findings: where they come from.
    """

    def __init__(
        self,
        transcripts: Transcripts,
        prompt: Prompt,
        bound: Bound,
        known: int,
        findings: Findings,
        proven: int,
    ) -> None:
        self._transcripts = transcripts
        self._request = prompt
        self._conversation = prompt.conversation
        self._against = transcripts.nearest(prompt.conversation) if prompt.conversation else None
        self._proven = proven
        self._computed: Computed | None = None
        self._bound = bound
        self._beginning = _beginning(prompt, bound)
        self._prompt: Variant | None = None
        self._written: list[int] = []
        self._said = Said()
        self._claims = Claims(prompt.conversation.names if prompt.conversation else {}, is_told=True)
        self._has_left = False
        self._messages_read = 0
        self.tokens = ModelTokens(bound.ids)
        self.boundaries = bound.boundaries
        self.checkpoints = tuple(bound.checkpoints())
        self.known = known
        self.findings = findings

    @property
    def replied(self) -> int:
        """Tokens that the model has written."""
        return len(self._written)

    def texts(self) -> tuple[str, str]:
        """The prompt as the model reads it, and the reply as it writes it, markup included."""
        return self._transcripts.text(self.tokens.ids), self._transcripts.text(self._written)

    def asked(self, reply_name: str = "") -> None:
        """The prompt is being computed: others may go on from it.

        Args:
            reply_name: that the client is told with the reply (`core.ids`).
        """
        if self._conversation is None:
            return
        self._claims.ids |= dict.fromkeys(filter(None, [reply_name]))
        self._prompt = record_prompt(self._transcripts.store, self._conversation, self._bound)
        prefix = self._bound.prefix
        self._transcripts.metrics.note_binding(
            prefix.length if prefix else 0, self._bound.replaced, self.findings.refusal, self._bound.noted
        )
        self._note_computed(self._conversation)

    def computed(self, tokens: int) -> None:
        """So many tokens of the prompt are computed: the messages in them have been read."""
        if self._conversation is None:
            return
        keys, whole = self._conversation.keys, len(self.tokens) - 1
        ends = (one.message + 1 for one in self.boundaries if one.tokens <= tokens)
        count = len(keys) if tokens >= whole else max(ends, default=0)
        if count > self._messages_read:
            self._messages_read = count
            self._transcripts.seen.note(*keys[:count])

    def explained(self, restored: Restored) -> Explanation:
        """What is known of this prompt, and what it has otherwise than the turn before.

        Args:
            restored: what the cache has of it.
        """
        against, asked, findings = self._against, self._request, self.findings
        found = Explanation(
            prompt_tokens=len(self.tokens),
            bound_messages=findings.messages,
            bound_tokens=findings.tokens,
            refusal=findings.refusal,
            restored=restored,
        )
        if against is None or self._conversation is None:
            return found
        fresh_rendering = Asked(self._conversation, asked.tokens.ids, asked.boundaries)
        to_read = Asked(self._conversation, self.tokens.ids, self.boundaries)
        return replace(
            found,
            again=again(against, to_read, restored.tokens),
            against=Against(messages=against.messages, tokens=len(against.ids)),
            differences=tuple(differences(against, fresh_rendering, self._transcripts.text)),
        )

    def _note_computed(
        self, conversation: Conversation, replies: Sequence[_Reply] = (), claims: Claims | None = None
    ) -> None:
        """The next request is compared with this one."""
        readings = self._bound.readings
        thought = thought_digest(replies[0].message.reasoning) if replies else None
        computed = Computed(
            conversation=conversation,
            ids=array("I", (*self.tokens.ids, *self._written)),
            boundaries=self.boundaries,
            thoughts=(*(reading.thought for reading in readings), thought),
            noted=[reading.noted for reading in readings],
            reply=tuple(reply.canonical for reply in replies),
            claims=claims,
        )
        self._transcripts.recent.note(computed, instead_of=self._computed)
        self._computed = computed

    def wrote(self, tokens: Sequence[int]) -> None:
        """The model has written these tokens."""
        self.computed(len(self.tokens))
        self._written += tokens

    def said(self, output: Output) -> None:
        """The client was told this."""
        self._said.add(output)

    def ended(self, end: Finished, *, is_whole: bool, told_bits: float = 0, thought_bits: float = 0) -> None:
        """Record the reply, if what a client can send back is all that was written.

        Args:
            is_whole: it ends outside of thoughts and calls.
            told_bits, thought_bits: of chance in it, see `OutputStream`.
        """
        self._claims.told_bits, self._claims.thought_bits = told_bits, thought_bits
        self.left()
        if self._conversation is None or not is_whole or end.stop is not None or end.was_cut:
            return
        # The token that ends a reply is the next rendering's to write: some write another one there.
        written = self._written[:-1] if end.ended_itself else self._written
        for reply in self._replies():
            self._record(self._conversation, reply, written)

    def left(self) -> None:
        """The client has what it was told, whole or not: if it sends that back, this is where it got it."""
        if self._conversation is None or self._has_left:
            return
        self._has_left = True
        self._claims.ids |= dict.fromkeys(self._said.ids)
        replies = self._replies(drops_calls=True)
        if replies:
            self._transcripts.names.note(self._conversation, self._proven)
            self._note_computed(self._conversation, replies, self._claims)

    def _replies(self, *, drops_calls: bool = False) -> list[_Reply]:
        """What was told, in each form that a client may send back; none if no request can hold it."""
        messages = self._said.messages(drops_calls=drops_calls)
        try:
            return [_Reply(message, self._transcripts.canonical_reply(message)) for message in messages]
        except RecursionError:  # the arguments of a call are nested too deeply: such a request is refused
            return []

    def _record(self, conversation: Conversation, reply: _Reply, written: Sequence[int]) -> None:
        message, canonical = reply
        transcripts, thought = self._transcripts, thought_digest(message.reasoning)
        key = conversation.keys[-1].with_message(canonical)
        transcripts.seen.note(key)
        if message.reasoning and thought:
            if transcripts.kept_thoughts == "false":
                return
            exact = exact_after(conversation, canonical)
            transcripts.thoughts.keep(key, Thought(message.reasoning, exact, self._claims))
        if self._beginning is None or transcripts.is_changed(message):
            return
        tokens = array("I", (*self._beginning, *written))
        transcripts.store.add(
            Place(key, len(conversation.keys), len(tokens)),
            tokens,
            (*self._bound.readings, Reading(canonical.omitted, thought, is_ours=True)),
            parent=self._prompt,
            claims=self._claims,
            session=conversation.session,
        )


def _refusal(bound: Bound | None, unbound: int, window: int) -> str | None:
    """Why the fresh rendering has to be taken, if it has.

    Args:
        unbound: tokens of it.
    """
    if bound is None:
        return "costly"
    is_too_long = bound.prefix is not None and len(bound.ids) >= window > unbound
    return "too_long" if is_too_long else None


def _beginning(prompt: Prompt, bound: Bound) -> tuple[int, ...] | None:
    """What stands in front of the reply in the next prompt; None if it cannot be told."""
    if not prompt.has_transient:
        return bound.ids
    if prompt.lasting_end is None:
        return None
    end = bound.boundaries[-1].tokens if bound.boundaries else 0
    return (*bound.ids[:end], *prompt.lasting_end)
