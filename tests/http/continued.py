"""Conversations that go on over several lives of a server. Shared by tests and `benchmarks disk`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.http.test_conversations import REPLY_TOKENS, Message, system, user, words

FAMILIES = ["qwen3_5", "gemma3_text", "qwen3", "glm4_moe_lite"]
"""Recurrent layers; windows; plain; latent."""
CONVERSATIONS = 10

type Client = Callable[[Sequence[Message], int], list[Message]]
"""What it sends of a conversation in a turn."""
type Post = Callable[[str, object], Any]
"""Sends a body to a path of the server, and returns what comes back."""


def echoes(messages: Sequence[Message], turn: int) -> list[Message]:
    return list(messages)


def respells(messages: Sequence[Message], turn: int) -> list[Message]:
    forms = [lambda text: text, lambda text: f"{text}\n", lambda text: [{"type": "text", "text": text}]]
    return [
        {**message, "content": forms[(turn + place) % 3](message["content"])}
        for place, message in enumerate(messages)
    ]


def dated(messages: Sequence[Message], turn: int) -> list[Message]:
    first = {**messages[0], "content": f"Current time is 10:0{turn}.\n{messages[0]['content']}"}
    return [first, *messages[1:]]


CLIENTS: list[Client] = [echoes, respells, dated]


@dataclass(frozen=True)
class Heard:
    """What a turn cost.

    Attributes:
        computed, new: tokens of the prompt that were computed, and that are behind all that the turn before
            it had computed.
    """

    computed: int
    new: int


@dataclass
class Conversation:
    """One conversation, as its client keeps it."""

    messages: list[Message]
    sends: Client
    name: str
    turns: list[Heard] = field(default_factory=list[Heard])
    known: int = 0

    @property
    def computed(self) -> list[int]:
        return [cost.computed for cost in self.turns]

    def ask(self, post: Post, question: str) -> None:
        self.messages.append(user(question))
        sent = self.sends(self.messages, len(self.turns))
        body = {"messages": sent, "max_tokens": REPLY_TOKENS, "temperature": 0, "session_id": self.name}
        answer = post("/v1/chat/completions", body)
        usage = answer["usage"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        self.turns.append(Heard(computed, usage["prompt_tokens"] - self.known))
        self.known = usage["total_tokens"]
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def conversations(system_words: int = 40) -> list[Conversation]:
    rng = random.Random(1)
    return [
        Conversation(
            [system(f"{number} {words(rng, system_words)}")], CLIENTS[number % len(CLIENTS)], f"c{number}"
        )
        for number in range(CONVERSATIONS)
    ]


def turn(post: Post, everybody: Sequence[Conversation], number: int) -> None:
    for conversation in everybody:
        conversation.ask(post, words(random.Random(f"{conversation.name} {number}"), 20))
