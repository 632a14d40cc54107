"""What replies of OpenAI's two completions have in common: their head, usage, and the end of a stream."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from start_llm.core.chat import Json
from start_llm.core.events import Output, Usage
from start_llm.protocols.base import ModelFacts, SSEFrame, openai_error


@dataclass(slots=True)
class CompletionReply:
    """Encodes one completion, of a chat or of a text.

    Attributes:
        id: has a prefix of its own for each of the two.
    """

    requested_model: str
    model: ModelFacts
    include_usage: bool
    with_token_ids: bool
    with_logprobs: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Json]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.requested_model,
            "system_fingerprint": self.model.card.id,
        }

    def token_ids(self, events: Iterable[Output]) -> dict[str, Json]:
        """Return the ids of every token, including markup, if they were requested."""
        if not self.with_token_ids:
            return {}
        return {"token_ids": [token for event in events for token in event.tokens]}

    def failure(self, message: str) -> SSEFrame:
        return SSEFrame(openai_error(message, kind="server_error"))

    def closing_frames(self, kind: str, choice: dict[str, Json], usage: Usage) -> Iterator[SSEFrame]:
        """Yield the last frames: usage is in the last chunk, or in a separate one for clients that ask so."""
        last: dict[str, Json] = {**self.head(kind), "choices": [choice]}
        if self.include_usage:
            yield SSEFrame(last)
            yield SSEFrame({**last, "choices": [], "usage": usage_json(usage)})
        else:
            yield SSEFrame({**last, "usage": usage_json(usage)})
        yield SSEFrame("[DONE]")


def usage_json(usage: Usage) -> dict[str, Json]:
    """Return the real counts. `cached_tokens` were not computed; `reasoning_tokens` are part of the reply."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
