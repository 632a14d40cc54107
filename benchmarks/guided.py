"""Measure the cost of holding a reply to a grammar.

    python benchmarks/guided.py [--tokens N] [--vocabulary N] [--only decode mask]

decode: one reply and four at once, of a small random model on this engine: free, held to a schema, and free
beside a row that is held to one. Rounds alternate; the figures are medians.
mask: what is added to the work of a step, for a made-up vocabulary of the size that real models have: making
the first guide, making any other one, and one mask.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import generation_stream  # noqa: E402 - found through the line above

from scripts import tiny_models  # noqa: E402
from start_llm.core.chat import ChatRequest, Json, JsonAnswer, Message, OutputConstraint  # noqa: E402
from start_llm.core.engine_request import Guide  # noqa: E402
from start_llm.core.family import Family  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from start_llm.core.prompt import ModelTokens, Prompt  # noqa: E402
from start_llm.engine.pacing import LONGEST_CHUNK  # noqa: E402
from start_llm.models.loader import load  # noqa: E402
from start_llm.output.structured_output import StructuredOutput  # noqa: E402
from tests.engine.harness import Stepper, engine_request, uncached_resources  # noqa: E402

ROUNDS = 3
LONG: dict[str, Json] = {
    "type": "object",
    "properties": {"title": {"type": "string", "minLength": 100_000}},
    "required": ["title"],
    "additionalProperties": False,
}
"""No reply comes to its end, so every one has the same length."""
TOOLS: list[dict[str, Json]] = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "parameters": {
                "type": "object",
                "properties": {f"argument_{place}": {"type": "string"} for place in range(8)},
                "required": ["argument_0"],
            },
        },
    }
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


def median_ms(measure: Callable[[], float], rounds: int = ROUNDS) -> float:
    return statistics.median(measure() for _ in range(rounds)) * 1000


def masks(keeper: StructuredOutput, vocabulary: MadeUp, text: str) -> Iterator[float]:
    """Seconds for each mask along a text."""
    guide = keeper.guide(held_to(LONG | {"properties": {"title": {"type": "string"}}}), PROMPT)
    if guide is None:
        raise RuntimeError("a schema was not taken for a form")
    for token in vocabulary.encode(text, as_document=False):
        began = time.perf_counter()
        guide.advance([token])
        guide.allowed()
        yield time.perf_counter() - began


def measure_masks(size: int) -> None:
    vocabulary = MadeUp(size)
    keeper = StructuredOutput(vocabulary, HERMES, size)

    def seconds(request: ChatRequest) -> float:
        began = time.perf_counter()
        keeper.guide(request, PROMPT)
        return time.perf_counter() - began

    print(f"{size:,} tokens")
    print(f"  first guide          {seconds(held_to(LONG)) * 1000:8.1f} ms")
    print(f"  guide of a schema    {median_ms(lambda: seconds(held_to(LONG))):8.1f} ms")
    print(
        f"  guide of 30 tools    {median_ms(lambda: seconds(asked(OutputConstraint(calls='must')))):8.1f} ms"
    )
    taken = sorted(masks(keeper, vocabulary, '{"title": "' + "the sea is deep, and so on. " * 20))
    print(f"  a mask, median       {statistics.median(taken) * 1000:8.3f} ms")
    print(f"  a mask, 99 of 100    {taken[int(len(taken) * 0.99)] * 1000:8.3f} ms")


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
        engine_requests = [
            engine_request((5, 6, 7 + place), self._tokens, guide=self.guide() if is_guided else None)
            for place, is_guided in enumerate(guided)
        ]
        watched = [self._stepper.submit(one) for one in engine_requests]
        self._stepper.step(8)
        began = time.perf_counter()
        before = sum(len(one.tokens) for one in watched)
        self._stepper.finish(*watched)
        made = sum(len(one.tokens) for one in watched) - before
        return (time.perf_counter() - began) / made * len(guided)


def measure_decode(tokens: int) -> None:
    cases = {
        "one, free": [False],
        "one, held to a schema": [True],
        "four, free": [False] * 4,
        "four, one held to a schema": [True, *[False] * 3],
        "four, held to a schema": [True] * 4,
    }
    with tempfile.TemporaryDirectory() as folder, mx.stream(generation_stream):
        rounds = Rounds(Path(folder), tokens)
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for name, guided in list(cases.items()) * ROUNDS:
            taken[name].append(rounds.seconds_per_token(guided))
    for name, times in taken.items():
        print(f"  {name:28} {statistics.median(times) * 1000:8.3f} ms a step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="length of a reply")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--only", nargs="+", choices=["decode", "mask"], default=["decode", "mask"])
    options = parser.parse_args()
    if "decode" in options.only:
        measure_decode(options.tokens)
    if "mask" in options.only:
        measure_masks(options.vocabulary)


if __name__ == "__main__":
    run_with_openblas()
    main()
