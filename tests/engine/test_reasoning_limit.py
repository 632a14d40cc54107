"""The engine closes reasoning that is too long, and the model goes on from there."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.engine_request import EngineRequest, ReasoningLimit
from start_llm.core.events import Failed, Finished, Usage
from start_llm.core.sampling import Sampling
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import LoadedModel, load
from tests.engine.harness import (
    FailsOnce,
    Stepper,
    Watched,
    Wrapped,
    engine_request,
    uncached_resources,
)
from tests.ties import Tally, greedy_reference

SCRIPT = {
    "\n": ["<think>", " one", " two", " three", " four", "</think>", " Answer", "."],
    "\t": ["\n\n", "<thi", "nk>", " un", " deux", "</th", "ink>", " Voila", "!"],
}
CLOSED = " Enough</think>"
ANSWER = " Answer."


def machinery_of(model: LoadedModel) -> EngineResources:
    return uncached_resources(
        network=model.network,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.tokenizer.eos_token_ids,
        max_sequences=4,
        batches=True,
    )


class Script:
    """A model that thinks " one two three four" and answers, and jobs that let it think less."""

    def __init__(self, model: LoadedModel) -> None:
        self.encode = lambda text: tuple(model.tokenizer.encode(text, as_document=False))
        self.resources = machinery_of(model)
        self.closing_tokens = self.encode(CLOSED)

    def request(
        self, max_reasoning_tokens: int | None, start: str = "\n", max_tokens: int = 50, **more: Any
    ) -> EngineRequest:
        """A prompt of `start` alone; the reply may think for `max_reasoning_tokens`."""
        reasoning = None
        if max_reasoning_tokens is not None:
            reasoning = ReasoningLimit(
                max_reasoning_tokens=max_reasoning_tokens,
                starts_open=start == "<think>",
                opening="<think>",
                closing="</think>",
                closing_tokens=self.closing_tokens,
            )
        return engine_request(self.encode(start), max_tokens, reasoning=reasoning, **more)


@pytest.fixture(scope="module")
def script(chain_model: Callable[..., Any]) -> Script:
    return Script(load(chain_model(SCRIPT, words=[" Enough"])))


def answered(script: Script, asked: EngineRequest, **changes: Any) -> Watched:
    stepper = Stepper(script.resources, **changes)
    watched = stepper.submit(asked)
    stepper.finish(watched)
    assert stepper.metrics.failures == 0
    return watched


REASONING = {
    1: "<think>",
    2: "<think> one",
    3: "<think> one two",
    5: "<think> one two three four",
}
UNTOUCHED = "<think> one two three four</think>"


def expected(max_reasoning_tokens: int | None) -> str:
    closed = REASONING[max_reasoning_tokens] + CLOSED if max_reasoning_tokens in REASONING else UNTOUCHED
    return closed + ANSWER


# ---------------------------------------------------------------------------------------------------- scripts


@pytest.mark.parametrize("max_reasoning_tokens", [1, 2, 3, 5])
def test_reasoning_is_closed_at_the_limit_and_the_answer_follows(script, max_reasoning_tokens):
    watched = answered(script, script.request(max_reasoning_tokens))
    assert watched.text == expected(max_reasoning_tokens)
    completion = max_reasoning_tokens + len(script.closing_tokens) + 3
    assert watched.ending == Finished("stop", Usage(prompt=1, cached=0, completion=completion))
    assert len(watched.tokens) == completion
    assert watched.tokens[max_reasoning_tokens:][: len(script.closing_tokens)] == list(script.closing_tokens)


@pytest.mark.parametrize("max_reasoning_tokens", [None, 6, 7, 100])
def test_reasoning_that_closes_itself_is_left_alone(script, max_reasoning_tokens):
    watched = answered(script, script.request(max_reasoning_tokens))
    assert (watched.text, len(watched.tokens)) == (UNTOUCHED + ANSWER, 9)


def test_a_reply_that_never_thinks_is_left_alone(script):
    assert answered(script, script.request(1, "</think>")).text == ANSWER


def test_reasoning_that_the_prompt_opened_is_closed(script):
    watched = answered(script, script.request(2, "<think>"))
    assert watched.text == " one two" + CLOSED + ANSWER


def test_reasoning_after_newlines_whose_marks_are_cut_is_closed_at_the_limit(script):
    for max_reasoning_tokens, reasoning in [
        (3, "\n\n<think>"),
        (4, "\n\n<think> un"),
        (6, "\n\n<think> un deux</th"),
    ]:
        assert (
            answered(script, script.request(max_reasoning_tokens, "\t")).text == reasoning + CLOSED + ANSWER
        )
    assert answered(script, script.request(7, "\t")).text == "\n\n<think> un deux</think> Voila!"


def test_a_limit_before_the_opening_is_whole_closes_the_reasoning_when_it_is(script):
    assert answered(script, script.request(1, "\t")).text == "\n\n<think>" + CLOSED + ANSWER


@pytest.mark.sample(4)
@pytest.mark.parametrize("batches", [True, False], ids=["a batch", "taking turns"])
@pytest.mark.parametrize("apart", [0, 1, 2, 3])
def test_every_sequence_has_its_own_limit(script, batches, apart):
    limits = [3, None, 1, 5]
    stepper = Stepper(script.resources, batches=batches)
    sequences = []
    for max_reasoning_tokens in limits:
        sequences.append(stepper.submit(script.request(max_reasoning_tokens)))
        stepper.step(apart)
    stepper.finish(*sequences)
    assert [sequence.text for sequence in sequences] == [
        expected(max_reasoning_tokens) for max_reasoning_tokens in limits
    ]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_the_limit_of_the_reply_may_fall_into_the_closing(script, length):
    watched = answered(script, script.request(3, max_tokens=length))
    assert watched.tokens == [*script.encode(REASONING[3]), *script.closing_tokens][:length]
    assert watched.ending == Finished("length", Usage(prompt=1, cached=0, completion=length))


@pytest.mark.sample(4)
@pytest.mark.parametrize("others", [0, 2], ids=["alone", "in a batch"])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_a_request_may_give_up_around_the_closing(script, others, length):
    stepper = Stepper(script.resources)
    sequences = [
        stepper.submit(script.request(max_reasoning_tokens)) for max_reasoning_tokens in (5, 2)[:others]
    ]
    leaving = stepper.submit(script.request(3))
    stepper.step_until(lambda: len(leaving.tokens) == length)
    leaving.generation.cancel()
    sequences.append(stepper.submit(script.request(3)))
    stepper.finish(*sequences)
    assert len(leaving.tokens) == length
    assert [sequence.text for sequence in sequences] == [expected(limit) for limit in (*(5, 2)[:others], 3)]
    assert (stepper.metrics.active_sequences, stepper.metrics.failures) == (0, 0)


@pytest.mark.parametrize("others", [0, 2], ids=["alone", "in a batch"])
def test_a_closing_that_cannot_be_decoded_fails_alone(script, others):
    def token_bytes(token: int) -> bytes:
        if token == script.closing_tokens[0]:
            raise KeyError(token)
        return script.resources.token_bytes(token)

    stepper = Stepper(script.resources, token_bytes=token_bytes)
    sequences = [stepper.submit(script.request(None)) for _ in range(others)]
    failing = stepper.submit(script.request(3))
    stepper.finish(*sequences, failing)
    assert isinstance(failing.ending, Failed)
    assert failing.text == REASONING[3]
    assert [sequence.text for sequence in sequences] == [expected(None)] * others
    assert stepper.metrics.failures == 1


# -------------------------------------------------------------------------------------------- random networks

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "qwen3_next"]
CLOSING = (11, 500, 7, 42)
PROMPTS = {
    "short": tuple(range(3, 30)),
    "long": tuple(range(200, 400)),
    "near the window": tuple(range(900, 1015)),
}
"""gemma3_text here has a window of 128: one prompt is longer, and one reply grows past it."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tiny_model: Callable[..., Any]) -> EngineResources:
    return machinery_of(load(tiny_model(request.param, hidden=128, layers=2)))


def thinking(
    prompt: tuple[int, ...], max_reasoning_tokens: int, max_tokens: int, **more: Any
) -> EngineRequest:
    """A reply whose reasoning the model itself never closes."""
    reasoning = ReasoningLimit(
        max_reasoning_tokens=max_reasoning_tokens,
        starts_open=True,
        opening="",
        closing="</think>",
        closing_tokens=CLOSING,
    )
    return engine_request(prompt, max_tokens, reasoning=reasoning, **more)


def check(resources: EngineResources, watched: Watched) -> None:
    """It says what mlx_lm says up to the closing, and what mlx_lm says after all of that."""
    asked = watched.generation.request
    assert len(watched.tokens) == asked.max_tokens
    prompt, reply = asked.prompt.ids, tuple(watched.tokens)
    if asked.reasoning is None:
        Tally().compare(reply, greedy_reference(resources.network, prompt, len(reply)))
        return
    start, end = asked.reasoning.max_reasoning_tokens, asked.reasoning.max_reasoning_tokens + len(CLOSING)
    assert reply[start:end] == CLOSING
    Tally().compare(reply[:start], greedy_reference(resources.network, prompt, start))
    after = greedy_reference(resources.network, prompt + reply[:end], len(reply) - end)
    Tally().compare(reply[end:], after)


@pytest.mark.thorough
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_reasoning_tokens", [1, 20])
def test_alone_the_reply_goes_on_as_if_the_model_had_closed_the_reasoning(
    family, prompt, max_reasoning_tokens
):
    stepper = Stepper(family)
    watched = stepper.submit(thinking(PROMPTS[prompt], max_reasoning_tokens, 50))
    stepper.finish(watched)
    check(family, watched)


@pytest.mark.thorough
@pytest.mark.parametrize("batches", [True, False], ids=["a batch", "taking turns"])
def test_together_every_reply_goes_on_as_if_it_were_alone(family, batches):
    stepper = Stepper(family, batches=batches)
    asked = [thinking(prompt, n, 40) for prompt, n in zip(PROMPTS.values(), (16, 5, 16), strict=True)]
    sequences = [stepper.submit(request) for request in [*asked, engine_request(range(50, 90), 40)]]
    stepper.finish(*sequences)
    for sequence in sequences:
        check(family, sequence)


@pytest.mark.thorough
@pytest.mark.parametrize("length", [8, 9, 10, 11, 13, 14])
def test_a_newcomer_at_any_moment_of_the_closing_changes_nothing(family, length):
    """The lone sequence settles before, at and inside the closing, and goes on in a batch."""
    stepper = Stepper(family)
    first = stepper.submit(thinking(PROMPTS["near the window"], 10, 30))
    stepper.step_until(lambda: len(first.tokens) == length)
    second = stepper.submit(thinking(PROMPTS["short"], 3, 25))
    stepper.finish(first, second)
    check(family, first)
    check(family, second)


def run(stepper: Stepper, asked: EngineRequest, joined_at: int | None) -> Watched:
    """The reply to `asked`; another request joins when it has this many tokens."""
    watched = stepper.submit(asked)
    if joined_at is not None:
        stepper.step_until(lambda: len(watched.tokens) == joined_at)
        stepper.submit(engine_request(range(700, 730), 60))
    stepper.finish(watched)
    return watched


JOINED_AT = [None, 3, 9, 10, 12, 15]


@pytest.mark.thorough
def test_the_log_probabilities_of_the_closing_are_the_models_own(resources):
    for joined_at in JOINED_AT:
        asked = thinking(PROMPTS["short"], 10, 20, top_logprobs=2)
        watched = run(Stepper(resources), asked, joined_at)
        scored = [item for event in watched.seen for item in getattr(event, "logprobs", ())]
        assert [item.chosen.token for item in scored] == watched.tokens
        logits = resources.network(mx.array([[*asked.prompt.ids, *watched.tokens]]))[0]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        true = [logprobs[26 + place, token].item() for place, token in enumerate(watched.tokens)]
        assert [item.chosen.logprob for item in scored] == pytest.approx(true, abs=1e-3)
        assert all(item.chosen not in item.top for item in scored[10:14]), "the model would not have said it"


@pytest.mark.thorough
def test_a_seed_gives_the_same_reply_whoever_joins_at_the_closing(resources):
    sampling = Sampling(temperature=0.7, seed=5)
    replies = [
        run(Stepper(resources), thinking(PROMPTS["short"], 10, 40, sampling=sampling), joined_at).tokens
        for joined_at in JOINED_AT
    ]
    assert replies == [replies[0]] * len(JOINED_AT)
    assert tuple(replies[0][10:14]) == CLOSING


@pytest.mark.thorough
def test_a_repetition_penalty_sees_the_closing_tokens(resources):
    sampling = Sampling(temperature=0, repetition_penalty=1.3, repetition_context_size=100)
    for joined_at in JOINED_AT:
        reply = run(
            Stepper(resources), thinking(PROMPTS["short"], 10, 30, sampling=sampling), joined_at
        ).tokens
        stepper = Stepper(resources)
        again = stepper.submit(engine_request((*PROMPTS["short"], *reply[:14]), 16, sampling))
        stepper.finish(again)
        assert again.tokens == reply[14:]


@pytest.mark.parametrize("nth", range(1, 14))
@pytest.mark.sample(7)
def test_a_step_that_fails_loses_no_token_that_closes_the_reasoning(script, nth):
    requests = [script.request(2), script.request(3, "\t")]
    undisturbed = [Stepper(script.resources) for _ in requests]
    expected = [engine.submit(request) for engine, request in zip(undisturbed, requests, strict=True)]
    for engine, watched in zip(undisturbed, expected, strict=True):
        engine.finish(watched)
    breaks = FailsOnce(lambda shape: shape == (2, 1), nth)
    stepper = Stepper(script.resources, network=Wrapped(script.resources.network, breaks))
    replies = [stepper.submit(request) for request in requests]
    stepper.finish(*replies)
    assert [reply.text for reply in replies] == [watched.text for watched in expected]
