"""A guide holds its own sequence to a form, and leaves every other one alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.errors import ConstraintViolated
from start_llm.core.events import Failed, Finished, Idle, Text
from start_llm.core.limits import TimeLimits
from start_llm.core.sampling import Sampling
from start_llm.engine.generation import Generation
from start_llm.engine.guided import GuidedLogits
from start_llm.engine.reply_writer import ReplyWriter
from start_llm.engine.resources import EngineResources
from start_llm.engine.sequence import EngineSequence
from tests.cache.conversations import Cached
from tests.engine.harness import FailsOnce, Stepper, Undrafted, Watched, Wrapped, engine_request, seq_cache_of
from tests.engine.test_guards import VOCABULARY, at_once

PROMPT = (5, 6, 7)
OTHERS = [(8, 9), (10, 11, 12, 13)]
SCRIPT = tuple(range(20, 60))


class Reciter(Undrafted):
    """Allows the tokens of a script, one after the other; it is lost where that ends."""

    def __init__(self, script: Sequence[int], vocabulary: int = 2048) -> None:
        self._script = script
        self._vocabulary = vocabulary
        self.tokens: list[int] = []

    def advance(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def allowed(self) -> bytes:
        assert self.tokens == list(self._script[: len(self.tokens)]), "it gets every token, and once"
        if len(self.tokens) == len(self._script):
            raise ConstraintViolated("the script is over")
        mask = bytearray(self._vocabulary)
        mask[self._script[len(self.tokens)]] = 1
        return bytes(mask)


@pytest.fixture
def stepper(resources: EngineResources) -> Iterator[Stepper]:
    yield Stepper(resources)


def alone(resources: EngineResources, prompt: Sequence[int], tokens: int) -> list[int]:
    stepper = Stepper(resources)
    watched = stepper.submit(engine_request(prompt, tokens))
    stepper.finish(watched)
    return watched.tokens


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=1, seed=3)], ids=["greedy", "random"]
)
def test_a_sequence_alone_says_what_its_guide_allows(stepper: Stepper, sampling: Sampling):
    watched = stepper.submit(engine_request(PROMPT, 30, sampling, guide=Reciter(SCRIPT)))
    stepper.finish(watched)
    assert watched.tokens == list(SCRIPT[:30])
    assert isinstance(watched.ending, Finished)


@pytest.mark.thorough
def test_sequences_in_one_batch_are_guided_each_by_its_own_and_the_others_by_none(
    resources: EngineResources, stepper: Stepper
):
    free = [stepper.submit(engine_request(prompt, 24)) for prompt in OTHERS]
    guided = [
        stepper.submit(engine_request(PROMPT, 24, guide=Reciter(script))) for script in (SCRIPT, SCRIPT[::-1])
    ]
    stepper.finish(*free, *guided)
    assert [reply.tokens for reply in guided] == [list(SCRIPT[:24]), list(SCRIPT[::-1][:24])]
    assert [reply.tokens for reply in free] == [alone(resources, prompt, 24) for prompt in OTHERS]


@pytest.mark.sample(2)
@pytest.mark.parametrize("steps", range(1, 6))
def test_a_sequence_that_is_joined_and_left_stays_on_its_way(
    resources: EngineResources, stepper: Stepper, steps: int
):
    first = stepper.submit(engine_request(PROMPT, 30, guide=Reciter(SCRIPT)))
    stepper.step(steps)
    second = stepper.submit(engine_request(OTHERS[0], 6))
    stepper.finish(first, second)
    assert first.tokens == list(SCRIPT[:30])
    assert second.tokens == alone(resources, OTHERS[0], 6)


@pytest.mark.thorough
@pytest.mark.parametrize("max_sequences", [1, 2])
def test_sequences_that_take_turns_stay_on_their_way(resources: EngineResources, max_sequences: int):
    ticks = iter(range(10**6))
    stepper = Cached(
        resources,
        clock=lambda: next(ticks) / 10,
        max_sequences=max_sequences,
        time_limits=TimeLimits(preempt_after_s=1),
    )
    scripts = [SCRIPT, SCRIPT[::-1], tuple(range(100, 140))]
    sequences = [
        stepper.submit(engine_request(range(n, n + 5), 39, guide=Reciter(script)))
        for n, script in enumerate(scripts)
    ]
    stepper.finish(*sequences)
    assert stepper.metrics.preemptions > 3
    assert [sequence.tokens for sequence in sequences] == [list(script[:39]) for script in scripts]


@pytest.mark.thorough
@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after the guide"])
def test_of_a_batch_that_failed_a_guided_sequence_goes_on_as_it_was_or_fails(
    resources: EngineResources, nth: int, is_late: bool
):
    """After the guide: it has received a token that nobody has written."""
    breaks = FailsOnce(lambda shape: shape == (3, 1), nth)
    late = Late(resources.network, breaks) if is_late else Wrapped(resources.network, breaks)
    stepper = Stepper(resources, network=late)
    guided = stepper.submit(engine_request(PROMPT, 24, guide=Reciter(SCRIPT)))
    free = [stepper.submit(engine_request(prompt, 24)) for prompt in OTHERS]
    stepper.finish(*free, guided)
    assert stepper.metrics.failures == 1
    assert nth == 1 or isinstance(guided.ending, Failed) == is_late, "at first it may have joined just then"
    assert guided.tokens == list(SCRIPT[: len(guided.tokens)])
    assert isinstance(guided.ending, Failed) or len(guided.tokens) == 24
    assert [reply.tokens for reply in free] == [alone(resources, prompt, 24) for prompt in OTHERS]


class Late:
    """Breaks when its logits are wanted for the sequence after the guided one."""

    def __init__(self, network: Any, breaks: FailsOnce) -> None:
        self._network, self._breaks = network, breaks

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        logits = self._network(tokens, cache=cache)
        return BrokenBehind(logits, self._breaks) if tokens.shape == (3, 1) else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class BrokenBehind:
    """Logits that can be taken for each sequence, and not for all at once."""

    def __init__(self, logits: mx.array, breaks: FailsOnce) -> None:
        self._logits, self._breaks = logits, breaks

    def __getitem__(self, place: Any) -> Any:
        return Rows(self._logits[place], self._breaks)


class Rows(BrokenBehind):
    def __getitem__(self, place: Any) -> Any:
        if place.stop == 3:
            sequence = self._logits[place]
            self._breaks((3, 1))
            return sequence
        return self._logits[place]


@pytest.mark.sample(2)
@pytest.mark.parametrize("together", [True, False], ids=["in a batch", "alone"])
def test_a_guide_that_is_lost_fails_its_own_request_and_no_other(
    resources: EngineResources, stepper: Stepper, together: bool
):
    free = [stepper.submit(engine_request(prompt, 24)) for prompt in OTHERS if together]
    lost = stepper.submit(engine_request(PROMPT, 24, guide=Reciter(SCRIPT[:5])))
    stepper.finish(*free, lost)
    assert isinstance(lost.ending, Failed)
    assert "the script is over" in lost.ending.message
    assert lost.tokens == list(SCRIPT[: len(lost.tokens)])
    assert [reply.tokens for reply in free] == [alone(resources, prompt, 24) for prompt in OTHERS if together]
    assert _still_works(stepper)


def test_a_reply_whose_guide_is_lost_ends_beside_many_others_too():
    """Of many replies most readers are not woken by each token; here nobody is, as no time passes."""
    stepper = at_once(max_sequences=9)
    free = [stepper.submit(engine_request((8, place), 12)) for place in range(8)]
    lost = stepper.submit(engine_request(PROMPT, 12, guide=Reciter(SCRIPT[:5], VOCABULARY)))
    stepper.finish(*free)
    assert isinstance(lost.look()[-1], Failed)
    assert lost.tokens == list(SCRIPT[: len(lost.tokens)])


def test_a_reply_that_ends_with_its_script_does_not_fail(stepper: Stepper):
    watched = stepper.submit(engine_request(PROMPT, 5, guide=Reciter(SCRIPT[:5])))
    stepper.finish(watched)
    assert isinstance(watched.ending, Finished)


def test_nothing_that_is_forbidden_is_reported_as_an_alternative(stepper: Stepper):
    watched = stepper.submit(engine_request(PROMPT, 4, guide=Reciter(SCRIPT), top_logprobs=5))
    stepper.finish(watched)
    scored = [entry for event in watched.seen if isinstance(event, Text) for entry in event.logprobs]
    assert [[top.token for top in entry.top] for entry in scored] == [[token] for token in SCRIPT[:4]]


def test_what_a_guide_forbids_cannot_be_sampled():
    guided = GuidedLogits(Reciter(SCRIPT), prompt_length=2)
    tokens, logits = mx.array([5, 6]), mx.zeros((1, 2048))
    for token in SCRIPT[:3]:
        left = guided(tokens, logits)
        assert (mx.argmax(left).item(), int((left > float("-inf")).sum())) == (token, 1)
        tokens = mx.concatenate([tokens, mx.array([token])])


def test_a_sequence_whose_guide_is_lost_fails_with_its_next_token():
    asked = engine_request(PROMPT, 24, guide=Reciter(()))
    sequence = EngineSequence(
        Generation(asked), ReplyWriter(asked, lambda _: b"a", frozenset()), seq_cache_of([])
    )
    sequence.processors[-1](mx.array(PROMPT), mx.zeros((1, 2048)))
    assert not sequence.accept(20)
    sequence.generation.send()
    assert isinstance(sequence.generation.take(0)[-1], Failed)
    assert sequence.generation.cancelled
    assert not sequence.accept(21)
    sequence.generation.send()
    assert sequence.generation.take(0) == [Idle()]
    assert sequence.tokens == [*PROMPT, 20, 21]


def _still_works(stepper: Stepper) -> bool:
    after: Watched = stepper.submit(engine_request(PROMPT, 4))
    stepper.finish(after)
    return isinstance(after.ending, Finished)
