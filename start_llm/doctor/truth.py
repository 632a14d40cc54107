"""Compare the server's replies, whose prompts were partly in its cache, with what the network computes anew.

Conversations have rules in common, go on for several turns, and are asked another question in the middle;
four run at once. Every token of a reply has to have the log-probability that the network gives it without any
cache, up to the rounding of this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Failed, Finished, Idle, Restored, Text
from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.doctor.network import AGAINST_THE_END, Network, ServedReply
from start_llm.doctor.server import ServerFailed
from start_llm.doctor.text import prose
from start_llm.engine.engine import Engine
from start_llm.engine.generation import Generation

_AT_ONCE = 4
_TURNS = 2
_REPLY_TOKENS = 8
_GROUPS_OF_RULES = 5
_LIKELIEST = 3
_WAIT_S = 600.0
_EVENT_S = 5.0

type Encode = Callable[[str], list[int]]


@dataclass(slots=True)
class TrialConversation:
    """A conversation as tokens, and where its messages end."""

    name: str
    tokens: tuple[int, ...]
    ends: tuple[int, ...]
    before_last: int = 0

    def ask(self, question: Sequence[int]) -> None:
        self.before_last = len(self.tokens)
        self.tokens += tuple(question)
        self.ends += (len(self.tokens),)

    def other_question(self, question: Sequence[int]) -> TrialConversation:
        """Return the conversation with something else in place of its last question and the reply."""
        kept = self.before_last
        branch = TrialConversation(
            f"{self.name}, asked otherwise",
            self.tokens[:kept],
            tuple(end for end in self.ends if end <= kept),
        )
        branch.ask(question)
        return branch


@dataclass(slots=True)
class Comparison:
    """What the comparison has come to.

    Attributes:
        restored_tokens, disk_tokens: prompt tokens from the cache, and those of them from the disk.
        rounded: replies in which the network disagrees with itself as much.
        wrong: a sentence for each reply that is wrong.
    """

    conversations: int = 0
    replies: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    disk_tokens: int = 0
    rounded: int = 0
    wrong: list[str] = field(default_factory=list[str])

    @property
    def figures(self) -> dict[str, int]:
        counts = {count.name: getattr(self, count.name) for count in fields(self)}
        return counts | {"wrong": len(self.wrong)}

    def __str__(self) -> str:
        return f"{self.replies:,} replies of {self.conversations:,} conversations"


class Truth:
    """Plays conversations and compares their replies.

    Args:
        tolerance: nats by which right answers may differ.
        rules_tokens: length of what conversations have in common.
    """

    def __init__(self, encode: Encode, eos: frozenset[int], tolerance: float, rules_tokens: int) -> None:
        self._encode = encode
        self._tolerance = tolerance
        self._rules_tokens = rules_tokens
        # A reply is as long as it is asked to be.
        self._sampling = Sampling(temperature=0, logit_bias=dict.fromkeys(eos, AGAINST_THE_END))
        self._known: list[TrialConversation] = []

    def play(self, engine: Engine, network: Network, most: int, seconds: float) -> Comparison:
        """Play conversations until there are enough, or the time is over; at least four."""
        comparison, end = Comparison(), time.monotonic() + seconds
        while len(self._known) < most and (not self._known or time.monotonic() < end):
            group = [
                self._new(len(self._known) + place) for place in range(min(_AT_ONCE, most - len(self._known)))
            ]
            for turn in range(_TURNS):
                for conversation in group:
                    conversation.ask(self._question(f"{conversation.name} {turn}"))
                self._compare(group, engine, network, comparison)
            others = [
                conversation.other_question(self._question(f"{conversation.name} other"))
                for conversation in group
            ]
            self._compare(others, engine, network, comparison)
            self._known += group
            comparison.conversations += len(group)
        return comparison

    def go_on(self, engine: Engine, network: Network, most: int, seconds: float) -> Comparison:
        """Play another turn of conversations that are known already."""
        comparison, end = Comparison(), time.monotonic() + seconds
        for start in range(0, min(most, len(self._known)), _AT_ONCE):
            if comparison.conversations and time.monotonic() > end:
                break
            group = self._known[start : start + _AT_ONCE]
            for conversation in group:
                conversation.ask(self._question(f"{conversation.name} after"))
            self._compare(group, engine, network, comparison)
            comparison.conversations += len(group)
        return comparison

    def _new(self, number: int) -> TrialConversation:
        rules = self._encode(prose(f"rules {number % _GROUPS_OF_RULES}", self._rules_tokens))
        rules = rules[: self._rules_tokens]
        return TrialConversation(f"conversation {number + 1}", tuple(rules), (len(rules),))

    def _question(self, seed: str) -> list[int]:
        return self._encode(prose(seed, 40 + len(seed)))

    def _compare(
        self, group: Sequence[TrialConversation], engine: Engine, network: Network, comparison: Comparison
    ) -> None:
        """Ask all at once, read their replies, and compare each with the network."""
        asked = [(conversation, engine.submit(self._request(conversation))) for conversation in group]
        replies = [(conversation, self._read(generation, comparison)) for conversation, generation in asked]
        for conversation, reply in replies:
            difference = engine.run("compare a reply", partial(network.difference, reply, self._tolerance))
            comparison.replies += 1
            comparison.tokens += len(reply.tokens)
            if difference and difference.is_rounding:
                comparison.rounded += 1
            elif difference:
                place = difference.place + 1
                comparison.wrong.append(
                    f"{conversation.name}: after {len(reply.prompt):,} tokens, token {place} of the reply "
                    f"is off by {difference.nats:.3g} nats, where {self._tolerance:.3g} are rounding"
                )
            conversation.tokens += reply.tokens

    def _request(self, conversation: TrialConversation) -> EngineRequest:
        return EngineRequest(
            prompt=ModelTokens(conversation.tokens),
            max_tokens=_REPLY_TOKENS,
            sampling=self._sampling,
            boundaries=tuple(end for end in conversation.ends if end < len(conversation.tokens)),
            session=conversation.name,
            top_logprobs=_LIKELIEST,
        )

    def _read(self, generation: Generation, comparison: Comparison) -> ServedReply:
        tokens, logprobs = list[int](), list[dict[int, float]]()
        for event in _events(generation):
            match event:
                case Restored():
                    comparison.restored_tokens += event.tokens
                    comparison.disk_tokens += event.disk_tokens
                case Text():
                    tokens += event.tokens
                    for entry in event.logprobs:
                        logprobs.append(
                            {choice.token: choice.logprob for choice in (entry.chosen, *entry.top)}
                        )
                case Failed():
                    raise ServerFailed(f"a reply failed: {event.message}")
        comparison.prompt_tokens += len(generation.request.prompt)
        return ServedReply(generation.request.prompt.ids, tuple(tokens), tuple(logprobs))


def _events(generation: Generation) -> Iterator[Restored | Text | Failed]:
    """Yield what a reply consists of, up to its end."""
    end = time.monotonic() + _WAIT_S
    while True:
        for event in generation.take(_EVENT_S):
            if isinstance(event, Restored | Text | Failed):
                yield event
            if isinstance(event, Finished | Failed):
                return
            if isinstance(event, Idle) and time.monotonic() > end:
                raise ServerFailed(f"no reply within {_WAIT_S:g} seconds")
