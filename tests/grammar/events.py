"""Random stories of a reply, as engine and service tell them, and what a client is sent of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from hypothesis import strategies as st

from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Finished,
    FinishReason,
    Output,
    Reasoning,
    TokenLogprobs,
    Usage,
)
from start_llm.protocols.base import Reply, SSEFrame
from tests.protocols.helpers import scored

FAILURE = "The engine is gone."
type Life = Literal["life"]
LIFE: Life = "life"
"""A sign of life is sent here."""


@dataclass(frozen=True, slots=True)
class Story:
    """All that happens to one reply.

    Attributes:
        steps: what comes, and where a sign of life is sent.
        end: None: it fails.
    """

    steps: Sequence[Output | Life]
    end: Finished | None

    @property
    def outputs(self) -> list[Output]:
        return [step for step in self.steps if step != LIFE]


@st.composite
def stories(draw: st.DrawFn, *, tools: Sequence[str] = (), thinks: bool = True, fails: bool = False) -> Story:
    """No text stands in two places, so that no two events can change places unseen."""
    kinds = ["text", *(["reasoning"] if thinks else []), *(["call"] if tools else [])]
    drawn = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(1, 3)), max_size=5))
    words, calls = (f"w{number}é" for number in count()), count()
    is_cut = draw(st.booleans())
    outputs: list[Output] = []
    for at, (kind, pieces) in enumerate(drawn):
        texts = [f"{next(words)} " for _ in range(pieces)]
        if kind == "call":
            is_last = at == len(drawn) - 1
            outputs += _call(next(calls), draw(st.sampled_from(tools)), texts, is_cut=is_cut and is_last)
        else:
            outputs += _texts(kind, texts)
    steps = list(draw(_with_life(outputs)))
    if fails:
        return Story(steps[: draw(st.integers(0, len(steps)))], None)
    called = isinstance(outputs[-1], CallEnded) if outputs else False
    reason: FinishReason = "tool_calls" if called else draw(st.sampled_from(["stop", "length"]))
    stop = draw(st.sampled_from([None, "END"])) if reason == "stop" else None
    usage = Usage(prompt=7, cached=4, completion=9, reasoning=draw(st.integers(0, 9)))
    return Story(steps, Finished(reason, usage, stop))


def _texts(kind: str, texts: Iterable[str]) -> Iterator[Output]:
    for number, text in enumerate(texts):
        tokens, scores = (number,), (scored(number, number, 0),)
        if kind == "text":
            yield Content(text, tokens=tokens, logprobs=scores)
        else:
            yield Reasoning(text, tokens=tokens, logprobs=scores)


def _call(index: int, name: str, texts: Sequence[str], *, is_cut: bool) -> Iterator[Output]:
    written = json.dumps({"input": "".join(texts)}, ensure_ascii=False)
    size = -(-len(written) // len(texts))
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    scores: tuple[TokenLogprobs, ...] = (scored(1, 1, 0),)
    yield CallStarted(index, name, tokens=(1,), logprobs=scores)
    for piece in pieces[:-1] if is_cut else pieces:
        yield CallArguments(index, piece, tokens=(1,), logprobs=scores)
    if not is_cut:
        yield CallEnded(index)


@st.composite
def _with_life(draw: st.DrawFn, outputs: Sequence[Output]) -> list[Output | Life]:
    signs = draw(st.lists(st.integers(0, len(outputs)), max_size=3))
    steps: list[Output | Life] = []
    for at in range(len(outputs) + 1):
        steps.extend(LIFE for _ in range(signs.count(at)))
        steps.extend(outputs[at : at + 1])
    return steps


def sent(reply: Reply, story: Story) -> list[bytes]:
    """The events of the stream, one by one."""
    return [frame.encoded() for frame in _frames(reply, story)]


def _frames(reply: Reply, story: Story) -> Iterator[SSEFrame]:
    yield from reply.opening(7)
    for step in story.steps:
        if step == LIFE:
            yield reply.keep_alive()
        else:
            yield from reply.output(step)
    if story.end is None:
        yield reply.failure(FAILURE)
    else:
        yield from reply.closing(story.end)


def broken(events: Sequence[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """The stream with one event left out, sent twice, or after the one that follows it."""
    for at, event in enumerate(events):
        before, after = [*events[:at]], [*events[at + 1 :]]
        yield f"{at} left out", before + after
        yield f"{at} twice", [*before, event, event, *after]
        if after:
            yield f"{at} late", [*before, after[0], event, *after[1:]]
