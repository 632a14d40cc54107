"""The cost of holding a reply to a grammar: parts of `replies.py`."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from benchmarks.harness import alternate, medians
from scripts import tiny_models
from start_llm.core.chat import ChatRequest, Json, JsonAnswer, Message, OutputConstraint
from start_llm.core.engine_request import Guide
from start_llm.core.family import Family
from start_llm.core.prompt import ModelTokens, Prompt
from start_llm.engine.pacing import LONGEST_CHUNK
from start_llm.models.loader import load
from start_llm.output.structured_output import StructuredOutput
from tests.engine.harness import Stepper, engine_request, uncached_resources

ROUNDS = 3
LONG: dict[str, Json] = {
    "type": "object",
    "properties": {"title": {"type": "string", "minLength": 100_000}},
    "required": ["title"],
    "additionalProperties": False,
}
"""No reply comes to its end, so every one has the same length."""
_ARGUMENTS: dict[str, Json] = {
    "type": "object",
    "properties": {f"argument_{place}": {"type": "string"} for place in range(8)},
    "required": ["argument_0"],
}
TOOLS: list[dict[str, Json]] = [
    {"type": "function", "function": {"name": f"tool_{number}", "parameters": _ARGUMENTS}}
    for number in range(30)
]
HERMES = Family(name="qwen3", formats=("hermes",))
PROMPT = Prompt(tokens=ModelTokens((0,)), thinking=False)


def asked(form: OutputConstraint) -> ChatRequest:
    return ChatRequest(messages=(Message(role="user", content="?"),), tools=tuple(TOOLS), form=form)


def held_to(schema: Mapping[str, Any]) -> ChatRequest:
    return asked(OutputConstraint(answer=JsonAnswer(schema=schema, field="schema"), calls="none"))


class MadeUp:
    """A tokenizer without a model: every byte, and words of the alphabet in the order of their length."""

    def __init__(self, size: int) -> None:
        words = (
            prefix + "".join(letters)
            for length in itertools.count(2)
            for letters in itertools.product('etaoinshr_{}":,', repeat=length)
            for prefix in ("", " ")
        )
        single = [bytes([byte]) for byte in range(256)]
        self._bytes = [*single, *(word.encode() for word in itertools.islice(words, size - 257)), b"<end>"]
        self.eos_token_ids = frozenset({size - 1})
        self.control_tokens: Mapping[str, int] = {}
        self.trims_leading_space = False
        self.chat_template = ""

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def encode(self, text: str, *, as_document: bool) -> list[int]:  # noqa: ARG002 - the interface
        return list(text.encode())


class Rounds:
    """Replies of one model, free and held to a schema."""

    def __init__(self, folder: Path, tokens: int) -> None:
        model = load(tiny_models.build("qwen3", folder / "model", hidden=256, layers=4, vocab=8192))
        self._tokens = tokens
        self._keeper = StructuredOutput(model.tokenizer, HERMES, model.vocabulary)
        resources = uncached_resources(
            network=model.network,
            token_bytes=model.tokenizer.token_bytes,
            eos_token_ids=model.tokenizer.eos_token_ids,
            max_sequences=8,
            batches=True,
        )
        self._stepper = Stepper(resources, longest_chunk=LONGEST_CHUNK)

    def guide(self) -> Guide | None:
        return self._keeper.guide(held_to(LONG), PROMPT)

    def seconds_per_token(self, guided: Sequence[bool]) -> float:
        """Of one step of all these rows."""
        guides = (self.guide() if is_guided else None for is_guided in guided)
        watched = [
            self._stepper.submit(engine_request((5, 6, 7 + place), self._tokens, guide=guide))
            for place, guide in enumerate(guides)
        ]
        self._stepper.step(8)
        began = time.perf_counter()
        before = sum(len(reply.tokens) for reply in watched)
        self._stepper.finish(*watched)
        made = sum(len(reply.tokens) for reply in watched) - before
        return (time.perf_counter() - began) / made * len(guided)


def grammar(folder: Path, *, tokens: int = 64) -> None:
    """The cost of holding a reply to a grammar: one reply and four at once, free and held to a schema.

    A small random model on this engine; also free beside a row that is held to one. Rounds alternate.

    Args:
        tokens: of a reply
    """
    cases = {
        "one, free": [False],
        "one, held to a schema": [True],
        "four, free": [False] * 4,
        "four, one held to a schema": [True, *[False] * 3],
        "four, held to a schema": [True] * 4,
    }
    with mx.stream(generation_stream):
        rounds = Rounds(folder, tokens)
        sides = (lambda _, guided=guided: rounds.seconds_per_token(guided) for guided in cases.values())
        spent = medians(alternate(ROUNDS, *sides))
    for name, seconds in zip(cases, spent, strict=True):
        print(f"  {name:28} {seconds * 1000:8.3f} ms a step")


def masks(_: Path, *, vocabulary: int = 151_936) -> None:
    """What a grammar adds to the work of a step: the first guide, any other one, and one mask.

    Args:
        vocabulary: made up, of the size that real models have
    """
    made_up = MadeUp(vocabulary)
    keeper = StructuredOutput(made_up, HERMES, vocabulary)

    def guide_ms(request: ChatRequest) -> float:
        began = time.perf_counter()
        keeper.guide(request, PROMPT)
        return 1000 * (time.perf_counter() - began)

    must = asked(OutputConstraint(calls="must"))
    print(f"{vocabulary:,} tokens")
    print(f"  first guide          {guide_ms(held_to(LONG)):8.1f} ms")
    print(
        f"  guide of a schema    {statistics.median(guide_ms(held_to(LONG)) for _ in range(ROUNDS)):8.1f} ms"
    )
    print(f"  guide of 30 tools    {statistics.median(guide_ms(must) for _ in range(ROUNDS)):8.1f} ms")
    taken = sorted(_mask_ms(keeper, made_up, '{"title": "' + "the sea is deep, and so on. " * 20))
    print(f"  a mask, median       {statistics.median(taken):8.3f} ms")
    print(f"  a mask, 99 of 100    {taken[int(len(taken) * 0.99)]:8.3f} ms")


def _mask_ms(keeper: StructuredOutput, vocabulary: MadeUp, text: str) -> Iterator[float]:
    """Of each mask along a text."""
    guide = keeper.guide(held_to(LONG | {"properties": {"title": {"type": "string"}}}), PROMPT)
    if guide is None:
        raise RuntimeError("a schema was not taken for a form")
    for token in vocabulary.encode(text, as_document=False):
        began = time.perf_counter()
        guide.advance([token])
        guide.allowed()
        yield 1000 * (time.perf_counter() - began)
