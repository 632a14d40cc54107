"""What goes from rank 0 to the others arrives as it was sent."""

from __future__ import annotations

import math

import pytest

from start_llm.cache.disk.page_file import TensorLayout
from start_llm.cache.disk.shared_restore import RestoreWish
from start_llm.core.engine_request import EngineRequest, ReasoningLimit
from start_llm.core.images import ImageRun
from start_llm.core.prompt import KeptPrefix, ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.engine.followers import ExecutorState
from start_llm.engine.step_plan import (
    ComputeChunk,
    ComputeChunks,
    DecodeToken,
    EndRequest,
    FreeMemory,
    JoinBatch,
    LookAtImage,
    PreemptRequest,
    StartRequest,
)
from start_llm.ranks.wire import (
    Message,
    SentBudget,
    SentEnd,
    SentFlush,
    SentPart,
    SentRead,
    SentRequest,
    SentRestore,
    SentRestored,
    SentSettings,
    SentTrimming,
    SentTrouble,
    decoded,
    encoded,
)

PARTS = [
    EndRequest(3, is_given_up=True),
    EndRequest(4, is_cut=True),
    PreemptRequest(1, 0.1 + 0.2),
    StartRequest(1, 0, math.inf, 5, 0.25, uses_earlier=True),
    LookAtImage(2),
    ComputeChunk(2, 512),
    ComputeChunks((1, 2)),
    JoinBatch((1, 2), 3),
    JoinBatch((1,)),
    DecodeToken(((1, 2), (3,)), (4, 2)),
    FreeMemory(7),
]
WISHES = [
    RestoreWish(
        ids=(1, 2**31, 3),
        salt=b"\x00\xff",
        path=1,
        pages=0,
        last=(),
        state=(("state.0.0", TensorLayout("F32", (1, 2))), ("state.1.0", TensorLayout("I32", ()))),
        numbers=((3, 4), ()),
        room=9,
        is_idle_work=True,
    ),
    RestoreWish((), b"", 0, 2, (5, 6), None, (), 0, is_idle_work=False),
]
MESSAGES: list[Message] = [
    *(SentPart(part, 1234.5678901234567, ExecutorState(1, 2, 3, 4, 5)) for part in PARTS),
    SentSettings("/models/one", {"engine": {"memory": 2**40, "speculation": "auto"}}),
    SentSettings(None, {}),
    SentTrimming(3),
    SentBudget(2**33, 0.5),
    *(SentRestore(3, wish, 0.25) for wish in WISHES),
    SentRead(3, 2),
    SentRestored(3, 1, 0.5),
    SentFlush(10.0),
    SentEnd(),
    SentTrouble("no such folder", is_final=True),
]
REASONING = ReasoningLimit(
    max_reasoning_tokens=5, starts_open=True, opening="<think>", closing="</think>", closing_tokens=(1, 2)
)
REQUEST = EngineRequest(
    prompt=ModelTokens((0, 1, 2**31 - 1)),
    max_tokens=9,
    sampling=Sampling(temperature=0),
    boundaries=(1, 2),
    kept=(KeptPrefix(2, 300), KeptPrefix(0, 3600)),
    repeated_tokens=2,
    salt=b"\x00\xff",
    reasoning=REASONING,
    trims_leading_space=True,
    draft_texts=((4, 5), ()),
    is_idle_work=True,
)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_arrives_as_it_was_sent(message):
    assert decoded(encoded(message)) == message


def test_a_request_arrives_with_all_that_computing_and_keeping_depend_on():
    assert decoded(encoded(SentRequest(7, REQUEST))) == SentRequest(7, REQUEST)


@pytest.mark.parametrize("grid", [(1, 1, 2), None])
def test_an_image_arrives_without_its_pixels(grid):
    run = ImageRun((2**31, 2**32 - 1), (7, 7), grid, lambda: {"pixel_values": [0.5]})
    asked = EngineRequest(
        prompt=ModelTokens((1, *run.tokens, 2)), max_tokens=1, sampling=Sampling(), images=(run,)
    )
    message = decoded(encoded(SentRequest(1, asked)))
    assert isinstance(message, SentRequest)
    (arrived,) = message.request.images
    assert (arrived.tokens, arrived.network_ids, arrived.grid) == (run.tokens, run.network_ids, grid)
    assert arrived.inputs() == {}


def test_how_a_client_wants_to_sample_stays_on_rank_0():
    asked = EngineRequest(
        prompt=ModelTokens((1,)), max_tokens=1, sampling=Sampling(seed=5, logit_bias={1: 2.0}), session="mine"
    )
    arrived = decoded(encoded(SentRequest(1, asked)))
    assert isinstance(arrived, SentRequest)
    assert arrived.request.sampling == Sampling(temperature=0)
    assert not arrived.request.session


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"kind": "Nothing"}',
        b'{"kind": "SentTrimming"}',
        b'{"kind": "SentPart", "part": "LookAtSound", "values": {"number": 1}, "at": 0, "state": []}',
        b"\xff",
        encoded(SentRestore(3, WISHES[0], 0.25)).replace(b'"last": ""', b'"last": "YWJj"'),
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ValueError):
        decoded(data)
