"""Bodies to parse and replies to encode, without a server."""

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from hypothesis import strategies as st

from start_llm.core.chat import Json
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Finished, Output, ScoredToken, TokenLogprobs, Usage
from start_llm.core.family import Family, ReasoningMarks
from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.formats.reading.schema import Tools
from start_llm.output.splitter import PlainSplitter, Splitter, make_splitter
from start_llm.output.stream import OutputStream
from start_llm.protocols.base import ModelFacts, Reply, RequestContext, SSEFrame
from start_llm.protocols.fields import Fields, parse_body
from start_llm.protocols.seal import KEY_BYTES, Seal
from tests.model_cards import model_card

PIECES = [
    b"Hello",
    b" you",
    b"\n",
    b"",
    b"\xf0\x9f",
    b"\x90\x9f",
    "日本".encode(),
    "é!".encode(),
    b"\xff",
    b"<end>",
    b"<think>",
    b"</think>",
    b'<tool_call>{"name": "read", "arguments": {"path": "',
    b'"}}</tool_call>',
]
"""The texts of the fake model's tokens, parts of characters and markup among them."""
END = PIECES.index(b"<end>")
THINK, ANSWER, CALL, CALLED = range(END + 1, len(PIECES))
MODEL = ModelFacts(
    model_card("lab/loaded"),
    lambda token: PIECES[token],
)
CONTEXT = RequestContext(MODEL, b"tenant", Seal(bytes(KEY_BYTES)))
USAGE = Usage(prompt=7, cached=4, completion=3, reasoning=2)
TOOL: Mapping[str, Json] = {"type": "function", "function": {"name": "read"}}
_FAMILY = Family(name="qwen3", reasoning=ReasoningMarks("<think>", "</think>", cut=""), formats=("hermes",))


def body(**fields: Any) -> Fields:
    """The body as it comes from the wire."""
    return parse_body(json.dumps(fields).encode())


def reasoning_in(sealed: str) -> str | None:
    opened = CONTEXT.seal.open(sealed, CONTEXT.tenant)
    return opened.reasoning if opened else None


def scored(token: int, *alternatives: int) -> TokenLogprobs:
    top = tuple(ScoredToken(other, -1.0 - rank) for rank, other in enumerate(alternatives))
    return TokenLogprobs(ScoredToken(token, -0.25), top)


def understanding() -> Splitter:
    """Return a splitter for the reasoning, answers and calls of a chat."""
    return make_splitter(_FAMILY, Tools([TOOL]), reasoning_is_open=False, thinking=True)


def events(
    tokens: Iterable[int],
    stop: tuple[str, ...] = (),
    limit: int = 100,
    splitter: Splitter | None = None,
) -> tuple[list[Output], Finished]:
    """The events of a reply with these tokens, as engine and service make them; text alone by default."""
    engine_request = EngineRequest(
        prompt=ModelTokens((1,)), max_tokens=limit, sampling=Sampling(), top_logprobs=2
    )
    writer = ReplyWriter(engine_request, MODEL.token_bytes, frozenset({END}))
    stream = OutputStream(splitter or PlainSplitter(), stops=stop)
    outputs: list[Output] = []
    for token in [*tokens, END]:
        for event in writer.feed(token, scored(token, token, 0)):
            if isinstance(event, Finished):
                rest, end = stream.close(event)
                return [*outputs, *rest], end
            outputs += stream.feed(event)
            if stream.is_over:
                return outputs, stream.cut(Usage(prompt=1, cached=0, completion=writer.produced))
    raise AssertionError("the end token ends every reply")


_stops = st.sampled_from([(), ("o y",), ("日", "!"), ("\n\n",), ("nothing",)])
replies = st.builds(events, st.lists(st.integers(0, END - 1), max_size=12), _stops, st.integers(1, 14))
"""Replies of any tokens, ended by a stop string, the limit or the end token."""

_phrases = st.sampled_from([*((token,) for token in range(len(PIECES)) if token != END), (CALL, 0, CALLED)])
chat_replies = st.builds(
    events,
    st.lists(_phrases, max_size=8).map(lambda phrases: list(chain.from_iterable(phrases))),
    _stops,
    st.integers(1, 18),
    st.builds(understanding),
)
"""Replies with reasoning and calls, some of them broken off."""


def chunks(frames: Iterable[SSEFrame]) -> list[dict[str, Any]]:
    """The JSON of frames, as a client reads it; the last frame has to be the end marker."""
    sent = list(frames)
    assert sent[-1].data == "[DONE]"
    return [read(frame) for frame in sent[:-1]]


def read(frame: SSEFrame) -> Any:
    """The JSON of a frame, as a client reads it."""
    return json.loads(frame.data if isinstance(frame.data, str) else json.dumps(frame.data))


def streamed(reply: Reply, outputs: list[Output], end: Finished) -> list[dict[str, Any]]:
    """All chunks of a stream."""
    frames = [*reply.opening(USAGE.prompt)]
    for output in outputs:
        frames += reply.output(output)
    return chunks([*frames, *reply.closing(end)])


def whole(reply: Reply, outputs: list[Output], end: Finished) -> Any:
    return json.loads(json.dumps(reply.whole(outputs, end)))
