"""What is recorded of all conversations with a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from start_llm.core.canonical import CanonicalMessage, Conversation
from start_llm.core.chat import KeptReasoning, Message
from start_llm.core.images import FIRST_IMAGE_TOKEN, HIDDEN_IMAGE
from start_llm.telemetry.metrics import TranscriptMetrics
from start_llm.transcripts.beginnings import Beginnings
from start_llm.transcripts.bind import Encode
from start_llm.transcripts.conversation_names import ConversationNames
from start_llm.transcripts.prefix_history import PrefixHistory
from start_llm.transcripts.reasoning_store import ReasoningStore
from start_llm.transcripts.recent import ComputedRequest, RecentConversations
from start_llm.transcripts.transcript_store import TranscriptStore


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptStores:
    """What the next start, and models with equal weights and template, find again.

    Attributes:
        reasoning_texts: reasoning for clients that do not send it back.
        seen: all prefixes that were ever computed, even if their tokens are gone.
        names: knows which conversation names stand for a single conversation.
        beginnings: those of the agents that were used last.
    """

    store: TranscriptStore
    reasoning_texts: ReasoningStore
    seen: PrefixHistory
    names: ConversationNames
    beginnings: Beginnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcripts(TranscriptStores):
    """The records of all conversations. Safe to use from any thread.

    Attributes:
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
        name = self.proving(conversation)
        return [self.reasoning_texts.get(conversation, index, name) for index in replies]

    def proving(self, conversation: Conversation) -> str | None:
        """Return the conversation's name, if it proves that recorded values were its own."""
        return self.names.proving(conversation) if self.takes_proof else None

    def nearest(self, conversation: Conversation) -> ComputedRequest | None:
        """Return the last computed request that is known to be of this conversation, or None."""
        return self.recent.nearest(conversation, self.proving(conversation))

    def text(self, ids: Sequence[int]) -> str:
        """Decode tokens to text, markup included."""
        pieces = (
            HIDDEN_IMAGE.encode() if is_image else b"".join(map(self.token_bytes, run))
            for is_image, run in groupby(ids, FIRST_IMAGE_TOKEN.__le__)
        )
        return b"".join(pieces).decode(errors="replace")
