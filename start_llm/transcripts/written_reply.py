"""The reply of a turn: what its client received of it, and what is recorded of it."""

import codecs
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from start_llm.core.canonical import CanonicalMessage, Conversation, exact_after, reasoning_digest
from start_llm.core.chat import Message
from start_llm.core.events import Finished, Output
from start_llm.core.prompt import Prompt
from start_llm.transcripts.bind import BoundPrompt
from start_llm.transcripts.reasoning_store import RecordedReasoning
from start_llm.transcripts.recorded_details import Claims, MessageDetails
from start_llm.transcripts.reply_echo import ReplyEcho
from start_llm.transcripts.transcript_store import PrefixNode, Variant
from start_llm.transcripts.transcripts import Transcripts

_CHARACTER_TOKENS = 4
"""So many tokens hold the beginning of the last character, which has four bytes at most."""
_EQUAL_TO_NONE = b""
"""The exact name of a conversation whose reasoning only a proof restores."""


class ReplyForm(NamedTuple):
    """A reply in a form that a client may send back, and its canonical form."""

    message: Message
    canonical: CanonicalMessage


class WrittenReply:
    """A reply as the model writes it and as its client receives it.

    Args:
        bound: the prompt that the model reads.

    Attributes:
        tokens: what the model has written.
        claims: evidence of whose reply it is.
    """

    def __init__(self, transcripts: Transcripts, prompt: Prompt, bound: BoundPrompt) -> None:
        self._transcripts = transcripts
        self._prompt = prompt
        self._bound = bound
        self._beginning = _beginning(prompt, bound)
        self._echo = ReplyEcho.begun_with(prompt.begun_reply)
        self.tokens: list[int] = []
        self.claims = Claims(prompt.conversation.names if prompt.conversation else {}, is_delivered=True)

    def add_output(self, output: Output) -> None:
        """Add an event that was sent to the client."""
        self._echo.add(output)

    def note_ids(self) -> None:
        """Note the ids of calls that were sent to the client."""
        self.claims.ids |= dict.fromkeys(self._echo.ids)

    def forms(self, *, drops_calls: bool = False) -> list[ReplyForm]:
        """Return the reply in each form that a client may send back; empty if no request can hold it."""
        messages = self._echo.messages(drops_calls=drops_calls)
        try:
            return [ReplyForm(message, self._transcripts.canonical_reply(message)) for message in messages]
        except RecursionError:  # a call's arguments are nested too deeply: such a request is refused
            return []

    def sent(self) -> Message | None:
        """Return the reply as most clients send it back; None if no request can hold it, or if it was cut off
        in a call: some clients leave that out, others complete it.
        """
        forms = self.forms()
        return forms[0].message if forms and not self._echo.was_cut_in_call else None

    def record(self, conversation: Conversation, end: Finished, parent: Variant | None) -> None:
        """Record it, in each form that its client may send back.

        Args:
            parent: the prompt as it is recorded.
        """
        # Leave out the eos token: the next rendering writes its own closer, which may be another token.
        written = self.tokens[:-1] if end.ended_itself else self._as_sent(self.tokens)
        if written is not None:
            for form in self.forms():
                self._record(conversation, form, written, parent)

    def _as_sent(self, written: Sequence[int]) -> Sequence[int] | None:
        """Return the tokens of a reply that was cut inside a character as the next request will have them.

        The client received U+FFFD in place of that character. The tokens before it stay as they are. None if
        the tokenizer writes something else for that text alone, such as a space before it.
        """
        token_bytes, cut = self._transcripts.token_bytes, len(written)
        while cut and _ends_inside_character(
            b"".join(map(token_bytes, written[max(cut - _CHARACTER_TOKENS, 0) : cut]))
        ):
            cut -= 1
        if cut == len(written):
            return written
        sent = b"".join(map(token_bytes, written[cut:])).decode(errors="replace")
        replacement = self._transcripts.encode(sent)
        if b"".join(map(token_bytes, replacement)) != sent.encode():
            return None
        return (*written[:cut], *replacement)

    def _record(
        self, conversation: Conversation, form: ReplyForm, written: Sequence[int], parent: Variant | None
    ) -> None:
        message, canonical = form
        transcripts, reasoning = self._transcripts, reasoning_digest(message.reasoning)
        key = conversation.messages[-1].key.with_message(canonical)
        transcripts.seen.note(key)
        begins_as_drawn = self._begins_as_drawn(conversation)
        if message.reasoning and reasoning:
            if transcripts.kept_reasoning == "false":
                return
            is_drawn = begins_as_drawn and _reads_its_words(conversation, self._bound)
            exact = exact_after(conversation, canonical) if is_drawn else _EQUAL_TO_NONE
            transcripts.reasoning_texts.keep(key, RecordedReasoning(message.reasoning, exact, self.claims))
        if self._beginning is None or transcripts.is_changed(message):
            return
        tokens = array("I", (*self._beginning, *written))
        is_ours = begins_as_drawn and not conversation.transient
        transcripts.store.add(
            PrefixNode(key, len(conversation.messages), len(tokens), conversation.tenant),
            tokens,
            (*self._bound.details, MessageDetails(canonical.omitted, reasoning, is_ours)),
            parent=parent,
            claims=self.claims,
            session=conversation.session,
        )

    def _begins_as_drawn(self, conversation: Conversation) -> bool:
        """Return whether no reasoning of the reply's beginning is the client's, or of other words."""
        begun, transcripts = self._prompt.begun_reply, self._transcripts
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
        reading.omitted == message.omitted
        and not reading.noted
        and (reading.is_ours or reading.reasoning in (None, message.echoed))
        for reading, message in zip(bound.details, conversation.messages, strict=True)
    )


def _ends_inside_character(data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return bool(decoder.getstate()[0])


def _beginning(prompt: Prompt, bound: BoundPrompt) -> tuple[int, ...] | None:
    """Return the tokens that will precede the reply in the next prompt, or None if they are not known."""
    if not prompt.has_transient:
        return bound.ids
    if prompt.lasting_end is None:
        return None
    end = bound.boundaries[-1].tokens if bound.boundaries else 0
    return (*bound.ids[:end], *prompt.lasting_end)
