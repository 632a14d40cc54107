"""What replies of OpenAI's two completions have in common: their head, usage, and the end of a stream."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from start_llm.core.chat import Json
from start_llm.core.events import Finished, Output, Prefilling
from start_llm.protocols.base import ModelFacts, SSEFrame, openai_error
from start_llm.protocols.receipts import progress_json, receipt_json


@dataclass(slots=True)
class CompletionReply:
    """Encodes one completion, of a chat or of a text.

    Attributes:
        with_receipt: usage has a receipt.
        with_progress: the stream tells how far the prompt is read.
        service_tier: how the request is served; None if it does not ask for that.
        id: has a prefix of its own for each of the two.
    """

    requested_model: str
    model: ModelFacts
    include_usage: bool
    with_token_ids: bool
    with_logprobs: bool
    with_receipt: bool = False
    with_progress: bool = False
    service_tier: str | None = None
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Json]:
        head: dict[str, Json] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.requested_model,
            "system_fingerprint": self.model.card.id,
        }
        return head if self.service_tier is None else {**head, "service_tier": self.service_tier}

    def token_ids(self, events: Iterable[Output]) -> dict[str, Json]:
        """Return the ids of every token, including markup, if they were requested."""
        if not self.with_token_ids:
            return {}
        return {"token_ids": [token for event in events for token in event.tokens]}

    def failure(self, message: str) -> SSEFrame:
        return SSEFrame(openai_error(message, kind="server_error"))

    def progress_frames(self, kind: str, choice: dict[str, Json], progress: Prefilling) -> Iterator[SSEFrame]:
        """Yield a chunk that says how far the prompt is read, if the client asks for it."""
        if self.with_progress:
            fields: dict[str, Json] = {"choices": [choice], "prompt_progress": progress_json(progress)}
            yield SSEFrame({**self.head(kind), **fields})

    def closing_frames(self, kind: str, choice: dict[str, Json], end: Finished) -> Iterator[SSEFrame]:
        """Yield the last frames: usage is in the last chunk, or in a separate one for clients that ask so."""
        last: dict[str, Json] = {**self.head(kind), "choices": [choice]}
        if self.include_usage:
            yield SSEFrame(last)
            yield SSEFrame({**last, "choices": [], "usage": self.usage(end)})
        else:
            yield SSEFrame({**last, "usage": self.usage(end)})
        yield SSEFrame("[DONE]")

    def usage(self, end: Finished) -> dict[str, Json]:
        """Return the real counts.

        `cached_tokens` were not computed, `cache_write_tokens` were and are kept; `reasoning_tokens` are part
        of the reply.
        """
        usage, receipt = end.usage, end.receipt
        counts: dict[str, Json] = {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.total,
            "prompt_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": receipt.written,
            },
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        }
        return {**counts, "receipt": receipt_json(receipt)} if self.with_receipt else counts
